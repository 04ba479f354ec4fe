"""Settings: every variable, its limits, and the table in the documentation."""

from pathlib import Path

import pytest

from deft_backend.settings import config
from deft_backend.settings.config import REMOVED, VARIABLES, Settings, SettingsError, warn_unknown
from drawings import check_drawn

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_settings_are_read_as_drawn():
    """Lines of the file: variables, and then the settings that are not defaults, or the error."""
    path, every = Path(__file__).with_name("settings.txt"), []
    for line in path.read_text().splitlines()[::2]:
        try:
            read = Settings.from_env(dict(word.split("=") for word in line.split("; ")))
            found = {k: v for k, v in vars(read).items() if v != getattr(Settings(), k)}
        except SettingsError as error:
            found = error
        every += [line, str(found).replace("\n", "; ")]
    check_drawn("\n".join(every) + "\n", path)


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
    for _ in range(2):
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
