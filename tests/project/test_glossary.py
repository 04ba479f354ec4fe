"""No file uses a word that docs/glossary.md retires."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SEARCHED = (
    *["deft_backend", "patches", "benchmarks", "tools", "examples", "docs", "README.md"],
    *["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"],
)

EXEMPT = (
    "docs/glossary.md",  # it names the retired words
    "docs/kernel-log.md",  # the record of experiments uses the words of its time
    "docs/results/",  # recorded data
    "benchmarks/e2e/workloads.py",  # recorded data hold the names of its cases
)


@cache
def retired_words():
    """The first cells of the table whose header begins with "retired"."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| retired \|.*\n.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)
    return [word.strip() for cell in cells for word in cell.split(",")]


def retired_in(text):
    """Names like ``LaunchConfig`` and ``launch_config`` have two words each.

    Punctuation other than hyphens stays, so that no phrase spans it.
    """
    text = re.sub(r"\.stem\b", "", text)  # of a path
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", text)
    words = " " + " ".join(re.findall(r"[a-z0-9]+|[^\w\s-]", text.lower())) + " "
    return [word for word in retired_words() if f" {word} " in words]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the stem's rows", ["stem"]),
        ("class LaunchConfig:", ["launch config"]),
        ("tensor.shape[1], path.stem", []),
        ("the system launches, the configuration stays", []),
        ("import hopper_stem", ["stem"]),
    ],
)
def test_retired_words_are_found_in_names_and_prose(text, found):
    assert retired_in(text) == found


def test_nobody_writes_a_retired_word():
    """In tracked sources and documents."""
    tracked = subprocess.check_output(["git", "ls-files", *SEARCHED], cwd=ROOT, text=True)
    wrong = []
    for name in tracked.split():
        exempt = name.startswith(EXEMPT) and name != "docs/results/README.md"
        if exempt or not name.endswith((".py", ".md", ".html")) or not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        if retired_in(name) or retired_in(text):
            wrong += [
                f"{name}:{number}: {word!r}"  # line 0 is the path
                for number, line in enumerate([name, *text.splitlines()])
                for word in retired_in(line)
            ]
    assert not wrong, "docs/glossary.md retires these words:\n" + "\n".join(wrong)
