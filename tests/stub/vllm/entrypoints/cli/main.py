"""A stand-in for an engine's process, for failures that a real engine can't be made to show on demand.

`STUB` chooses the behaviour: ready, die, hang, no-completion, stubborn (ignores SIGTERM, leaves a child).
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import time

STARTED = time.monotonic()


class Answers(http.server.BaseHTTPRequestHandler):
    """Just enough of vLLM's API to be asked whether it is ready."""

    def do_GET(self):
        """Answer /health, and /metrics: two requests in flight until STUB_BUSY_S have passed."""
        if self.path == "/metrics":
            busy = time.monotonic() - STARTED < float(os.environ.get("STUB_BUSY_S", "0"))
            gauge = "vllm:num_requests_running"
            return self._reply(200, f"# TYPE {gauge} gauge\n{gauge} {2 if busy else 0}\n".encode())
        return self._send(200, {})

    def do_POST(self):
        """Answer a completion, or refuse it."""
        wanted = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if os.environ["STUB"] == "no-completion":
            return self._send(404, {"message": f"The model {wanted['model']} does not exist."})
        return self._send(200, {"usage": {"completion_tokens": 2}})

    def _send(self, status: int, body: dict) -> None:
        self._reply(status, json.dumps(body).encode())

    def _reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Behave as STUB says."""
    behaviour = os.environ["STUB"]
    if behaviour == "die":
        sys.exit("RuntimeError: the stub engine ends here")
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # A child in a session of its own, as engines' workers may be: still ours to end.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()


if __name__ == "__main__":
    main()
