"""The software list of an image holds what dpkg and Python themselves list, in valid CycloneDX."""

import importlib.metadata
import io
import json
import subprocess
import sysconfig
import tarfile
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from images.packages import python_name
from images.software import software_list


@pytest.fixture(scope="module")
def this_machine() -> bytes:
    """A layer with this machine's package database and this environment's distributions."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for path in ("/var/lib/dpkg/status", "/usr/lib/os-release"):
            tar.add(path)
        for path in Path("/usr/share/doc").glob("*/copyright"):
            tar.add(path, recursive=False)
        for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info/METADATA"):
            tar.add(path, arcname=f"opt/engine/{path.parent.name}/METADATA")
    return sink.getvalue()


def test_the_list_has_exactly_what_dpkg_and_python_list(inv, engine, this_machine, tmp_path):
    image, file = engine.load([this_machine]), tmp_path / "software.cdx.json"
    answer = inv("image.software", image, "--out", str(file))
    assert answer.returncode == 0, answer.stderr
    document = json.loads(file.read_text())
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(file.read_text()) is None
    components = {component["purl"].split("?")[0]: component for component in document["components"]}
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    debian = {tuple(line.split()[1:]) for line in lines if line.startswith("installed ")}
    assert {(c["name"], c["version"]) for purl, c in components.items() if purl.startswith("pkg:deb/")} == debian
    python = {(python_name(found.name), found.version) for found in importlib.metadata.distributions()}
    assert {(c["name"], c["version"]) for purl, c in components.items() if purl.startswith("pkg:pypi/")} == python
    assert components[f"pkg:pypi/rich@{importlib.metadata.version('rich')}"]["licenses"]
    assert document["metadata"]["component"]["version"] == engine.id(image)
    assert software_list(image) == document


def test_a_wheels_hash_is_in_the_list_where_the_pins_give_it(engine, this_machine):
    version = importlib.metadata.version("rich")
    document = software_list(engine.load([this_machine]), {f"rich=={version}": "ab" * 32})
    hashes = [component["hashes"] for component in document["components"] if "hashes" in component]
    assert hashes == [[{"alg": "SHA-256", "content": "ab" * 32}]]
