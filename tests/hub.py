"""A model hub on loopback that speaks the real one's URLs, with switches for what goes wrong in the world."""

import hashlib
import http.server
import json
import threading
import time
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"
REPO = "maker/small-model"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """Serves `files` of REPO at REVISION. Large ones ('.safetensors') are LFS: redirected to a network of another origin.

    Switches: `drop_after` {name: [bytes]} cuts the connection there, one request each; `answers` {path: [(status, headers) or
    None]} come first, None is the true answer; `alter` {name: data} is sent instead of the true content; `api` False is a plain mirror; `ranges` False
    ignores Range; `token` is demanded; `pause_s` slows each 64 KiB. `seen` is every request, with its headers.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files, self.token, self.api, self.ranges, self.pause_s = files, None, True, True, 0.0
        self.drop_after, self.answers, self.alter, self.told = {}, {}, {}, {}
        self.seen, self.sent, self.command_lines = [], 0, []
        self.network = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_) -> None:
        """A client that was ended is no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def network_url(self) -> str:
        """The content network: the same files under another origin."""
        if self.network is None:
            self.network = Hub(self.files)
            self.network.hub = self
        return self.network.url

    def close(self) -> None:
        for server in (self, self.network):
            if server is not None:
                server.shutdown()
                server.server_close()


class Answers(http.server.BaseHTTPRequestHandler):
    """The hub's answers."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = getattr(self.server, "hub", self.server)
        path = self.path.split("?")[0]
        hub.seen.append((self.command, path, dict(self.headers), self.server is hub))
        hub.command_lines.append("\n".join(line_of(each) for each in Path("/proc").glob("[0-9]*/cmdline")))
        other = hub.answers[path].pop(0) if hub.answers.get(path) else None
        if other:
            return self._send(other[0], b"", **other[1])
        if self.server is not hub:
            return self._file(hub, path.removeprefix("/lfs/"))
        return self._answer(hub, path)

    def _answer(self, hub: Hub, path: str) -> None:
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._send(401, b'{"error": "Invalid credentials"}')
        if path == f"/api/models/{REPO}/revision/{REVISION}" and hub.api:
            return self._send(
                200, json.dumps({"id": REPO, "sha": REVISION, "siblings": siblings(hub), **hub.told}).encode()
            )
        name = path.removeprefix(f"/{REPO}/resolve/{REVISION}/")
        if name not in hub.files:
            return self._send(404, b'{"error": "Entry not found"}')
        if name.endswith(".safetensors") and hub.api:
            return self._send(
                302,
                b"",
                Location=f"{hub.network_url}/lfs/{name}",
                **{"X-Linked-Etag": f'"{sha256(hub.files[name])}"', "X-Linked-Size": str(len(hub.files[name]))},
            )
        return self._file(hub, name)

    def _file(self, hub: Hub, name: str) -> None:
        data = hub.alter.get(name, hub.files[name])
        start = 0
        asked = self.headers.get("Range")
        if asked and hub.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        drops = hub.drop_after.get(name)
        end = min(len(data), start + drops.pop(0)) if drops else len(data)
        for at in range(start, end, 65536):
            self.wfile.write(data[at : min(at + 65536, end)])
            hub.sent += min(at + 65536, end) - at
            time.sleep(hub.pause_s)
        if end < len(data):
            self.close_connection = True
            self.connection.close()

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Say nothing."""


def siblings(hub: Hub) -> list[dict]:
    """The files as the real API lists them with ?blobs=true: sizes, git blob ids, sha256 of LFS files."""
    found = []
    for name, data in hub.files.items():
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        lfs = (
            {"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 134}}
            if name.endswith(".safetensors")
            else {}
        )
        found.append({"rfilename": name, "size": len(data), "blobId": blob, **lfs})
    return found


def line_of(file: Path) -> str:
    try:
        return file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
