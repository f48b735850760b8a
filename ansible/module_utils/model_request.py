"""What is wanted of a model cache: a repository at one commit, from a source, for an owner. Standard library only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

try:
    from ansible.module_utils.model_hub import Hub, ModelProblem
except ImportError:
    from model_hub import Hub, ModelProblem

REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
PLACES = {
    "finished": "{}",
    "manifest": "{}.json",
    "staging": ".{}.partial",
    "lock": ".{}.lock",
    "progress": ".{}.progress",
}


@dataclass(frozen=True)
class Request:
    """What is wanted. `files` maps names to sha256; empty means every file of the source, by the hub's own hashes."""

    cache: str
    repo: str
    revision: str
    files: dict = field(default_factory=dict)
    source: str = "https://huggingface.co"
    token: str | None = field(default=None, repr=False)
    owner: int = -1
    group: int = -1
    verify: str = "quick"
    link: bool = False
    keep_free_gb: float = 10.0
    streams: int = 4
    retries: int = 5
    backoff_s: float = 1.0
    lock_wait_s: int = 86400

    def __post_init__(self) -> None:
        """Raise ModelProblem for what could leave the cache's folder, or can't be a commit or a hash."""
        if not REPO.fullmatch(self.repo) or "--" in self.repo or ".." in self.repo:
            raise ModelProblem(f"repo: found {self.repo!r}, wanted owner/name")
        if not COMMIT.fullmatch(self.revision):
            raise ModelProblem(f"revision: found {self.revision!r}, wanted a whole commit (40 hex digits), no branch")
        if not self.cache.startswith("/"):
            raise ModelProblem(f"cache: found {self.cache!r}, wanted an absolute path")
        for name, digest in self.files.items():
            require_name(name)
            if not SHA256.fullmatch(str(digest)):
                raise ModelProblem(f"files: {name}: found {digest!r}, wanted a sha256, 64 hex digits")
        _ = self.hub  # says what is wrong with the address
        object.__setattr__(self, "owner", os.geteuid() if self.owner < 0 else self.owner)
        object.__setattr__(self, "group", os.getegid() if self.group < 0 else self.group)

    @property
    def hub(self) -> Hub | None:
        """The hub or mirror; None where the source is a folder of this host."""
        return None if self.source.startswith("/") else Hub(self.source, self.token, self.retries, self.backoff_s)

    def place(self, kind: str) -> Path:
        """One of PLACES, relative to the cache."""
        return Path("models") / self.repo.replace("/", "--") / PLACES[kind].format(self.revision)

    @property
    def path(self) -> str:
        """Where the finished files are."""
        return f"{self.cache.rstrip('/')}/{self.place('finished')}"


def require_name(name: str) -> None:
    """Raise ModelProblem for a file name that isn't a plain path below the model's folder."""
    odd = any(part in {"", ".", ".."} for part in name.split("/")) or "\\" in name or not name.isprintable()
    if odd or name.endswith(".partial"):
        raise ModelProblem(f"files: found the name {name!r}, wanted a path below the model's folder")
