"""Room bench: a step-synchronous engine whose truth is known. Pure: time is handed in, real or simulated."""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.reference.faults import Fault
from bench.reference.truth import Truth

SLOW_FACTOR = 3
PREEMPTED_STEPS = 20
TEMPLATE_TOKENS = 9
HIDDEN_S = 0.5
UNCOUNTED_EVERY = 50  # one token in 50 is 2%


@dataclass(frozen=True)
class Settings:
    """How the engine works.

    A step takes `step_s` seconds and gives every running stream 1 token plus the accepted draft tokens:
    `acceptance` holds, for each draft position, the share of drafts accepted up to there, so the acceptance
    length is 1 + sum(acceptance). A prompt takes `prefill_s`, whatever else runs. A chunk leaves every
    `stream_interval` steps. At most `max_running` requests run, the others wait.
    """

    step_s: float = 0.02
    acceptance: tuple[float, ...] = ()
    stream_interval: int = 1
    prefill_s: float = 0.02
    max_running: int = 256
    stall_s: float = 3.0
    seed: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens a step, on average."""
        return 1 + sum(self.acceptance)


@dataclass(slots=True, eq=False)
class Request:
    """A request in the engine. `target`: tokens after which it ends; `reported`: what usage will say."""

    index: int
    prompt_tokens: int
    target: int
    arrived_s: float
    admitted_s: float = 0.0
    emitted: int = 0
    pending: int = 0
    steps: int = 0
    resting: int = 0
    error_at: int | None = None
    slow: bool = False
    loops: bool = False
    ended: bool = False
    rng: random.Random = field(default_factory=random.Random)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` of a request leave the engine; `finish` is the reason when they are the last, error included."""

    request: Request
    tokens: int
    finish: str | None


class Engine:
    """Runs requests step by step; `counters` and `gauges` are what /metrics would say."""

    def __init__(self, settings: Settings, faults: Iterable[Fault] = ()) -> None:
        """An empty engine."""
        self.settings = settings
        self.truth = Truth()
        self.submitted = 0
        self.running: list[Request] = []
        self._held: deque[Request] = deque()
        self._waiting: deque[Request] = deque()
        self._faults = {fault.kind: fault for fault in faults}
        self._slow_steps = self._stalls = self._preempted = self._tokens_since = 0
        self._was_reset = False
        self.counters: dict[str, float] = {}
        self.e2e = (0, 0.0)  # requests that finished, and the sum of their E2E (s) as the engine sees it
        self._zero()

    def _zero(self) -> None:
        names = ["prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"]
        names += [f"request_success:{reason}" for reason in ("stop", "length", "abort", "error", "repetition")]
        if self.settings.acceptance:
            names += ["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
            names += [f"spec_decode_num_accepted_tokens_per_pos:{i}" for i in range(len(self.settings.acceptance))]
        self.counters = dict.fromkeys(names, 0.0)
        self.e2e = (0, 0.0)

    def _has(self, kind: str, index: int) -> bool:
        fault = self._faults.get(kind)
        return fault is not None and fault.takes(index)

    def active(self, kind: str) -> bool:
        """Whether a fault has begun and not ended, by the number of requests submitted so far."""
        return self.submitted > 0 and self._has(kind, self.submitted - 1)

    @property
    def gauges(self) -> dict[str, float]:
        """num_requests_running, num_requests_waiting, kv_cache_usage_perc."""
        running = len(self.running)
        return {
            "num_requests_running": running,
            "num_requests_waiting": len(self._waiting),
            "kv_cache_usage_perc": running / self.settings.max_running,
        }

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.running or self._waiting or self._held)

    def submit(self, prompt_tokens: int, max_tokens: int, now: float) -> Request | None:
        """A request arrives at `now` (s); None when it is refused, or its connection reset."""
        index = self.submitted
        self.submitted += 1
        if self._has("refuse", index) or self._has("reset", index):
            return None
        request = Request(index, prompt_tokens, max_tokens, now)
        request.rng.seed(f"{self.settings.seed}/{index}")
        request.slow, request.loops = self._has("straggler", index), self._has("repetition", index)
        if self._has("chat-template", index):
            request.prompt_tokens += TEMPLATE_TOKENS
        if self._has("short-output", index):
            request.target = max(1, max_tokens * 3 // 4)
        if self._has("extra-tokens", index):
            request.target += 1
        if self._has("error-event", index):
            request.error_at = max(1, max_tokens // 2)
        if self._has("hidden-queue", index):
            request.arrived_s += HIDDEN_S
            self._held.append(request)
        else:
            self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """The client went away."""
        if request.ended:
            return
        request.ended = True
        for queue in (self.running, self._waiting, self._held):
            if request in queue:
                queue.remove(request)
        self.counters["request_success:abort"] += 1

    def step_s(self) -> float:
        """How long the next step takes (s)."""
        slow, jit = self._faults.get("slow-start"), self._faults.get("cold-jit")
        if slow and self.submitted > slow.after and self._slow_steps < (slow.count or 0):
            self._slow_steps += 1
            return self.settings.step_s * SLOW_FACTOR
        if jit and self.submitted > jit.after and self._stalls < (jit.count or 0):
            self._stalls += 1
            return self.settings.step_s + self.settings.stall_s
        return self.settings.step_s

    def step(self, begin_s: float, end_s: float) -> list[Chunk]:
        """Do one step that lasted from `begin_s` to `end_s`; what leaves the engine at its end."""
        self._admit(begin_s)
        self._disturb()
        in_flight = len(self.running) + len(self._waiting) + len(self._held)
        prefilled = end_s - self.settings.prefill_s + 1e-9
        chunks, tokens, drafts, accepted = [], 0, 0, 0
        for request in self.running:
            if request.admitted_s > prefilled:
                continue
            request.steps += 1
            if request.resting:
                request.resting -= 1
                continue
            if request.slow and request.steps % SLOW_FACTOR:
                continue
            made = 1
            if request.emitted and self.settings.acceptance:
                drafts += 1
                made += self._accept(request)
                accepted += made - 1
            made = min(made, request.target - request.emitted)
            tokens += made
            chunk = self._emit(request, made)
            if chunk:
                chunks.append(chunk)
        self._count(tokens, drafts, accepted)
        self.truth.add(begin_s, end_s, tokens, in_flight, drafts, accepted)
        ended = [chunk.request for chunk in chunks if chunk.finish]
        if ended:
            spent = sum(end_s - request.arrived_s for request in ended)
            self.e2e = (self.e2e[0] + len(ended), self.e2e[1] + spent)
            self.running = [request for request in self.running if not request.ended]
        return chunks

    def _admit(self, now: float) -> None:
        while self._held and self._held[0].arrived_s <= now:
            self._waiting.append(self._held.popleft())
        while self._waiting and len(self.running) < self.settings.max_running and self._waiting[0].arrived_s <= now:
            request = self._waiting.popleft()
            request.admitted_s = now
            self.running.append(request)
            self.counters["prompt_tokens"] += request.prompt_tokens
            self.counters["prefix_cache_queries"] += request.prompt_tokens
            if self._has("prefix-hits", request.index):
                self.counters["prefix_cache_hits"] += request.prompt_tokens // 10

    def _disturb(self) -> None:
        reset, preempt = self._faults.get("counter-reset"), self._faults.get("preempt")
        if reset and self.submitted > reset.after and not self._was_reset:
            self._was_reset = True
            self._zero()
        if preempt and self.submitted > preempt.after and self._preempted < (preempt.count or 0) and self.running:
            self._preempted += 1
            self.running[-1].resting = PREEMPTED_STEPS
            self.counters["num_preemptions"] += 1

    def _accept(self, request: Request) -> int:
        """How many draft tokens are accepted: at least i of them with the probability of position i."""
        count, draw = 0, request.rng.random()
        for position, share in enumerate(self.settings.acceptance):
            if draw >= share and not request.loops:
                break
            count += 1
            self.counters[f"spec_decode_num_accepted_tokens_per_pos:{position}"] += 1
        return count

    def _emit(self, request: Request, made: int) -> Chunk | None:
        first = request.emitted == 0
        request.emitted += made
        request.pending += made
        if request.error_at is not None and request.emitted >= request.error_at:
            return self._end(request, "error")
        if request.emitted >= request.target:
            return self._end(request, "length")
        if first or request.steps % self.settings.stream_interval == 0:
            chunk = Chunk(request, request.pending, None)
            request.pending = 0
            return chunk
        return None

    def _end(self, request: Request, reason: str) -> Chunk:
        request.ended = True
        self.counters[f"request_success:{reason}"] += 1
        return Chunk(request, request.pending, reason)

    def _count(self, tokens: int, drafts: int, accepted: int) -> None:
        self.counters["generation_tokens"] += tokens
        if self.active("uncounted-tokens"):
            self._tokens_since += tokens
            more, self._tokens_since = divmod(self._tokens_since, UNCOUNTED_EVERY)
            self.counters["generation_tokens"] += more
        if self.settings.acceptance:
            self.counters["spec_decode_num_drafts"] += drafts
            self.counters["spec_decode_num_draft_tokens"] += drafts * len(self.settings.acceptance)
            self.counters["spec_decode_num_accepted_tokens"] += accepted
