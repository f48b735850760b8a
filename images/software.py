"""Room images: the software list of an image, as CycloneDX: every Debian package and Python distribution in it.

debsbom and cyclonedx-bom read a root folder or run inside the environment; here the databases come out of the stream
that `image.diff` reads, and cyclonedx-python-lib (OWASP, Apache-2.0) writes the document.
"""

import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.contrib.license.exceptions import InvalidSpdxLicenseException
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from images.errors import UsageProblem
from images.layers import FlatImage, read_images
from images.packages import Package, packages_of
from images.written import write_whole
from images.yaml_source import shown


def software_list(image: str, wheels: Mapping[str, str] | None = None) -> dict:
    """Return the CycloneDX 1.6 document of an image in the Docker engine, as plain values.

    `wheels` gives the SHA-256 of the file a distribution was installed from, by `name==version` as in pins: an
    installed distribution does not know it. The same image gives the same document: its serial number is made from
    the image id, its time is the image's own. Raises ImageProblem when the image or the engine is absent.
    """
    return describe(read_images([image])[0], wheels or {})


def describe(image: FlatImage, wheels: Mapping[str, str]) -> dict:
    """The document of an image that was read; `wheels` as in software_list."""
    system = _system(image.texts)
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, image.id))
    bom.metadata.timestamp = _created(image.config)
    bom.metadata.component = Component(
        name=image.name, version=image.id, type=ComponentType.CONTAINER, bom_ref=image.id
    )
    found: dict[str, Component] = {}
    for package in packages_of(image.texts):
        component = _component(package, system, wheels)
        known = found.setdefault(str(component.purl), component)
        if package.kind == "pypi":  # the same distribution in two environments is one component at two places
            known.properties.add(Property(name="station-recipes:path", value=f"/{package.place}"))
    bom.components.update(found.values())
    bom.register_dependency(bom.metadata.component, found.values())
    return json.loads(make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string())


def _component(package: Package, system: Mapping[str, str], wheels: Mapping[str, str]) -> Component:
    if package.kind == "deb":
        where = {"arch": package.place, "distro": f"{system['ID']}-{system.get('VERSION_ID', 'unknown')}"}
        purl = PackageURL("deb", system["ID"], package.name, package.version, where)
        properties = [Property(name="station-recipes:source-package", value=package.source)]
    else:
        purl, properties = PackageURL("pypi", None, package.name, package.version), []
    sha256 = wheels.get(f"{package.name}=={package.version}") if package.kind == "pypi" else None
    return Component(
        name=package.name,
        version=package.version,
        description=package.summary or None,
        purl=purl,
        bom_ref=str(purl),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [],
        licenses=_licences(package.licences),
        properties=properties,
    )


def _licences(said: tuple[str, ...]) -> list:
    """What a package says of its licence: one SPDX expression, or SPDX ids and else names, as the format wants."""
    factory = LicenseFactory()
    if len(said) == 1:
        return [factory.make_from_string(said[0])]
    made = []
    for name in said:
        try:
            made.append(factory.make_with_id(name))
        except InvalidSpdxLicenseException:
            made.append(factory.make_with_name(name))
    return made


def _system(texts: Mapping[str, bytes]) -> dict[str, str]:
    """os-release as a mapping; without one the system is taken for Debian, whose package database it has."""
    text = texts.get("etc/os-release") or texts.get("usr/lib/os-release") or b""
    lines = (line.partition("=") for line in text.decode(errors="replace").splitlines())
    return {"ID": "debian"} | {name: value.strip("\"'") for name, equals, value in lines if equals}


def _created(config: Mapping) -> datetime:
    """When the image says it was made, to the second; the epoch where it does not say."""
    try:
        return datetime.fromisoformat(f"{str(config.get('created'))[:19]}+00:00")
    except ValueError:
        return datetime.fromtimestamp(0, UTC)


def write_software_list(document: Mapping, file: Path) -> None:
    """Write the document, whole or not at all. Raises UsageProblem when the file can't be written."""
    try:
        write_whole(file, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise UsageProblem(f"{shown(file)}: can't be written: {error.strerror}") from None
