"""docs/glossary.md defines each word once, in short, and no file uses its retired words."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"

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


def tables(text):
    """The header's first cell and the body's cells of every Markdown table."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [
            [cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in block.splitlines()
        ]
        found.append((lines[0][0], lines[2:]))
    return found


def terms():
    """Each word of the glossary, with its meaning."""
    text = GLOSSARY.read_text(encoding="utf-8")
    for first, body in tables(text):
        if first == "word":
            yield from ((cells[0], cells[1]) for cells in body)


@cache
def retired_words():
    text = GLOSSARY.read_text(encoding="utf-8")
    (body,) = (body for first, body in tables(text) if first == "retired")
    return [word.strip() for cells in body for word in cells[0].split(",")]


def as_words(text):
    """Lower-case words; names like ``LaunchConfig`` and ``launch_config`` are split.

    Punctuation other than hyphens stays, so that no phrase spans it.

    >>> as_words("`LaunchConfig` of HTTPServer(launch_config)")
    ' ` launch config ` of http server ( launch config ) '
    """
    text = re.sub(r"\.stem\b", "", text)  # of a path
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", text)
    return " " + " ".join(re.findall(r"[a-z0-9]+|[^\w\s-]", text.lower())) + " "


def retired_in(text):
    words = as_words(text)
    return [word for word in retired_words() if f" {word} " in words]


def written_files():
    """Tracked sources and documents in which only the glossary's words may occur."""
    listed = subprocess.run(
        ["git", "ls-files", *SEARCHED], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [
        name
        for name in listed
        if name.endswith((".py", ".md", ".html"))
        and (name == "docs/results/README.md" or not name.startswith(EXEMPT))
        and (ROOT / name).is_file()
    ]


def test_the_glossary_defines_each_word_once():
    words = [word for word, _ in terms()]
    assert len(words) > 50
    assert sorted(set(words)) == sorted(words)


def test_definitions_are_short():
    """At most three sentences, each of at most 20 words."""
    for word, meaning in terms():
        sentences = re.split(r"(?<=\.) (?!Short:)", meaning)
        assert len(sentences) <= 3, f"{word}: {len(sentences)} sentences"
        for sentence in sentences:
            assert len(sentence.split()) <= 20, f"{word}: {sentence}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the stem's rows", ["stem"]),
        ("class LaunchConfig:", ["launch config"]),
        ("launch_config(head_dim)", ["launch config"]),
        ("tensor.shape[1], path.stem", []),
        ("shape 1 of three", ["shape 1"]),
        ("the system launches, the configuration stays", []),
        ("import hopper_stem", ["stem"]),
        ("a packed item", ["packed"]),
        ("self._packed", ["packed"]),
    ],
)
def test_retired_words_are_found_in_names_and_prose(text, found):
    assert retired_in(text) == found


def test_nobody_writes_a_retired_word():
    wrong = []
    for name in written_files():
        paths = retired_in(name)
        text = (ROOT / name).read_text(encoding="utf-8")
        wrong += [f"{name}: its path says {word!r}" for word in paths]
        if retired_in(text):
            wrong += [
                f"{name}:{number}: {word!r}"
                for number, line in enumerate(text.splitlines(), 1)
                for word in retired_in(line)
            ]
    assert not wrong, "docs/glossary.md retires these words:\n" + "\n".join(wrong)
