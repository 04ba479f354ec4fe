"""The package's version: the one place that holds it."""

from importlib.metadata import PackageNotFoundError, version

VERSION = "0.3.0"


def installed_version(distribution: str) -> str | None:
    """Version of a distribution in this environment, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
