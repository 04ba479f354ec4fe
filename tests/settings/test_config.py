"""Settings: every variable, its limits, and the table in the documentation."""

import logging
from pathlib import Path

import pytest

from deft_backend.policies import POLICY_NAMES
from deft_backend.settings import config
from deft_backend.settings.config import REMOVED, VARIABLES, Settings, SettingsError, warn_unknown

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_defaults():
    settings = Settings.from_env({})
    assert settings == Settings()
    assert settings.policy == "auto"
    assert settings.policy in POLICY_NAMES
    assert settings.fallback_backend is None


def test_empty_means_unset():
    assert Settings.from_env({"DEFT_MIN_BATCH": "", "DEFT_LOG": "  "}) == Settings()


@pytest.mark.parametrize(
    ("name", "value", "field", "parsed"),
    [
        ("DEFT_POLICY", "fasttree", "policy", "fasttree"),
        ("DEFT_MAX_BATCH", "4096", "max_batch", 4096),
        ("DEFT_FALLBACK_BACKEND", "triton", "fallback_backend", "triton"),
        ("DEFT_VERIFY", "true", "verify", True),
        ("DEFT_VERIFY", "No", "verify", False),
        ("DEFT_CACHE_DIR", "/somewhere/new", "cache_dir", Path("/somewhere/new")),
    ],
)
def test_values(name, value, field, parsed):
    assert getattr(Settings.from_env({name: value}), field) == parsed


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DEFT_POLICY", "fastest", "one of flash-decoding, "),
        ("DEFT_MIN_BATCH", "0", "an integer of 1 or more"),
        ("DEFT_MIN_BATCH", "2.5", "an integer of 1 or more"),
        ("DEFT_MAX_BATCH", "4097", "an integer from 1 to 4096"),
        ("DEFT_VERIFY", "maybe", "1 (or true, yes, on) or 0 (or false, no, off)"),
        ("DEFT_CACHE_DIR", __file__, "a directory, existing or to be made"),
    ],
)
def test_errors_name_variable_value_and_what_is_allowed(name, value, expected):
    with pytest.raises(SettingsError) as raised:
        Settings.from_env({name: value})
    assert str(raised.value).startswith(f"{name} is {value!r}; expected {expected}")


def test_removed_variables_name_what_replaced_them(caplog, monkeypatch):
    monkeypatch.setattr(config, "_warned", set())
    removed = dict.fromkeys(REMOVED, "1")
    env = {**removed, "DEFT_MIN_BATCH": "0"}
    with pytest.raises(SettingsError) as raised:
        Settings.from_env(env)
    *lines, last = str(raised.value).splitlines()
    assert lines == [f"{name} was removed: {text}; unset it" for name, text in REMOVED.items()]
    assert last.startswith("DEFT_MIN_BATCH is '0'")
    warn_unknown(removed)  # the error has said it
    assert not caplog.records
    assert not {v.name for v in VARIABLES} & set(REMOVED)
    assert Settings.from_env(dict.fromkeys(REMOVED, " ")) == Settings()


def test_unknown_variables_are_said_once(caplog, monkeypatch):
    monkeypatch.setattr(config, "_warned", set())
    env = {"DEFT_POLCY": "auto", "DEFT_POLICY": "auto", "PATH": "/bin", "DEFT_XYZZY": "1"}
    with caplog.at_level(logging.WARNING):
        warn_unknown(env)
        warn_unknown(env)
    assert [r.message for r in caplog.records] == [
        "deft: DEFT_POLCY is set, but no such setting exists; did you mean DEFT_POLICY?",
        "deft: DEFT_XYZZY is set, but no such setting exists; known are "
        + ", ".join(v.name for v in VARIABLES),
    ]


def test_the_documentation_has_the_same_table():
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `DEFT_")
    ]
    assert rows == [
        [f"`{v.name}`", f"`{v.default}`" if v.default else "unset", v.allowed, v.meaning]
        for v in VARIABLES
    ]
