"""Room bench: just enough HTTP/1.1 for the reference server: requests in, answers and event streams out."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 411: "Length Required", 503: "Service Unavailable"}


@dataclass(frozen=True)
class Call:
    """A request: method, path, the query's values, and the body."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes


class Connection(asyncio.Protocol):
    """One client's connection. Calls are answered one after another: a stream holds back the next.

    `handle(call, connection)` answers with `answer`, or with `begin_events`, `event`s and `end_events`;
    `on_lost` is called when the client goes away in the middle of a stream.
    """

    def __init__(self, handle: Callable[[Call, "Connection"], None]) -> None:
        """Wait for calls."""
        self.on_lost: Callable[[], None] | None = None
        self.stream = False
        self._handle = handle
        self._data = bytearray()
        self._busy = False
        self._write: Callable[[bytes], None] = lambda _data: None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the way back."""
        self._transport = transport
        self._write = transport.write

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever streams."""
        self._write = lambda _data: None
        if self.on_lost:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Take bytes in; answer when a call is complete."""
        self._data += data
        self._next()

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """A whole answer."""
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._write(head.encode() + body)
        self._finished()

    def send(self, data: bytes) -> None:
        """Any bytes at all."""
        self._write(data)

    def close(self) -> None:
        """Close the connection in good order, once what was written is out."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Break the connection (TCP RST), as a server that has gone away does."""
        if self._transport is not None:
            linger = struct.pack("ii", 1, 0)  # on, and for no time: what close() sends then is a reset
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()

    def begin_events(self) -> None:
        """The head of an event stream."""
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def event(self, data: bytes) -> None:
        """One `data:` event, in a chunk of its own, as vLLM's server sends it."""
        self._write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def end_events(self) -> None:
        """The end of the stream; the connection stays."""
        self._write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self.on_lost = None
        self._finished()

    def _finished(self) -> None:
        self._busy = False
        if self._data:
            self._next()

    def _next(self) -> None:
        if self._busy or self._transport is None:
            return
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            if len(self._data) > MAX_HEAD:
                self._transport.close()
            return
        lines = self._data[:end].decode("latin-1").split("\r\n")
        split = (line.partition(":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in split}
        length = headers.get("content-length", "0")
        words = lines[0].split(" ")
        if len(words) != 3 or not length.isdigit() or int(length) > MAX_BODY or "transfer-encoding" in headers:
            self._data.clear()
            self.answer(411 if "transfer-encoding" in headers else 400, b'{"error": "bad request"}')
            self._transport.close()
            return
        if len(self._data) < end + 4 + int(length):
            return
        body = bytes(self._data[end + 4 : end + 4 + int(length)])
        del self._data[: end + 4 + int(length)]
        self._busy = True
        parts = urlsplit(words[1])
        self._handle(Call(words[0], parts.path, dict(parse_qsl(parts.query)), body), self)


def as_json(value: object) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()
