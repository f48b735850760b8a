"""Room images: image references and the registries behind them, asked through skopeo (1.9 or later)."""

import hashlib
import ipaddress
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from images.command import run
from images.errors import ImageProblem, UsageProblem

IMAGE_ID = re.compile(r"sha256:[0-9a-f]{64}|[0-9a-f]{12,64}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = r"(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9][A-Za-z0-9.-]*)(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
REFERENCE = re.compile(
    rf"(?P<name>(?:{_HOST}/)?{_PART}(?:/{_PART})*)(?::(?P<tag>\w[\w.-]{{0,127}}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
ASK_TIMEOUT_S = 10
CAUSES = (  # what skopeo says → the state, and what to do about it
    ("no space left", "full", "the disk is full: free some space"),
    ("manifest unknown", "gone", "the registry has no such image"),
    ("name unknown", "gone", "the registry has no such image"),
    ("unauthorized", "refused", "the registry refuses us or has no such image: check the name, or `skopeo login`"),
    ("denied", "refused", "the registry refuses us or has no such image: check the name, or `skopeo login`"),
    ("authentication required", "refused", "the registry refuses us: `skopeo login`"),
    ("toomanyrequests", "refused", "the registry answers no more requests for now"),
    ("gave http response to https", "plain", "the registry speaks plain http: on this machine, add --plain-http"),
    ("x509", "refused", "the registry's certificate is not trusted here"),
    ("policy.json", "policy", "skopeo's trust policy is missing: apt install golang-github-containers-common"),
    ("deadline exceeded", "unreachable", "the registry does not answer in time"),
    ("timeout", "unreachable", "the registry does not answer in time"),
    ("no such host", "unreachable", "the registry's name can't be resolved"),
    ("connection refused", "unreachable", "nothing answers there: is the registry running?"),
    ("connection reset", "unreachable", "the registry went away in the middle"),
    ("closed network connection", "unreachable", "the registry went away in the middle"),
    ("broken pipe", "unreachable", "the registry went away in the middle"),
    ("eof", "unreachable", "the registry went away in the middle"),
    ("dial tcp", "unreachable", "the registry can't be reached"),
)


@dataclass(frozen=True)
class Reference:
    """An image's name as registries know it: `name` with its host, and a tag, a digest or both."""

    name: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    @property
    def host(self) -> str:
        """The registry, with its port."""
        first = self.name.split("/")[0]
        return first if "/" in self.name and (re.search(r"[.:]", first) or first == "localhost") else "docker.io"

    def at(self, digest: str) -> "Reference":
        """The same name, by digest."""
        return Reference(self.name, None, digest)

    def for_skopeo(self) -> str:
        """The name for skopeo, which takes a tag or a digest but not both: the digest decides."""
        return f"docker://{self.name}" + (f"@{self.digest}" if self.digest else f":{self.tag or 'latest'}")


def parse_reference(text: str) -> Reference:
    """Read `[HOST[:PORT]/]NAME[:TAG][@sha256:…]`.

    Raises UsageProblem for anything else.
    """
    found = REFERENCE.fullmatch(text) if len(text) < 512 else None
    if found is None:
        raise UsageProblem(
            f"{text[:200]!r} is no image reference: wanted [HOST[:PORT]/]NAME[:TAG][@sha256:<64 hex>], lower case"
        )
    return Reference(found["name"], found["tag"], found["digest"])


@dataclass(frozen=True)
class Wire:
    """How registries may be reached: https with certificates checked, unless plain http is allowed by name.

    `plain_http` holds for registries on this machine only; `plain_http_host` names one more, as HOST[:PORT].
    """

    plain_http: bool = False
    plain_http_host: str | None = None

    def plain(self, reference: Reference) -> bool:
        """Whether this registry may be asked over plain http."""
        return reference.host == self.plain_http_host or (self.plain_http and is_loopback(reference.host))

    def options(self, reference: Reference, side: str = "") -> list[str]:
        """skopeo's option for one side of a copy (`src-`, `dest-`) or an inspection."""
        return [f"--{side}tls-verify={'false' if self.plain(reference) else 'true'}"]

    def require_use(self, references: Sequence[Reference]) -> None:
        """Raise UsageProblem when plain http was allowed and no registry here may use it."""
        if not references or any(self.plain(reference) for reference in references):
            return
        hosts = ", ".join(dict.fromkeys(reference.host for reference in references))
        if self.plain_http_host:
            raise UsageProblem(
                f"--plain-http-host {self.plain_http_host} is none of this command's registries: {hosts}"
            )
        if self.plain_http:
            raise UsageProblem(
                f"--plain-http is for registries on this machine, and {hosts} is not: anyone on the way could read or "
                f"change what is sent. If you accept that: --plain-http-host {references[-1].host}"
            )


def is_loopback(host: str) -> bool:
    """Whether HOST[:PORT] is this machine by its address or as localhost."""
    bare = host[1 : host.index("]")] if host.startswith("[") else host.split(":", maxsplit=1)[0]
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


def require_skopeo() -> None:
    """Raise ImageProblem when there is no skopeo."""
    if shutil.which("skopeo") is None:
        raise ImageProblem("there is no skopeo program. Install it (Debian, Ubuntu: apt install skopeo).")


def cause(said: str) -> tuple[str, str]:
    """What skopeo's words mean: a state (gone, refused, unreachable, plain, full, policy, failed) and a sentence."""
    low = said.lower()
    for sign, state, remedy in CAUSES:
        if sign in low:
            return state, remedy
    return "failed", "its own words are above"


def said_by(text: str) -> str:
    """The message inside skopeo's last log line."""
    lines = [line for line in text.strip().splitlines() if line] or ["(nothing was said)"]
    found = re.search(r'msg="(.*)"$', lines[-1])
    return found[1].replace('\\"', '"') if found else lines[-1]


def _ask(reference: Reference, wire: Wire, *options: str) -> subprocess.CompletedProcess:
    require_skopeo()
    command = ["skopeo", f"--command-timeout={ASK_TIMEOUT_S}s", "inspect", *options, *wire.options(reference)]
    return run([*command, reference.for_skopeo()], text=False)


@dataclass(frozen=True)
class RefState:
    """What one reference answered. `state`: ok, gone, refused, unreachable, plain, changed or failed.

    `digest` is that of the manifest (or index) the registry gave, null unless it gave one; `reason` says more.
    """

    reference: str
    state: str
    digest: str | None
    reason: str
    manifest: bytes = b""


def ask(reference: Reference, wire: Wire) -> RefState:
    """Ask a registry for one manifest (10 s at most), and hold its digest against the reference's."""
    answer = _ask(reference, wire, "--raw")
    if answer.returncode != 0:
        said = answer.stderr.decode(errors="replace")
        state, remedy = cause(said)
        return RefState(str(reference), state, None, f"{remedy} ({said_by(said)})")
    digest = digest_of(answer.stdout)
    if reference.digest and digest != reference.digest:
        return RefState(str(reference), "changed", digest, f"the registry gave {digest}")
    return RefState(str(reference), "ok", digest, "", answer.stdout)


def reachable(refs: Sequence[str], wire: Wire | None = None) -> list[RefState]:
    """Ask each declared reference in order, the upstream one first, whether its manifest is still to be had.

    Raises UsageProblem for what is no reference, ImageProblem when skopeo is missing.
    """
    parsed = [parse_reference(ref.removeprefix("docker://")) for ref in refs]
    return [ask(reference, wire or Wire()) for reference in parsed]


def retention(states: Sequence[RefState]) -> str:
    """The preflight's words, from the states of the upstream reference and then its mirrors."""
    if not states:
        return "no reference is declared"
    upstream, *mirrors = (state.state for state in states)
    answering = mirrors.count("ok")
    if not mirrors:
        return f"upstream {upstream}, no mirror declared"
    if len(mirrors) == 1:
        return f"upstream {upstream}, mirror {mirrors[0]}" if upstream == "ok" or answering else _lost(upstream)
    return f"upstream {upstream}, {answering} of {len(mirrors)} mirrors ok" if answering else _lost(upstream)


def _lost(upstream: str) -> str:
    return f"upstream {upstream}, no mirror answers"


def resolve(reference: Reference, wire: Wire, expect: str | None = None) -> tuple[str, bytes]:
    """Return digest and bytes of the manifest a reference names now.

    Raises ImageProblem when the registry gives none, or when a tag names another digest than the one given
    beside it (or as `expect`): both are named.
    """
    recorded = expect or reference.digest
    asked = Reference(reference.name, reference.tag, None if reference.tag else reference.digest)
    state = ask(asked, wire)
    if state.state != "ok":
        raise ImageProblem(f"{asked}: {state.reason}")
    if recorded and state.digest != recorded:
        raise ImageProblem(
            f"{asked} has moved: it names {state.digest} now, recorded is {recorded}. To take the recorded image: "
            f"docker://{reference.name}@{recorded}"
        )
    return state.digest, state.manifest


def config_bytes(reference: Reference, wire: Wire) -> bytes:
    """The configuration of a single-platform image in a registry, as its bytes: their hash is the image id."""
    answer = _ask(reference, wire, "--config", "--raw")
    if answer.returncode != 0:
        said = answer.stderr.decode(errors="replace")
        raise ImageProblem(f"{reference}: its configuration can't be read: {cause(said)[1]} ({said_by(said)})")
    return answer.stdout


def digest_of(data: bytes) -> str:
    """The digest registries name bytes by."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def read_manifest(data: bytes, what: str) -> dict:
    """A manifest or index as a mapping. Raises ImageProblem for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ImageProblem(f"{what}: its manifest is not JSON")
    if "manifests" in found:
        return {**found, "mediaType": found.get("mediaType", INDEXES[0])}
    if not isinstance(found.get("config"), dict) or not isinstance(found.get("layers"), list):
        raise ImageProblem(f"{what}: its manifest has no config and layers (an artifact, or schema 1?)")
    return found


def of_platform(index: dict, platform: str, what: str) -> str:
    """The digest of one platform's manifest in an index; variants are compared only where both name one.

    Raises ImageProblem naming the platforms that are there.
    """
    there = {}
    entries = index["manifests"] if isinstance(index["manifests"], list) else []
    for entry in (entry for entry in entries if isinstance(entry, dict) and "digest" in entry):
        has = entry["platform"] if isinstance(entry.get("platform"), dict) else {}
        name = "/".join(part for part in (has.get("os"), has.get("architecture"), has.get("variant")) if part)
        if "unknown" not in name:  # attestations
            there[name] = entry["digest"]
    for name, digest in there.items():
        if same_platform(name, platform):
            return digest
    raise ImageProblem(
        f"{what} has no image for {platform}: it has {', '.join(there) or 'none'}. --platform names one."
    )


def same_platform(one: str, other: str) -> bool:
    """Whether two platforms (os/arch[/variant]) are the same; a variant counts only where both name one."""
    first, second = one.split("/"), other.split("/")
    return first[:2] == second[:2] and (len(first) < 3 or len(second) < 3 or first[2] == second[2])
