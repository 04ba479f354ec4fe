"""Options of a host's server, read as a user types them."""

from collections.abc import Sequence


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The last value of an option, from ``--option value`` or ``--option=value``; None: none."""
    value = None
    for at, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            value = word.partition("=")[2]
        elif word == option and at + 1 < len(arguments):
            value = arguments[at + 1]
    return value
