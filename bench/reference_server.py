"""Room bench: an engine with known truth behind vLLM's API: it calibrates clients and guards, and is never judged.

    python -m bench.reference_server --port 8000 --step-ms 20 --acceptance 0.8 --fault straggler@40+1

GET /truth says what was really done: every step's begin, end (CLOCK_MONOTONIC, s), tokens and requests in
flight, and the true steady rate. There is no model: the text is noise.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from bench.reference.engine import Chunk, Engine, Request, Settings
from bench.reference.faults import FAULTS, Fault, parse_fault
from bench.reference.http import Call, Connection, as_json
from bench.reference.metrics import exposition
from images.console import note
from images.errors import Problem, UsageProblem

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 "
LOOP = "ab" * 50_000
DEATH_STATUS = 70


class ReferenceServer:
    """Serves one engine. `version` is what /version answers; a string prompt has `count_tokens` of it tokens."""

    def __init__(
        self,
        engine: Engine,
        model: str = "reference",
        version: str = "reference",
        faults: tuple[Fault, ...] = (),
        count_tokens: Callable[[str], int] = len,
        boot_s: float = 0.0,
    ) -> None:
        """Make the server; `run` starts it. /health says 503 for the first `boot_s` seconds."""
        self._engine, self._model, self._version = engine, model, version
        self._die = next((fault for fault in faults if fault.kind == "die"), None)
        self._count_tokens = count_tokens
        self._ready_s = time.monotonic() + boot_s
        self._streams: dict[Request, Connection] = {}
        self._work = asyncio.Event()
        self._text = "".join(random.Random(engine.settings.seed).choices(ALPHABET, k=100_000))  # noqa: S311
        self._head = as_json(
            {"id": "cmpl-0", "object": "text_completion", "created": int(time.time()), "model": model, "choices": 0}
        ).removesuffix(b"0}")

    async def run(self, host: str, port: int, started: Callable[[int], None] = lambda _port: None) -> None:
        """Serve until cancelled.

        Raises UsageProblem when the port is taken.
        """
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(lambda: Connection(self._answer), host, port, backlog=4096)
        except OSError as error:
            raise UsageProblem(f"can't listen on {host}:{port}: {error.strerror}; choose another --port") from error
        async with server:
            started(server.sockets[0].getsockname()[1])
            await self._steps()

    async def _steps(self) -> None:
        """Step after step on a schedule of its own: a late step doesn't make the next one late."""
        while True:
            if self._engine.idle:
                self._work.clear()
                await self._work.wait()
                due = began = time.monotonic()
            step_s = self._engine.step_s()
            due += step_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            chunks = self._engine.step(began, now)
            if now - due > step_s:
                due = now  # overloaded: what is lost isn't caught up with
            began = now
            for chunk in chunks:
                self._send(chunk)
            if self._die and self._engine.submitted > self._die.after:
                os._exit(DEATH_STATUS)

    def _send(self, chunk: Chunk) -> None:
        request = chunk.request
        connection = self._streams.get(request)
        if connection is None:
            return
        if chunk.finish == "error":
            connection.event(as_json({"error": {"message": "EngineCore encountered an issue", "code": 500}}))
        elif connection.stream:
            connection.event(self._chunk(request, chunk))
        if chunk.finish:
            del self._streams[request]
            self._finish(request, connection, chunk.finish)

    def _chunk(self, request: Request, chunk: Chunk) -> bytes:
        finish = b'"%b"' % chunk.finish.encode() if chunk.finish else b"null"
        return (
            b'%b[{"index":0,"text":"%b","logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":null,'
            b'"prompt_logprobs":null,"prompt_token_ids":null}],"usage":null}'
        ) % (self._head, self._words(request, request.emitted - chunk.tokens, chunk.tokens), finish)

    def _words(self, request: Request, begin: int, tokens: int) -> bytes:
        """One letter a token."""
        if request.loops:
            return LOOP[begin : begin + tokens].encode()
        offset = (request.index * 7919) % (len(self._text) // 2)
        return self._text[offset + begin : offset + begin + tokens].encode()

    def _finish(self, request: Request, connection: Connection, reason: str) -> None:
        usage = {
            "prompt_tokens": request.prompt_tokens,
            "total_tokens": request.prompt_tokens + request.emitted,
            "completion_tokens": request.emitted,
        }
        if connection.stream:
            if reason != "error":
                connection.event(b'%b[],"usage":%b}' % (self._head, as_json(usage)))
            connection.end_events()
            return
        connection.on_lost = None
        choice = {
            "index": 0,
            "text": self._words(request, 0, request.emitted).decode(),
            "logprobs": None,
            "finish_reason": reason,
        }
        connection.answer(200, b'%b%b,"usage":%b}' % (self._head, as_json([choice]), as_json(usage)))

    def _answer(self, call: Call, connection: Connection) -> None:
        routes = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): lambda _call, to: to.answer(200, as_json({"version": self._version})),
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/truth"): self._truth,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/v1/completions"): self._completions,
        }
        route = routes.get((call.method, call.path))
        if route is None:
            connection.answer(404, as_json({"error": f"{call.method} {call.path} is not served"}))
            return
        try:
            route(call, connection)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            connection.answer(400, as_json({"error": f"{type(error).__name__}: {error}"}))

    def _health(self, _call: Call, connection: Connection) -> None:
        connection.answer(200 if time.monotonic() >= self._ready_s else 503, b"")

    def _models(self, _call: Call, connection: Connection) -> None:
        model = {"id": self._model, "object": "model", "owned_by": "reference"}
        connection.answer(200, as_json({"object": "list", "data": [model]}))

    def _metrics(self, _call: Call, connection: Connection) -> None:
        if self._engine.active("metrics-outage"):
            connection.answer(503, b"")
        else:
            connection.answer(200, exposition(self._engine, self._model), "text/plain; version=0.0.4; charset=utf-8")

    def _truth(self, call: Call, connection: Connection) -> None:
        streams = int(call.query["concurrency"]) if "concurrency" in call.query else None
        connection.answer(200, as_json(self._engine.truth.as_dict(streams, float(call.query.get("since_s", 0)))))

    def _tokenize(self, call: Call, connection: Connection) -> None:
        count = self._prompt_tokens(json.loads(call.body)["prompt"])
        connection.answer(200, as_json({"count": count, "max_model_len": 131072, "tokens": list(range(count))}))

    def _prompt_tokens(self, prompt: object) -> int:
        if isinstance(prompt, str):
            return self._count_tokens(prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            return len(prompt)
        raise ValueError("wanted prompt as one text or one list of token ids")

    def _completions(self, call: Call, connection: Connection) -> None:
        body = json.loads(call.body)
        if body["model"] != self._model:
            connection.answer(404, as_json({"error": f"the model {body['model']!r} does not exist"}))
            return
        tokens, wanted = self._prompt_tokens(body["prompt"]), int(body.get("max_tokens") or 16)
        if wanted < 1:
            raise ValueError("wanted max_tokens of 1 or more")
        request = self._engine.submit(tokens, wanted, time.monotonic())
        if request is None and self._engine.active("reset"):
            connection.reset()
            return
        if request is None:
            connection.answer(503, as_json({"error": "refused"}))
            return
        connection.stream = bool(body.get("stream"))
        if connection.stream:
            connection.begin_events()
        self._streams[request] = connection
        connection.on_lost = lambda: self._lost(request)
        self._work.set()

    def _lost(self, request: Request) -> None:
        self._streams.pop(request, None)
        self._engine.cancel(request)


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(",") if part)
    if any(not 0 <= rate <= 1 for rate in rates) or list(rates) != sorted(rates, reverse=True):
        raise argparse.ArgumentTypeError("wanted shares from 0 to 1 that do not rise, such as 0.80,0.55,0.35")
    return rates


def _parser() -> argparse.ArgumentParser:
    faults = "\n".join(f"  {name:17} {what}" for name, (what, _) in FAULTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.reference_server",
        description="An engine with known truth. See GET /truth.",
        epilog=f"faults, as NAME[@AFTER[+COUNT]] by number of request:\n{faults}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one, printed")
    parser.add_argument("--model", default="reference", help="the name clients ask for")
    parser.add_argument("--engine-version", default="reference", help="what /version answers")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--tokens-per-step", type=int, default=1, help="as if that many less one drafts were accepted")
    parser.add_argument("--acceptance", type=_rates, default=(), help="share of drafts accepted up to each position")
    parser.add_argument("--stream-interval", type=int, default=1, help="steps a chunk")
    parser.add_argument("--prefill-ms", type=float, default=20.0)
    parser.add_argument("--max-running", type=int, default=4096)
    parser.add_argument("--stall-s", type=float, default=3.0, help="how long the fault cold-jit takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--boot-s", type=float, default=0.0, help="/health answers 503 for so long")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json that counts prompts; else a letter is a token")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME[@AFTER[+COUNT]]")
    return parser


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The engine's settings from the command line.

    Raises UsageProblem naming the option that can't be.
    """
    if arguments.acceptance and arguments.tokens_per_step != 1:
        raise UsageProblem("--acceptance and --tokens-per-step both say how many tokens a step gives: leave one out")
    for name in ("step_ms", "tokens_per_step", "stream_interval", "max_running"):
        if not getattr(arguments, name) > 0:
            raise UsageProblem(f"--{name.replace('_', '-')} {getattr(arguments, name)}: wanted more than 0")
    return Settings(
        step_s=arguments.step_ms / 1e3,
        acceptance=arguments.acceptance or (1.0,) * (arguments.tokens_per_step - 1),
        stream_interval=arguments.stream_interval,
        prefill_s=arguments.prefill_ms / 1e3,
        max_running=arguments.max_running,
        stall_s=arguments.stall_s,
        seed=arguments.seed,
    )


async def _serve(arguments: argparse.Namespace) -> None:
    faults = tuple(parse_fault(text) for text in arguments.fault)
    engine = Engine(settings_of(arguments), faults)
    count = len
    if arguments.tokenizer:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
        count = lambda text: len(tokenizer.encode(text).ids)  # noqa: E731
    server = ReferenceServer(engine, arguments.model, arguments.engine_version, faults, count, arguments.boot_s)
    task = asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await server.run(
        arguments.host, arguments.port, lambda port: note(f"reference server on http://{arguments.host}:{port}")
    )


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; 0 then, 2 for a wrong option."""
    try:
        asyncio.run(_serve(_parser().parse_args(argv)))
    except asyncio.CancelledError:
        return 0
    except Problem as problem:
        note(f"✘ {problem}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
