"""What a model hub, or a mirror with the same URLs, is asked: files, sizes, hashes, bytes. Standard library only.

/api/models/REPO/revision/REVISION?blobs=true   the files, with sizes and hashes
/REPO/resolve/REVISION/FILE                     a file; large ones are redirected to a content network
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

TIMEOUT_S = 60
WAIT_LIMIT_S = 600  # a server that asks for a longer wait gets an error, not our patience
TRANSIENT = (408, 429, 500, 502, 503, 504)
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ModelProblem(Exception):
    """Something a person can act on: what was found, what was wanted, what to do."""


class NotThere(ModelProblem):
    """The source answers that it has no such thing."""


@dataclass(frozen=True)
class Told:
    """What a source tells of a file: bytes, and sha256 or git's blob sha1 where it knows them."""

    size: int
    sha256: str | None = None
    blob: str | None = None


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follow to a content network as hubs want it, without telling it the token, and never from https to http."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Build the next request: same method and range; the token for the same origin only."""
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if (old.scheme, new.scheme) == ("https", "http"):
            raise ModelProblem(f"{old.netloc} redirects from https to http: refused")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None:
            following.method = req.get_method()
            if (old.scheme, old.netloc) != (new.scheme, new.netloc):
                following.remove_header("Authorization")
        return following


@dataclass(frozen=True)
class Hub:
    """A hub or a mirror. `retries` are attempts without a new byte; `backoff_s` doubles with each of them."""

    url: str
    token: str | None = None
    retries: int = 5
    backoff_s: float = 1.0

    def __post_init__(self) -> None:
        """Raise ModelProblem for an address that is none, or that would show the token on the way."""
        address = urllib.parse.urlsplit(self.url)
        if address.scheme not in {"http", "https"} or not address.hostname:
            raise ModelProblem(f"source: found {self.url!r}, wanted https://…, http://… or an absolute path")
        if self.token and address.scheme == "http" and address.hostname not in LOOPBACK:
            raise ModelProblem(f"source: {self.url} isn't encrypted, the token would be readable; use https")

    def ask(self, path: str, query: str = "", method: str = "GET", start: int = 0):
        """Open an answer, `start` bytes into the file.

        Raises what may pass (OSError, HTTPException) as it is; ModelProblem where trying again can't help.
        """
        headers = {"User-Agent": "station-recipes", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        headers |= {"Range": f"bytes={start}-"} if start else {}
        url = self.url.rstrip("/") + urllib.parse.quote(path) + query
        question = urllib.request.Request(url, headers=headers, method=method)
        try:
            return urllib.request.build_opener(Redirects).open(question, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code in TRANSIENT:
                raise
            raise self._problem(url, error.code) from error

    def _problem(self, url: str, status: int) -> ModelProblem:
        if status == 404:
            return NotThere(f"{url}: status 404, it isn't there; check repo, revision and file names")
        if status not in {401, 403}:
            return ModelProblem(f"{url}: status {status}, wanted 200; check the source")
        if self.token:
            return ModelProblem(f"{url}: status {status}; the token may not read it: accept the licence, or renew it")
        return ModelProblem(f"{url}: status {status} without a token; put one into HF_TOKEN or the vault")

    def patiently(self, what: str, attempt, so_far=lambda: 0, sleep=time.sleep):
        """Return `attempt()`; again after a failure of the network, while bytes come or retries are left.

        Raises ModelProblem with the last reason.
        """
        failures = 0
        while True:
            before = so_far()
            try:
                return attempt()
            except (OSError, http.client.HTTPException) as error:
                failures = 1 if so_far() > before else failures + 1
                asked = asked_wait(getattr(error, "headers", None))
                wait = self.backoff_s * min(2 ** (failures - 1), 30) if asked is None else asked
                reason = getattr(error, "reason", error)
                if isinstance(error, urllib.error.HTTPError):
                    reason = f"status {error.code}"
                if wait > WAIT_LIMIT_S:
                    raise ModelProblem(
                        f"{what}: {reason}, and a wait of {wait:.0f} s is asked for; run again then"
                    ) from error
                if failures > self.retries:
                    raise ModelProblem(
                        f"{what}: {reason}, {failures} times in a row; what has arrived is kept, run again to go on"
                    ) from error
                sleep(wait)

    def listing(self, repo: str, revision: str, names: list[str]) -> dict[str, Told]:
        """What the API tells of each file; a mirror without an API is asked for the sizes of `names`.

        Raises ModelProblem for another revision than the one that is wanted.
        """
        try:
            told = self.patiently(f"{self.url}, the list of files", lambda: self._api(repo, revision))
        except NotThere:
            if not names:
                raise
            return {name: Told(self._size(repo, revision, name)) for name in names}
        if told.get("sha") != revision:
            raise ModelProblem(f"{self.url}: found revision {told.get('sha')} of {repo}, wanted {revision}")
        found = {}
        for each in told.get("siblings", []):
            lfs = each.get("lfs") or {}
            size = lfs.get("size", each.get("size"))
            if size is None:
                size = self._size(repo, revision, each["rfilename"])
            found[each["rfilename"]] = Told(size, lfs.get("sha256"), each.get("blobId"))
        return found

    def _api(self, repo: str, revision: str) -> dict:
        with self.ask(f"/api/models/{repo}/revision/{revision}", query="?blobs=true") as answer:
            text = answer.read()
        with contextlib.suppress(ValueError):
            told = json.loads(text)
            if isinstance(told, dict):
                return told
        raise ModelProblem(f"{self.url} answers its API with something that isn't JSON: this is no hub")

    def _size(self, repo: str, revision: str, name: str) -> int:
        def attempt() -> str:
            with self.ask(f"/{repo}/resolve/{revision}/{name}", method="HEAD") as answer:
                return answer.headers.get("X-Linked-Size") or answer.headers.get("Content-Length") or ""

        size = self.patiently(name, attempt)
        if not size.isdigit():
            raise ModelProblem(f"{self.url} doesn't tell the size of {name}: wanted Content-Length")
        return int(size)

    def file(self, repo: str, revision: str, name: str, start: int):
        """Open a file's bytes; the answer's `from_start` says whether the server ignored `start`."""
        answer = self.ask(f"/{repo}/resolve/{revision}/{name}", start=start)
        told = answer.headers.get("Content-Range", "")
        answer.from_start = not (start and answer.status == 206 and told.startswith(f"bytes {start}-"))
        return answer


def asked_wait(headers) -> float | None:
    """Seconds out of Retry-After, a number or a date; None where the server asks for nothing."""
    text = (headers.get("Retry-After") or "").strip() if headers else ""
    if text.isdigit():
        return float(text)
    date = email.utils.parsedate_tz(text) if text else None
    return max(0.0, email.utils.mktime_tz(date) - time.time()) if date else None
