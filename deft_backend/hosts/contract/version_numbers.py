"""Compare the version numbers of hosts' releases."""

import re

_CLAUSE = re.compile(r"^(>=|<=|==|!=|~=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?$")


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
    """Whether a version satisfies a specifier (PEP 440); an empty one admits all versions.

    >>> matches("0.5.20", ">=0.5.18,<0.5.23"), matches("0.5.23", ">=0.5.18,<0.5.23")
    (True, False)

    Raises ValueError if either is malformed.
    """
    clauses = [clause.strip() for clause in specifier.split(",") if clause.strip()]
    return all(_matches_clause(version_key(version), clause, specifier) for clause in clauses)


def _matches_clause(version: tuple[int, int, int], clause: str, specifier: str) -> bool:
    parts = _CLAUSE.match(clause)
    if parts is None:
        raise ValueError(
            f"{clause!r} in {specifier!r} is not a version clause; expected for example >=0.5.18"
        )
    operator, number, wildcard = parts.groups()
    bound = version_key(number)
    given = number.count(".") + 1
    if operator in ("==", "!="):
        length = given if wildcard else 3
        return (version[:length] == bound[:length]) == (operator == "==")
    if operator == "~=":
        return version >= bound and version[: given - 1] == bound[: given - 1]
    return {
        ">=": version >= bound, "<=": version <= bound, "<": version < bound, ">": version > bound
    }[operator]  # fmt: skip
