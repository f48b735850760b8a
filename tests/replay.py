"""The recorded /metrics of a real vLLM, served again with counters that grow as they did, and the gauges of a loaded server."""

import gzip
import http.server
import re
import threading
import time
from pathlib import Path

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "monitoring"
IDLE, LOADED = FIXTURES / "vllm-idle.txt.gz", FIXTURES / "vllm-loaded.txt.gz"
SAMPLE = re.compile(r"^([\w:]+(?:\{.*\})?) (\S+)$", re.M)
PERIOD_S = 10.0
GAUGES = {"vllm:num_requests_running": 6.0, "vllm:num_requests_waiting": 2.0, "vllm:kv_cache_usage_perc": 0.3}
# What the recording's server had switched off, or never did.
GROWS = {
    "vllm:prefix_cache_queries_total": 100.0,
    "vllm:prefix_cache_hits_total": 40.0,
    "vllm:num_preemptions_total": 1.0,
}


def recorded(file: Path) -> str:
    """What the server said."""
    return gzip.decompress(file.read_bytes()).decode()


def samples(file: Path) -> dict[str, float]:
    """Name with labels to value."""
    return {name: float(value) for name, value in SAMPLE.findall(recorded(file))}


def families(text: str) -> dict[str, str]:
    """Metric to its type."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))


class Replay(http.server.ThreadingHTTPServer):
    """Every counter and bucket goes on as between the two recordings, once each PERIOD_S."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Answers)
        self.started = time.monotonic()
        self.before, self.after = samples(IDLE), samples(LOADED)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def text(self) -> str:
        """The exposition now."""
        periods = (time.monotonic() - self.started) / PERIOD_S

        def now(match: re.Match) -> str:
            name = match[1].split("{")[0]
            grown = self.after[match[1]] + periods * (self.after[match[1]] - self.before[match[1]] + GROWS.get(name, 0))
            return f"{match[1]} {GAUGES.get(name, grown)}"

        return SAMPLE.sub(now, recorded(LOADED))

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Answers(http.server.BaseHTTPRequestHandler):
    """GET anything."""

    def do_GET(self) -> None:
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""
