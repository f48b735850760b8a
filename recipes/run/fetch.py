"""Room recipes: small questions to a server, with a limit on the whole time and on the size of the answer."""

import functools
import ssl
import time

import httpx

from images.errors import EngineProblem

LIMIT_S = 10
MAX_BYTES = 20_000_000


def fetch(url: str, limit_s: float = LIMIT_S) -> httpx.Response:
    """GET a small answer, whole.

    Raises EngineProblem when the server can't be reached, drips, or answers more than MAX_BYTES.
    """
    deadline = time.monotonic() + limit_s
    try:
        client = httpx.Client(timeout=limit_s, trust_env=False, verify=_certificates())
        with client, client.stream("GET", url) as answer:
            data = bytearray()
            for part in answer.iter_bytes():
                data += part
                if time.monotonic() > deadline:
                    raise EngineProblem(f"{url} took longer than {limit_s:g} s to answer")
                if len(data) > MAX_BYTES:
                    raise EngineProblem(f"{url} answered more than {MAX_BYTES} bytes")
            return httpx.Response(answer.status_code, content=bytes(data), request=answer.request)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineProblem(f"{url} does not answer: {error or type(error).__name__}") from error


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Loaded once: it costs 20 ms, and a load is watched by a question every second."""
    return ssl.create_default_context()


def fetch_json(url: str, limit_s: float = LIMIT_S) -> object:
    """GET a small JSON answer.

    Raises EngineProblem for anything but status 200 and JSON.
    """
    answer = fetch(url, limit_s)
    if answer.status_code != 200:
        raise EngineProblem(f"{url} answered with status {answer.status_code}")
    try:
        return answer.json()
    except (ValueError, RecursionError) as error:
        raise EngineProblem(f"{url} answered something that isn't JSON") from error
