"""Tests of a real Docker engine and a real registry."""

from tests.docker.registry import registry, second_registry  # noqa: F401
from tests.docker.small_images import engine, small, twin  # noqa: F401
