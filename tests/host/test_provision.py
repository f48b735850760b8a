"""A fresh machine is provisioned, from nothing to a container that sees the GPU; a second time nothing changes."""

import fnmatch
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from images.yaml_source import read_yaml
from recipes.load import load_recipe
from recipes.saying import change_site
from tests.host.conftest import Archive, Front, Said, give_gpu, give_image, in_container
from tests.host.fake_gpu import UUID
from tests.host.machine import Machine

CHANGES = Path(__file__).resolve().parent.parent.parent / "ansible" / "changes.yml"


@dataclass(frozen=True)
class Story:
    """A machine's way: looked at, checked, provisioned, provisioned again, checked again; and its files between."""

    machine: Machine
    said: dict[str, Said]
    files: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def story(base: Path, archive: Archive, front: Front) -> Iterator[Story]:
    """Tell the whole story once."""
    with Machine("fresh", [base]) as machine:
        give_gpu(machine, archive)
        said, files = {}, {"fresh": machine.state()}
        for name, task, *options in (
            ("look", "doctor"),
            ("check", "provision", "--check"),
            ("converge", "provision"),
            ("again", "provision"),
            ("check again", "provision", "--check"),
        ):
            said[name] = front(task, machine, *options)
            files[name] = machine.state()
        give_image(machine)
        said["look again"] = front("doctor", machine)
        yield Story(machine, said, files)


def found(said: Said, name: str) -> dict:
    """A finding by its id."""
    return next(each for each in said.host["findings"] if each["id"] == name)


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Paths that differ."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def listed() -> dict[str, list[str]]:
    """The list of what is changed: pattern of paths → what it is."""
    return {entry["path"]: entry["what"] for entry in read_yaml(CHANGES).data["changes"]}


def not_listed(story: Story, before: str, after: str) -> str:
    """Paths that changed, and that neither the list names nor an installed package owns: one a line."""
    owned = set(story.machine.run("sh", "-c", "cat /var/lib/dpkg/info/*.list").stdout.splitlines())
    owned |= {path.replace("/lib/", "/usr/lib/", 1) for path in owned if path.startswith("/lib/")}
    strange = changed(story.files[before], story.files[after]) - owned
    strange = {path for path in strange if not any(fnmatch.fnmatch(path, pattern) for pattern in listed())}
    return "\n".join(sorted(path for path in strange if not (story.machine.upper / path[1:]).is_dir()))


def test_the_look_at_a_fresh_machine_tells_what_is_missing_and_what_to_do(story: Story):
    said = story.said["look"]
    assert said.code == 8
    for name in ("docker", "docker_api", "toolkit", "cdi_spec"):
        assert found(said, name)["ok"] is False
        assert "./inv provision" in found(said, name)["remedy"] or name == "cdi_spec"
    assert found(said, "gpu")["ok"] is True
    assert UUID in found(said, "gpu")["found"]


def test_a_look_and_a_check_change_no_file(story: Story):
    assert not_listed(story, "fresh", "check") == ""
    touched = changed(story.files["fresh"], story.files["check"])
    assert not any(path.startswith(("/etc", "/usr", "/srv")) or "dpkg" in path or "docker" in path for path in touched)


def test_a_check_on_a_fresh_machine_foretells_every_change(story: Story):
    assert story.said["check"].code == 0, story.said["check"].host["problem"]
    foretold, done = (" ".join(story.said[name].host["changed"]) for name in ("check", "converge"))
    for told, really in (
        ("Install Docker's packages", "Install Docker's packages"),
        ("Merge the settings into daemon.json", "Merge the settings into daemon.json"),
        ("Foretell the restart of Docker", "Restart Docker's unit"),
        ("Install what Ansible needs to write apt's sources", "Install what Ansible needs to write apt's sources"),
        ("Foretell the archive", "Add the archive"),
        ("Foretell the package", "Install the package"),
    ):
        assert told in foretold, foretold
        assert really in done, done
    assert "Foretell the CDI spec" in foretold  # the package itself writes the spec
    assert '"cdi": true' in "".join(story.said["check"].host["diffs"])


def test_the_machine_is_provisioned_and_a_container_sees_exactly_the_gpu_it_names(story: Story):
    assert story.said["converge"].code == 0, story.said["converge"].host["problem"]
    info = json.loads(story.machine.run("docker", "info", "--format", "{{json .}}").stdout)
    assert info["CDISpecDirs"]
    assert json.loads(story.machine.read("/etc/docker/daemon.json")) == {"features": {"cdi": True}}
    assert UUID in in_container(story.machine, UUID).stdout
    other = in_container(story.machine, "GPU-fake-other")
    assert other.returncode != 0
    assert "unresolvable CDI devices" in other.stderr


def test_the_second_time_changes_nothing_within_a_minute(story: Story):
    assert story.said["again"].code == 0, story.said["again"].host["problem"]
    assert story.said["again"].host["changed"] == []
    # The faster of two: these machines share their cores.
    assert min(story.said[name].duration_s for name in ("again", "check again")) < 60
    assert story.said["check again"].host["changed"] == []
    assert not_listed(story, "converge", "check again") == ""


def test_nothing_is_changed_that_the_list_of_changes_does_not_name(story: Story):
    assert not_listed(story, "fresh", "check again") == ""


def test_every_line_of_the_list_of_changes_comes_true(story: Story):
    paths = changed(story.files["fresh"], story.files["check again"])
    for entry in read_yaml(CHANGES).data["changes"]:
        if not entry.get("sometimes"):
            assert fnmatch.filter(paths, entry["path"]), entry


def test_the_look_at_the_provisioned_machine_is_good_within_twenty_seconds(story: Story):
    said = story.said["look again"]
    # A test machine shares its host's clock, which nothing in it can synchronise.
    assert [each["id"] for each in said.host["findings"] if each["ok"] is False and each["id"] != "clock"] == []
    assert UUID in found(said, "container")["found"]
    assert min(story.said[name].duration_s for name in ("look", "look again")) < 20


def test_without_serving_only_a_model_s_weights_are_brought(
    provisioned: Machine, front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    family, commit = "nemotron-3.5-super-vl", "0123456789abcdef0123456789abcdef01234567"
    repo = load_recipe(family).recipe.model.repo
    monkeypatch.setenv("STATION_RECIPES_STATE", str(tmp_path))
    change_site(None, None, [], [], [f"{repo}={commit}"], [], True)
    provisioned.run("mkdir", "-p", "/srv/model")
    provisioned.write("/srv/model/config.json", "{}")
    asked = {"model_cache_source": "/srv/model", "model_cache_keep_free_gb": 0.1}
    said = front("provision", provisioned, "--recipe", family, "--no-serve", **asked)
    assert said.code == 0, said.host["problem"]
    folder = f"/var/lib/station-recipes/cache/huggingface/hub/models--{repo.replace('/', '--')}/snapshots/{commit}"
    assert provisioned.run("cat", f"{folder}/config.json").stdout == "{}"
    assert "station-recipes" not in provisioned.run("docker", "ps", "--all").stdout
    assert front("provision", provisioned, "--recipe", family, "--no-serve", **asked).host["changed"] == []
