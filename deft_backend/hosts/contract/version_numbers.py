"""Compare the version numbers of hosts' releases."""

import re


def version_key(text: str) -> tuple[int, int, int]:
    """The first three numbers of a version, for comparison.

    Pre-releases, post-releases and local builds count as the release that they belong to. Hosts cut
    a branch before a pre-release, so its source is that of the release.

    >>> version_key("0.5.17.post1+cu130") < version_key("0.5.18rc0")
    True
    >>> version_key("0.33") == version_key("0.33.0")
    True

    Raises ValueError if the text does not begin with a number.
    """
    begin = re.match(r"\s*v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
    if begin is None:
        raise ValueError(f"{text!r} is not a version; expected for example 0.5.23")
    first, second, third = (int(number or 0) for number in begin.groups())
    return first, second, third


def matches(version: str, specifier: str) -> bool:
    """Whether a version satisfies clauses of ``>=`` and ``<``; none admits all versions.

    >>> matches("0.5.20", ">=0.5.18,<0.5.23"), matches("0.5.23", ">=0.5.18,<0.5.23")
    (True, False)

    Raises ValueError if either is malformed.
    """
    for clause in filter(None, map(str.strip, specifier.split(","))):
        if not clause.startswith((">=", "<")) or clause.startswith("<="):
            raise ValueError(f"{clause!r} is not a version clause; expected for example >=0.5.18")
        below = version_key(version) < version_key(clause.lstrip("<>="))
        if below != clause.startswith("<"):
            return False
    return True
