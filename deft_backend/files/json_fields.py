"""Fields of JSON files, each with the type and the limits that its reader expects.

Commands import this module before they know their work: only readers of arrays load NumPy.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LARGEST = (1 << 63) - 1  # largest whole number of a field, unless its reader expects a smaller one

_MOST_SHOWN = 80
_short = reprlib.Repr()
_short.maxlevel = 3
_short.maxstring = _short.maxother = _MOST_SHOWN


class FieldError(ValueError):
    """A field is missing or impossible; the message names it and what the reader expected."""


def shown(value: Any) -> str:
    """A value for a message: short, however large it is and however deep it is nested.

    >>> shown([[1, 2], [3]]), len(shown(["long"] * 10_000)) < 90
    ('[[1, 2], [3]]', True)
    """
    text = _short.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _refused(content: Any, name: str, expected: str) -> FieldError:
    there = isinstance(content, Mapping) and name in content
    found = f"is {shown(content[name])}" if there else "is missing"
    return FieldError(f"{name} {found}; expected {expected}")


@contextmanager
def within(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise FieldError(f"{name}: {error}") from error


def number(content: Mapping[str, Any], name: str) -> float:
    value = content.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            converted = float(value)
        except OverflowError:
            converted = math.inf
        if math.isfinite(converted):
            return converted
    raise _refused(content, name, "a finite number")


def whole(content: Mapping[str, Any], name: str, least: int = 0, most: int = LARGEST) -> int:
    value = content.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    limits = f" of at least {least}" if most == LARGEST else f" from {least} to {most}"
    raise _refused(content, name, f"a whole number{'' if least == -LARGEST else limits}")


def text(content: Mapping[str, Any], name: str, most: int = 4096) -> str:
    value = content.get(name)
    if isinstance(value, str) and len(value) <= most and value.isprintable():
        return value
    raise _refused(content, name, f"a text of at most {most} printable characters")


def mapping(content: Any, name: str) -> Mapping[str, Any]:
    value = content.get(name) if isinstance(content, Mapping) else None
    if isinstance(value, Mapping):
        return value
    raise _refused(content, name, "an object")


def records(content: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = content.get(name)
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        return value
    raise _refused(content, name, "a list of objects")


def numbers(content: Mapping[str, Any], name: str, dimensions: int = 1) -> npt.NDArray[np.float64]:
    array = _array(content.get(name))
    if array is None or array.ndim != dimensions or array.dtype.kind not in "iuf":
        raise _refused(content, name, "a list of numbers")
    return array.astype("float64")


def whole_numbers(content: Mapping[str, Any], name: str) -> npt.NDArray[np.int32]:
    value = content.get(name)
    array = _array(value)
    if array is not None and array.shape == (0,):
        return array.astype("int32")
    if (
        array is None
        or array.ndim != 1
        or array.dtype.kind not in "iu"
        or array.min() < -(1 << 31)
        or array.max() >= 1 << 31
    ):
        raise _refused(content, name, "a list of whole numbers of 32 bits")
    return array.astype("int32")


def _array(value: Any) -> npt.NDArray[Any] | None:
    """A list as an array of its own dtype; None if it is not a list, or its rows are uneven."""
    if not isinstance(value, list):
        return None
    import numpy as np

    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        return None
