"""Room bench: what to do about a guard that failed, in one line a guard."""

QUIET = "the machine was busy or stood still: end other work on it, run again"
CLIENTS = "./inv ceiling measures once what one client can do, then more of them share the load (not in a container)"
SOMEBODY_ELSE = (
    "somebody else's requests reached the server, or the client lost some: give it a port of its own, run again"
)
ENGINE_LOG = "the cause is in the server's log: boots/<n>/server.log.gz of the run"
OTHER_SETTINGS = "./inv render --recipe R shows what was meant; boots/<n>/argv.json and env.json what ran"

REMEDIES = {
    "seal": "files of the run were changed after it ended: take it from where it was made, or run again",
    "finished": f"mend the cause named here and run again; {ENGINE_LOG}",
    "completed": ENGINE_LOG,
    "client_errors": ENGINE_LOG,
    "finish_counters": SOMEBODY_ELSE,
    "output_lengths": "the engine ended outputs early or late: ignore_eos must reach it; no proxy may shorten streams",
    "generation_tokens": SOMEBODY_ELSE,
    "prompt_tokens": "the server counts other tokens than were sent: another tokenizer, a chat template, other traffic",
    "prefix_hits": "switch prefix caching off (--no-enable-prefix-caching), or use a seed the server hasn't seen",
    "preemptions": "the KV cache is too small for the load: fewer streams, a shorter max-model-len, or more memory",
    "same_server": f"the engine was restarted inside a window: {ENGINE_LOG}",
    "engine_version": "serve the version the recipe pins, or name this one under engine.substitutes",
    "live_argv": OTHER_SETTINGS,
    "live_env": f"{OTHER_SETTINGS}; what a service or an image sets beside it: declare it (engine.env)",
    "log_proof": f"a setting had no effect: {ENGINE_LOG}",
    "quality_complete": ENGINE_LOG,
    "image_digest": "the container had another image than the lock: ./inv build --recipe R, or ./inv image.load",
    "uninterrupted": "nothing may restart the machine or its Docker engine between windows: run again",
    "counter_gaps": QUIET,
    "acceptance": "prompts and checkpoint must be the claim's, acceptance depends on both (./inv compare)",
    "peak": "client and server disagree about the rate: nothing may buffer the streams between them; run again",
    "little": "requests waited where the server doesn't see them: no proxy in between; run again",
    "straggler": "one request took far longer than the others: end other work on the machine, run again",
    "degenerate_text": "outputs repeat themselves, which drafts too well: use real prompts and check the weights",
    "dispatch_delay": f"the load client was late: end other work; {CLIENTS}",
    "cold_engine": "compiling in the log: the caches were empty, run again; else the machine was busy",
    "client_saturation": f"the load client was the limit: {CLIENTS}",
    "running": "the server's memory had no room for all streams at once (its log: Maximum concurrency), so they "
    "queued: ask for fewer (ladder --shape), for fewer drafts, or take a larger card",
    "telemetry_gaps": QUIET,
    "gpu_lost": "the driver lost the GPU: dmesg, ./inv doctor",
    "throttle": "the GPU was held back: cooling and power supply, then run again; ./inv doctor shows it",
    "power_cap": "set the card's default power limit (nvidia-smi -pl), or publish under the limit in force",
    "gpu_alone": "another process used the GPU: nvidia-smi names it; end it, run again",
}
