"""The package's version: the one place that holds it."""

VERSION = "0.3.0"


def installed_version(distribution: str) -> str | None:
    """Version of a distribution in this environment, or None."""
    # The build reads this file, so it imports nothing at its top.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
