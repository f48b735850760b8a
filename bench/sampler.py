"""Room bench: looks at /metrics once a second while a load runs. A look that fails is a gap, and ends nothing."""

import random
import threading
import time
from collections.abc import Iterator
from typing import Self

from bench.counters import Sample, read_sample

INTERVAL_S = 1.0
LIMIT_S = 2.0


def pauses_s(interval_s: float = INTERVAL_S) -> Iterator[float]:
    """The times between looks: from half of `interval_s` to one and a half of it, `interval_s` on average.

    Streams that run in step have a period; looks at even times could see the same phase of it over and over.
    """
    rng = random.Random(0)  # noqa: S311 (no secret: just uneven, and the same each time)
    while True:
        yield interval_s * rng.uniform(0.5, 1.5)


class CounterSampler:
    """A thread of looks. As a context manager it looks from its entry to its exit; `samples` are what it saw."""

    def __init__(self, url: str, interval_s: float = INTERVAL_S) -> None:
        """Look at `url`/metrics every `interval_s` seconds, on average."""
        self.samples: list[Sample] = []
        self._url, self._interval_s = url, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="counters", daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self.samples.append(self.look())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End: the look that is going on is waited for, LIMIT_S at most."""
        self._stop.set()
        self._thread.join()

    def look(self) -> Sample:
        """Look now."""
        return read_sample(self._url, time.monotonic(), LIMIT_S)

    def latest(self) -> Sample:
        """The last look."""
        return self.samples[-1]

    def _work(self) -> None:
        due = time.monotonic()
        for pause_s in pauses_s(self._interval_s):
            due = max(due + pause_s, time.monotonic())
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
            self.samples.append(self.look())
