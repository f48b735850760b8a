"""Room recipes: bundles in a git repository: folders below it, and an index.json that says what is there.

Of a foreign repository nothing is checked out: no hook, no filter, no link of it ever acts. Files are read out of its
objects, and only plain ones.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from images.command import piped, run, run_shown, tail
from images.console import printable
from images.errors import BundleProblem, UsageProblem
from images.staging import disk
from images.yaml_source import shown
from recipes.bundle.layout import MAX_ENTRIES, MAX_SMALL, NAME, Part, ShortText, Version, why_bad_name
from recipes.bundle.read import Limits, unpacked
from recipes.schema import RecipeId, Sha256

GIT = "git+"
INDEX = "index.json"
URL = re.compile(r"(https|ssh|file)://[^\s]+|[\w.-]+@[\w.-]+:[^\s:]+|/[^\s]*|\.{0,2}[\w./-]+")
REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,200}")
POINTER = b"version https://git-lfs"


class Indexed(Part):
    """One bundle of a repository."""

    recipe: RecipeId
    version: Version
    path: str = Field(pattern=f"^{NAME.pattern}$", max_length=240)
    content: Sha256
    title: ShortText
    status: ShortText
    machines: list[ShortText]
    engine: ShortText
    device: ShortText
    runs: list[ShortText] = Field(default=[])
    signer: ShortText | None = None


class Index(Part):
    """index.json: the bundles of a repository, the newest version of a recipe last."""

    schema_: Literal[1] = Field(alias="schema")
    bundles: list[Indexed]


@dataclass(frozen=True)
class Repository:
    """A clone without a working tree. `commit` is what was asked for."""

    folder: Path
    commit: str
    url: str


def clone(url: str, folder: Path, ref: str | None) -> Repository:
    """Clone a repository without checking anything out.

    Raises UsageProblem for what is no address, BundleProblem with git's words where it can't be had.
    """
    if shutil.which("git") is None:
        raise BundleProblem("there is no git program. Install it (Debian, Ubuntu: apt install git)")
    if not URL.fullmatch(url) or url.startswith("-"):
        raise UsageProblem(f"git+{url}: wanted https://, ssh://, file:// or a path")
    if ref and not REF.fullmatch(ref):
        raise UsageProblem(f"--ref {ref!r}: wanted a branch or a tag")
    log = folder / "git.log"
    target = folder / "repository.git"
    argv = ["git", "clone", "--bare", "--depth", "1", "--no-tags", "--template=", *(["--branch", ref] if ref else [])]
    url = str(Path(url).absolute()) if "://" not in url and Path(url).exists() else url
    argv += ["--", f"file://{url}" if url.startswith("/") else url, str(target)]
    if run_shown(argv, f"Cloning {url}", log, env=_quiet()) != 0:
        raise BundleProblem(f"{printable(tail(log, 3))}\n{url} can't be cloned: git's own words are above")
    answer = run(["git", "-C", str(target), "rev-parse", "--verify", "HEAD^{commit}"], env=_quiet())
    if answer.returncode != 0:
        raise BundleProblem(f"{url} is empty: it has no commit")
    return Repository(target, answer.stdout.strip(), url)


def _quiet() -> dict[str, str]:
    """git without questions, without other protocols, and without what a user's configuration would run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    settings = (("core.hooksPath", "/dev/null"), ("core.fsmonitor", "false"), ("protocol.ext.allow", "never"))
    counted = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings):
        counted |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return {**kept, **counted, "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:ssh:file"}


def read_index(repository: Repository) -> Index:
    """The repository's index. Raises BundleProblem where it has none, or one of another schema."""
    data = _blob(repository, INDEX, MAX_SMALL)
    return parse_index(data, repository.url)


def parse_index(data: bytes, what: str) -> Index:
    """Read index.json. Raises BundleProblem when it is none of ours."""
    try:
        found = json.loads(data)
        if isinstance(found, dict) and isinstance(found.get("schema"), int) and found["schema"] > 1:
            raise BundleProblem(f"{what}: its {INDEX} is of schema {found['schema']}; this version reads 1: update it")
        return Index.model_validate(found)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise BundleProblem(f"{what}: {INDEX}: {key}: {first['msg']}") from None
    except (ValueError, RecursionError):
        raise BundleProblem(f"{what}: its {INDEX} is not JSON") from None


def choose(index: Index, recipe: str | None, version: str | None, what: str) -> Indexed:
    """The bundle that is asked for: the only recipe, and its newest version unless one is named.

    Raises UsageProblem naming what there is.
    """
    of = [each for each in index.bundles if recipe in {None, each.recipe, each.recipe.split("/")[0]}]
    of = [each for each in of if version in {None, each.version}]
    names = sorted({each.recipe for each in of})
    if len(names) != 1:
        there = ", ".join(f"{each.recipe} {each.version}" for each in index.bundles[:20]) or "nothing"
        asked = "name one with --recipe" if len(names) > 1 else "it has none of what was asked for"
        raise UsageProblem(f"{what}: {asked}; there is: {there}")
    return of[-1]


def bundle_of_git(
    url: str, folder: Path, recipe: str | None, version: str | None, ref: str | None, limits: Limits
) -> Path:
    """Bring one bundle of a repository to a folder, unchecked but for its kinds of files and its size.

    Raises BundleProblem where it isn't to be had.
    """
    repository = clone(url, folder, ref)
    wanted = choose(read_index(repository), recipe, version, url)
    target, total = folder / "bundle", 0
    with disk(folder):
        for mode, name, size in _tree(repository, wanted.path):
            if mode not in {"100644", "100755"}:
                raise BundleProblem(f"{url}: {name} is no plain file but a link or a module (mode {mode})")
            total += size
            if total > limits.total_bytes:
                raise BundleProblem(f"{url}: {wanted.path} has more than {limits.total_bytes / 1e9:g} GB: --max-gb")
            below = name.removeprefix(f"{wanted.path}/")
            bad = why_bad_name(below)
            if bad:
                raise BundleProblem(f"{url}: {bad}")
            data = _blob(repository, name, size)
            if data.startswith(POINTER):
                raise BundleProblem(f"{url}: {name} is only a pointer of Git LFS; get the bundle another way")
            (target / below).parent.mkdir(parents=True, exist_ok=True)
            (target / below).write_bytes(data)
    if not target.is_dir():
        raise BundleProblem(f"{url}: its {INDEX} names {wanted.path}, which isn't there")
    return target


def _tree(repository: Repository, path: str) -> list[tuple[str, str, int]]:
    """Mode, name and size of every entry below a path of the commit."""
    argv = ["git", "-C", str(repository.folder), "ls-tree", "-r", "-z", "--long", repository.commit, "--", f"{path}/"]
    told = bytearray()
    with piped(argv, env=_quiet()) as (process, _):
        while data := process.stdout.read(1 << 16):  # a few small trees can name millions of files: stop in time
            told += data
            if told.count(0) > MAX_ENTRIES:
                raise BundleProblem(f"{repository.url}: {path} has more than {MAX_ENTRIES} files")
    rows = []
    for line in bytes(told).split(b"\0")[:-1]:
        head, _, name = line.partition(b"\t")
        mode, _, _, size = head.decode().split()
        rows.append((mode, name.decode("utf-8", errors="replace"), int(size) if size.isdigit() else 0))
    return rows


def _blob(repository: Repository, name: str, most: int) -> bytes:
    at = f"{repository.commit}:{name}"
    size = run(["git", "-C", str(repository.folder), "cat-file", "-s", at], env=_quiet())
    if size.returncode != 0:
        raise BundleProblem(f"{repository.url} has no {name}: it is no repository of recipes")
    if int(size.stdout) > most:
        raise BundleProblem(f"{repository.url}: {name} has {size.stdout.strip()} bytes, the most is {most}")
    return run(["git", "-C", str(repository.folder), "cat-file", "blob", at], env=_quiet(), text=False).stdout


def put_in_git(bundle: Path, tree: Path, limits: Limits) -> tuple[Indexed, Path]:
    """Put a bundle into a working tree of git and its index; committing and pushing it stays with the user.

    It is read and checked first. Raises UsageProblem where the tree has another bundle of this version.
    """
    if not (tree / ".git").exists():
        raise UsageProblem(f"{shown(tree)} is no working tree of git: git clone (or git init) one first")
    index = parse_index((tree / INDEX).read_bytes(), shown(tree)) if (tree / INDEX).is_file() else None
    staging = tree / ".git" / "station-recipes-staging"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with unpacked(bundle, staging, limits) as read:
            info = read.info
            path = f"bundles/{info.recipe}/{info.version}"
            entry = Indexed(
                recipe=info.recipe,
                version=info.version,
                path=path,
                content=read.content,
                title=info.title,
                status=info.status,
                machines=info.machines,
                engine=f"{info.engine.image} {info.engine.version}",
                device=info.engine.device,
                runs=[f"{run.machine} {run.state}" for run in info.runs],
                signer=info.signer,
            )
            there = [each for each in index.bundles if each.path == path] if index else []
            if there and there[0].content != entry.content:
                raise UsageProblem(
                    f"{shown(tree)} has another bundle {path}: a version is never given twice; --version"
                )
            with disk(tree):
                if not there:
                    (tree / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.rmtree(tree / path, ignore_errors=True)
                    staging.rename(tree / path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    kept = [each for each in (index.bundles if index else []) if each.path != path]
    rows = [each.model_dump() for each in [*kept, entry]]
    text = json.dumps({"schema": 1, "bundles": rows}, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    partial = tree / f".{INDEX}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(tree / INDEX)
    return entry, tree / path
