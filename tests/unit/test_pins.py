"""Pins: they answer what was asked for, hold on every platform of their image, and say so without a network."""

import hashlib
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from images.declaration import declaration
from images.errors import EngineProblem, UsageProblem
from images.pins import PinSet, Place, chosen_sets, faults, inputs_digest, pin_sets, places, wheel_pins
from images.pins_file import Pin, entries
from images.wheels import ensure_wheels

ROOT = Path(__file__).resolve().parent.parent.parent
CUDA = pin_sets()["cuda"]


def copied(pins: PinSet, folder: Path) -> PinSet:
    for file in (pins.pins, *pins.inputs):
        shutil.copy(file, folder)
    return replace(pins, pins=folder / pins.pins.name, inputs=tuple(folder / file.name for file in pins.inputs))


def edited(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def versions() -> dict[str, str]:
    return {pin.name: pin.version for pin in entries(CUDA.pins)}


@pytest.mark.parametrize("name", pin_sets())
def test_the_published_pins_answer_what_is_asked_for(name):
    assert faults(pin_sets()[name]) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("pins.txt", "vllm==0.32.0", "vllm==0.31.0", "vllm==0.32.0: 0.31.0 is pinned"),
        ("pins.txt", "ninja==", "ninjaa==", "ninja: no pin answers it"),
        ("pins.txt", "torch==2.13.0 ", "torch>=2.13.0 ", "is no exact pin with a hash"),
        (
            "pins.txt",
            "pandas==",
            "nvidia-cutlass-dsl-libs-cu12==4.8.0 --hash=sha256:" + "a" * 64 + "\npandas==",
            "drops it",
        ),
        ("requirements.in", "pandas ", "pandas<9 ", "requirements.in and overrides.txt changed since"),
        (
            "overrides.txt",
            "nvidia",
            "torchaudio; python_version < '3'\nnvidia",
            "torchaudio: pinned, although overrides.txt",
        ),
    ],
)
def test_pins_out_of_step_with_what_is_asked_for_are_named(tmp_path, file, old, new, said):
    pins = copied(CUDA, tmp_path)
    edited(tmp_path / file, old, new)
    assert any(said in fault for fault in faults(pins)), faults(pins)


def test_a_pin_without_a_hash_is_named(tmp_path):
    pins = copied(CUDA, tmp_path)
    pins.pins.write_text("six==1.17.0\n" + pins.pins.read_text())
    assert faults(pins) == [f"{pins.pins}: 'six==1.17.0' is no exact pin with a hash"]


def test_a_comment_in_the_requirements_does_not_make_pins_stale(tmp_path):
    pins = copied(CUDA, tmp_path)
    edited(tmp_path / "requirements.in", "pandas", "# a remark\npandas")
    assert inputs_digest(pins) == inputs_digest(CUDA)


def test_a_wrong_name_of_pins_is_answered_with_the_right_ones():
    with pytest.raises(UsageProblem, match="no pins are called 'gpu': wanted one of control, cpu, cuda"):
        chosen_sets("gpu")


def test_the_cuda_pins_are_what_image_yaml_declares():
    pinned = versions()
    assert pinned["vllm"] == declaration("cuda").sources.build.release
    assert (pinned["torch"], pinned["flashinfer-python"]) == ("2.13.0", "0.7.0.post1")
    assert (CUDA.pythons, CUDA.platforms) == (("3.11", "3.12", "3.13"), ("linux/amd64", "linux/arm64"))


def test_the_compiler_in_the_image_is_of_torch_s_cuda_not_the_newest():
    """torch 2.13.0 is built for CUDA 13.0; what a newer nvcc or nvJitLink makes, a 13.0 driver may refuse."""
    pinned = versions()
    for name in ("nvcc", "crt", "cccl", "runtime", "nvrtc"):
        assert pinned[f"nvidia-cuda-{name}"].startswith("13.0."), name
    assert pinned["nvidia-nvvm"].startswith("13.0.")
    assert pinned["nvidia-nvjitlink"].startswith("13.0.")


def test_each_cuda_pin_applies_somewhere_and_one_version_of_it_at_each_place():
    pins = list(entries(CUDA.pins))
    assert len(places(CUDA)) == 6
    for place in places(CUDA):
        applying = [pin.name for pin in pins if applies(pin, place)]
        assert len(applying) == len(set(applying))
        assert {"vllm", "torch", "triton", "flashinfer-python", "ninja", "nvidia-cuda-nvcc"} <= set(applying)
    assert all(any(applies(pin, place) for place in places(CUDA)) for pin in pins)


def applies(pin: Pin, place: Place) -> bool:
    return pin.marker is None or pin.marker.evaluate(place.markers)


def package(*files: str, **more: str) -> dict:
    wheels = [{"name": name, "hashes": {"sha256": f"{n}" * 64}} for n, name in enumerate(files)]
    return {"name": "thing", "version": "1.0", "wheels": wheels, **more}


ANY, X86, ARM = "thing-1.0-py3-none-any.whl", "manylinux_2_28_x86_64.whl", "manylinux_2_28_aarch64.whl"


def test_only_hashes_of_wheels_that_some_place_takes_are_written():
    files = [f"thing-1.0-cp38-abi3-{X86}", f"thing-1.0-cp38-abi3-{ARM}", "thing-1.0-cp38-abi3-win_amd64.whl"]
    files += ["thing-1.0-cp310-cp310-manylinux_2_28_x86_64.whl", "thing-1.0-cp38-abi3-musllinux_1_2_x86_64.whl"]
    files += ["thing-1.0-cp313-cp313t-manylinux_2_28_x86_64.whl", "thing-1.0-cp311-cp311-manylinux_2_38_x86_64.whl"]
    text = wheel_pins([package(*files)], places(CUDA))
    assert text.splitlines() == ["thing==1.0 \\", f"    --hash=sha256:{'0' * 64} \\", f"    --hash=sha256:{'1' * 64}"]


def test_a_pin_for_other_systems_only_is_left_out():
    assert "thing" not in wheel_pins(
        [package(ANY, marker="sys_platform == 'win32'"), package(ANY) | {"name": "x"}], places(CUDA)
    )


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ([], "linux/amd64 with Python 3.11"),
        ([f"thing-1.0-cp38-abi3-{X86}"], "linux/arm64 with Python 3.13"),
        ([f"thing-1.0-cp311-cp311-{X86}", f"thing-1.0-cp311-cp311-{ARM}"], "linux/arm64 with Python 3.12"),
        (
            [f"thing-1.0-cp38-abi3-{ARM}", "thing-1.0-cp38-abi3-manylinux_2_39_x86_64.whl"],
            "linux/amd64 with Python 3.12",
        ),
    ],
)
def test_a_pin_that_is_no_wheel_somewhere_is_an_error_that_says_where(files, where):
    with pytest.raises(EngineProblem, match=f"thing 1.0 has no wheel for {where}"):
        wheel_pins([package(*files)], places(CUDA))


def wheel(folder: Path, content: str) -> str:
    """A small wheel in `folder`; returns its sha256."""
    file = folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("thing.py", content)
        packed.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        packed.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr("thing-1.0.dist-info/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_wheel_that_is_not_the_pinned_one_is_refused_and_leaves_no_wheelhouse(tmp_path, monkeypatch):
    """pip itself, against an index (a folder) that serves an altered file under a pinned name."""
    (tmp_path / "index").mkdir()
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing/pins.txt").write_text(f"thing==1.0 \\\n    --hash=sha256:{wheel(tmp_path / 'index', 'x = 1')}\n")
    (tmp_path / "control.txt").write_text((tmp_path / "thing/pins.txt").read_text().replace("thing==", "uv=="))
    wheel(tmp_path / "index", "x = 2")
    monkeypatch.setattr("images.wheels.IMAGES", tmp_path)
    monkeypatch.setattr("images.wheels.CONTROL_PINS", tmp_path / "control.txt")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index"), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path / "cache"))
    with pytest.raises(EngineProblem, match="a downloaded wheel is not the pinned one: the index serves altered files"):
        ensure_wheels("thing", "linux/arm64", "3.12", None)
    assert not list((tmp_path / "cache").rglob("complete")) and not list((tmp_path / "cache").rglob("*.whl"))


def test_pins_are_checked_from_the_front_door_without_a_network(inv):
    answer = inv("pins", "--check", UV_OFFLINE="1", PIP_NO_INDEX="1", https_proxy="http://127.0.0.1:9")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("pins answer what is asked for") == len(pin_sets())
    assert inv("pins").returncode == 2
