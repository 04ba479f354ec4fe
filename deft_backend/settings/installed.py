"""The versions of installed distributions."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(distribution: str) -> str | None:
    """Version of a distribution in this environment, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
