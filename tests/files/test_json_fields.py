"""Fields of JSON files: the values at each limit, and those beyond."""

import pytest

from deft_backend.files import json_fields

TOP = (1 << 31) - 1


@pytest.mark.parametrize(
    ("field", "given", "accepted", "refused"),
    [
        ("whole", {}, (0, (1 << 63) - 1), (-1, 1 << 63)),
        ("whole", {"least": 1 - (1 << 63)}, (1 - (1 << 63),), (-(1 << 63), 1 << 63)),
        ("text", {}, (4096 * "x",), (4097 * "x",)),
        ("number", {}, (0, -1.5, 1e308), (True, "1", None, float("nan"), 10**400)),
        ("whole", {"least": 2, "most": 5}, (2, 5), (1, 6, 2.0, True, None)),
        ("text", {"most": 3}, ("", "abc"), ("abcd", "a\n", 1, None)),
        ("numbers", {}, ([], [1, 2.5]), (["1"], [[1], [2]], 1, None)),
        ("numbers", {"dimensions": 2}, ([[1], [2.5]],), ([1], [[1], [1, 2]], 1, None)),
        (
            "whole_numbers",
            {},
            ([], [-TOP - 1, TOP]),
            ([-TOP - 2, 0], [0, TOP + 1], [1.5], [[1]], [True], 1, None),
        ),
    ],
)
def test_limits(field, given, accepted, refused):
    read = getattr(json_fields, field)
    for value in accepted:
        found = read({"here": value}, "here", **given)
        assert found == value if not isinstance(value, list) else found.tolist() == value
    for value in refused:
        with pytest.raises(json_fields.FieldError, match=r"here is .*; expected "):
            read({"here": value}, "here", **given)
    with pytest.raises(json_fields.FieldError, match="here is missing"):
        read({}, "here", **given)


def test_what_a_message_says():
    """The limits of whole numbers, unless nobody set one; a long value is cut."""
    given = {"least": -json_fields.LARGEST}
    for limits, said in (
        ({}, "a whole number of at least 0"),
        ({"least": 1, "most": 2}, "a whole number from 1 to 2"),
        (given, "a whole number"),
    ):
        with pytest.raises(json_fields.FieldError) as error:
            json_fields.whole({"x": 90 * "x"}, "x", **limits)
        assert str(error.value) == f"x is '{37 * 'x'}...{38 * 'x'}'; expected {said}"
    assert json_fields.shown([[["at", [1]]]]) == "[[['at', [...]]]]"
    many = [11 * "a"] * 5
    for last, cut in ((123, ""), (1234, "…")):
        assert json_fields.shown([*many, last]) == f"{[*many, last]}"[:80] + cut
