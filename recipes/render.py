"""Room recipes: a serving spec written down for a target: a Docker script, a Compose file or a systemd unit."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from images.errors import UsageProblem, nearest
from recipes.spec import CACHE_ENV, CACHE_IN_CONTAINER, Container, ServingSpec

TEMPLATES = {"docker": "docker.sh.j2", "compose": "compose.yaml.j2", "systemd": "systemd.service.j2"}
LABEL = "station-recipes.recipe"
# What kernels compile is loaded from there too, and Docker's own default is noexec.
TMPFS = "/tmp:exec,mode=1777"  # noqa: S108 the container's own, on a read-only root
UNIT_STOP_MARGIN_S = 30  # from the engine's SIGKILL to systemd's own
HEALTH_INTERVAL_S = 30
HEALTH_TIMEOUT_S = 10
HEALTH_RETRIES = 3

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*")
CSV_SPECIAL = re.compile(r'[,"\n]')
UNIT_WORD = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
UNIT_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


class Quoted(str):
    """Text that a filter made safe for its place: all that a template may output, beside whole numbers."""

    __slots__ = ()


@dataclass(frozen=True)
class Mount:
    """A folder of the host in the container. Both paths are absolute."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True)
class Health:
    """The container's health check: a shell command that asks for /health, and Docker durations."""

    command: str
    interval: str
    timeout: str
    start_period: str
    retries: int


def render(target: str, spec: ServingSpec, box: Container) -> str:
    """Write `spec` down for `target`: docker, compose or systemd. argv and env are the same in each.

    The API key is named, never read. Raises UsageProblem for an unknown target and for a spec that can't be
    written down: a value with a NUL or that is not UTF-8, a variable's name that is none, an API key's value
    among the variables, a relative folder.
    """
    if target not in TEMPLATES:
        closest = nearest(target, list(TEMPLATES), 1)
        hint = f"; did you mean {closest[0]}?" if closest else ""
        raise UsageProblem(f"target {target!r}: wanted one of {', '.join(TEMPLATES)}{hint}")
    _refuse_unwritable(spec, box)
    name = container_name(spec.recipe_id)
    return (
        environment(target)
        .get_template(TEMPLATES[target])
        .render(
            recipe=spec.recipe_id,
            url=spec.url,
            name=name,
            project=name.replace(".", "-"),
            label=LABEL,
            image=box.image,
            box=box,
            tmpfs=TMPFS,
            user=f"{box.user}:{box.user}",
            shm_size=f"{box.shm_gb}g",
            ulimits=dict(sorted(box.ulimits.items())),
            mounts=mounts(spec, box),
            health=health(spec),
            stop_timeout=f"{spec.stop_timeout_s}s",
            unit_stop_timeout_s=spec.stop_timeout_s + UNIT_STOP_MARGIN_S,
            environment=container_environment(spec),
            api_key_env=spec.api_key_env,
            argv=spec.argv,
            options=docker_options(spec, box),
            arguments=_lines(spec.argv),
        )
    )


def container_name(recipe_id: str) -> str:
    """The container's and the unit's name. Ids have no underscore, so two recipes never share a name."""
    return f"station-recipes-{recipe_id.replace('/', '_')}"


def container_environment(spec: ServingSpec) -> dict[str, str]:
    """Every variable that the container gets, sorted by name; the recipe's own value goes before ours."""
    return dict(sorted({**CACHE_ENV, **spec.env}.items()))


def mounts(spec: ServingSpec, box: Container) -> list[Mount]:
    """The folders that the container sees: its cache, and the model read-only at its own path."""
    found = [Mount(str(box.cache), CACHE_IN_CONTAINER, read_only=False)]
    if spec.model_path is not None:
        found.append(Mount(str(spec.model_path), str(spec.model_path), read_only=True))
    return found


def health(spec: ServingSpec) -> Health:
    """The health check. Nothing but the standard library, so that no image has to bring a client."""
    timeout_s = HEALTH_TIMEOUT_S // 2
    code = (
        f"import http.client as h; c = h.HTTPConnection({json.dumps(spec.host)}, {spec.port}, timeout={timeout_s}); "
        'c.request("GET", "/health"); raise SystemExit(c.getresponse().status != 200)'
    )
    return Health(
        command=shlex.join(["python3", "-IS", "-c", code]),
        interval=f"{HEALTH_INTERVAL_S}s",
        timeout=f"{HEALTH_TIMEOUT_S}s",
        start_period=f"{spec.ready_timeout_s}s",
        retries=HEALTH_RETRIES,
    )


def docker_options(spec: ServingSpec, box: Container) -> list[list[str]]:
    """The options of `docker run`, each with its value, before the image and the arguments."""
    check = health(spec)
    return [
        ["--rm"],
        ["--name", container_name(spec.recipe_id)],
        ["--label", f"{LABEL}={spec.recipe_id}"],
        ["--pull", "never"],
        ["--network", "host"],
        ["--read-only"],
        ["--tmpfs", TMPFS],
        ["--cap-drop", "ALL"],
        ["--security-opt", "no-new-privileges"],
        ["--user", f"{box.user}:{box.user}"],
        ["--ipc", box.ipc],
        ["--shm-size", f"{box.shm_gb}g"],
        *(["--ulimit", f"{limit}={value}"] for limit, value in sorted(box.ulimits.items())),
        *([["--device", box.device]] if box.device else []),
        *(["--mount", _mount_argument(mount)] for mount in mounts(spec, box)),
        ["--health-cmd", check.command],
        ["--health-interval", check.interval],
        ["--health-timeout", check.timeout],
        ["--health-retries", str(check.retries)],
        ["--health-start-period", check.start_period],
        ["--stop-timeout", str(spec.stop_timeout_s)],
        *(["--env", f"{variable}={value}"] for variable, value in container_environment(spec).items()),
        *([["--env", spec.api_key_env]] if spec.api_key_env else []),
        ["--entrypoint", "vllm"],
    ]


def environment(target: str) -> SandboxedEnvironment:
    """The templates' environment: one filter that quotes for `target`, one for comments, and nothing unquoted."""
    templates = SandboxedEnvironment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        autoescape=False,
        finalize=_only_quoted,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    quotes: dict[str, Callable[[str], str]] = {"docker": shlex.quote, "compose": yaml_quoted, "systemd": unit_quoted}
    templates.filters = {"quoted": _words(quotes[target]), "plain": plain}
    return templates


def yaml_quoted(text: str) -> str:
    """`text` as a double-quoted YAML string that Compose doesn't interpolate: a JSON string, each $ doubled.

    YAML's escapes take what JSON leaves bare and YAML folds or refuses, such as U+0085 and U+2028.
    """
    bare = json.dumps(text, ensure_ascii=False).replace("$", "$$")
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in bare)


def unit_quoted(text: str) -> str:
    """`text` as one word of a systemd command line (systemd.service(5), "Command lines").

    Specifiers (%) and variables ($) are doubled; what isn't printable is escaped byte by byte.
    """
    if UNIT_WORD.fullmatch(text):
        return text
    return '"' + "".join(map(_unit_escaped, text.replace("%", "%%").replace("$", "$$"))) + '"'


def plain(text: str) -> Quoted:
    """`text` unchanged, for comments and names.

    Raises UsageProblem where it could be anything but one plain word.
    """
    if not PLAIN.fullmatch(text):
        raise UsageProblem(f"{text!r} can't stand in a rendered file: wanted letters, digits and . _ / : - alone")
    return Quoted(text)


def _unit_escaped(char: str) -> str:
    if char in UNIT_ESCAPES:
        return UNIT_ESCAPES[char]
    return char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in char.encode())


def _words(quote: Callable[[str], str]) -> Callable[[object], Quoted]:
    def quoted(value: object) -> Quoted:
        words = value if isinstance(value, list) else [value]
        return Quoted(" ".join(quote(str(word)) for word in words))

    return quoted


def _only_quoted(value: object) -> object:
    if not isinstance(value, Quoted) and type(value) is not int:
        raise TypeError(f"a template pastes {value!r} without a filter that quotes it")
    return value


def _mount_argument(mount: Mount) -> str:
    """The value of --mount, which Docker reads as one line of CSV."""
    fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"] + ["readonly"] * mount.read_only
    return ",".join('"' + field.replace('"', '""') + '"' if CSV_SPECIAL.search(field) else field for field in fields)


def _lines(argv: tuple[str, ...]) -> list[list[str]]:
    """argv as lines for people: each flag begins one."""
    lines: list[list[str]] = []
    for word in argv:
        if not lines or word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return lines


def _refuse_unwritable(spec: ServingSpec, box: Container) -> None:
    for variable in [*spec.env, *([spec.api_key_env] if spec.api_key_env else [])]:
        if not ENV_NAME.fullmatch(variable):
            raise UsageProblem(f"{variable!r} can't name a variable: wanted letters, digits and _, no digit first")
    if spec.api_key_env in container_environment(spec):
        raise UsageProblem(f"{spec.api_key_env} is the API key's variable, and has a value: a recipe holds no secret")
    folders = [path for mount in mounts(spec, box) for path in (mount.source, mount.target)]
    for folder in folders:
        if not folder.startswith("/") or "\r" in folder:
            raise UsageProblem(f"folder {folder!r} can't be mounted: wanted an absolute path without carriage returns")
    for text in [*spec.argv, *spec.env.values(), *folders]:
        if "\0" in text:
            raise UsageProblem(f"{text!r} has a NUL, which no argument or variable can hold")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageProblem(f"{text!r} is not valid UTF-8, so it can't be written to a file") from error
