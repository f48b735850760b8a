"""Room bench: whether the load client was the limit: how late it sent its next request. Pure."""

import numpy as np

from bench.analyse import Arrays, succeeded


def dispatch_delay(arrays: Arrays) -> float | None:
    """Mean s between a stream's slot becoming free and its next request being sent; None without a second wave.

    A client with C_i streams sends C_i requests at once and then one for each that ends, first come first
    served: sorted, its start number C_i + j belongs to its end number j. What lies between is the client at
    work, not the server. An end is the arrival of the last token, so the end of the stream is in it too.
    """
    client = arrays.get("client", np.zeros(len(arrays["start_s"]), np.int16))
    delays = [_delays(arrays, client == number) for number in np.unique(client)]
    found = np.concatenate(delays) if delays else np.empty(0)
    return float(found.mean()) if len(found) else None


def dispatch_share(arrays: Arrays) -> float | None:
    """The mean dispatch delay over the median TTFT; None where either can't be told."""
    delay, good = dispatch_delay(arrays), succeeded(arrays)
    if delay is None or not good.any():
        return None
    ttft = float(np.median(arrays["ttft_s"][good]))
    return delay / ttft if ttft > 0 else None


def _delays(arrays: Arrays, mine: np.ndarray) -> np.ndarray:
    starts = np.sort(arrays["start_s"][mine])
    ends = np.sort((arrays["start_s"] + arrays["e2e_s"])[mine])
    streams = int((starts <= ends[0]).sum())
    later = starts[streams:]
    return np.maximum(0.0, later - ends[: len(later)])
