"""Room images: where an engine image may be pulled from, as its image.yaml declares it."""

from images.build import missing_digest
from images.declaration import declaration
from images.docker_engine import platform_here
from images.errors import UsageProblem


def pull_references(name: str, platform: str | None = None) -> list[str]:
    """The declared references of images/<name>/image.yaml for one platform, the upstream one first.

    Raises UsageProblem when there is no such image, it declares no pull source, or not the platform's digest.
    """
    platform = platform or platform_here()
    facts = declaration(name)
    pull = facts.sources.pull
    if pull is None:
        raise UsageProblem(f"images/{name}/image.yaml declares no pull source: there is nothing to ask a registry for")
    if platform not in pull.platforms:
        raise UsageProblem(f"images/{name}/image.yaml has {', '.join(pull.platforms)}, and no image for {platform}")
    if pull.platforms[platform].digest is None:
        raise UsageProblem(missing_digest(facts, platform))
    return [f"{repository}@{pull.platforms[platform].digest}" for repository in pull.repositories]
