"""Documentation: paths, module names and versions are right. `make docs` checks links, and `make
package` builds with the version."""

import re
from pathlib import Path

import pytest

from compiled_gpus import COMPILED
from deft_backend.attention.self_check import RECORDED
from deft_backend.settings.version import VERSION

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "models/tiny-llama/README.md"]
)

HISTORY = {"CHANGELOG.md"}
"""Pages that also name removed modules."""

PLACES = (".", "deft_backend", "docs", "deft_backend/hosts/sglang", "deft_backend/hosts/vllm")
"""Folders for relative paths in backticks, in addition to the page's own."""

ELSEWHERE = ("reports/", "v1/", "srt/")
"""Files that commands write, and the hosts' own sources."""

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def test_the_readme_says_how_far_each_gpu_is_known():
    """Measured, checked by itself, or untested: as the data of the self-check says."""
    rows = re.findall(
        r"^\| ([^|]+) \| ((?:measured|checked)[^|]*) \|$", (ROOT / "README.md").read_text(), re.M
    )
    measured, checked, others = rows
    assert measured[0].split(", ") == list(RECORDED)
    assert measured[1].startswith("measured")
    assert checked[0].split("; ") == list(COMPILED)
    assert all(row[1].startswith("checked by itself") for row in (checked, others))
    assert "untested" in others[1]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_exists(page):
    """Paths in backticks that include a folder and name a source, a page or data."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    named = re.findall(r"`([\w.\-]+(?:/[\w.\-]+)+\.(?:py|md|json|html|toml))`", prose)
    places = [page.parent, *(ROOT / place for place in PLACES)]
    missing = {
        path
        for path in named
        if not path.startswith(ELSEWHERE) and not any((at / path).exists() for at in places)
    }
    assert not missing


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=name_of)
def test_every_module_exists(page):
    """Dotted names of our packages, in text and in code blocks."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\b(?:deft_backend|deft_patches|benchmarks|examples)(?:\.\w+)+", text)
    missing = set()
    for name in named:
        if name.rsplit(".", 1)[-1] in {"json", "md", "svg", "py", "html"}:
            continue
        path = ROOT.joinpath(*name.split("."))  # of a module, or of a name that a module defines
        if not any(at.is_dir() or at.with_suffix(".py").is_file() for at in (path, path.parent)):
            missing.add(name)
    assert not missing


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_changelog_and_citation_name_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d\S*)", changelog, re.MULTILINE)
    assert newest[1] == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_commands_to_copy_name_the_version():
    """Compose and Kubernetes start the tags that the Dockerfiles say to build."""
    files = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in (*files, *pages)]
    tags = [tag for text in texts for tag in re.findall(r"-t deft-(?:sglang|vllm)(\S*)", text)]
    images = [tag for text in texts for tag in re.findall(r"image: deft-\w+(\S*)", text)]
    wheels = [name for text in texts for name in re.findall(r"deft_backend-(\S*)-py3", text)]
    assert set(tags) == set(images) == {f":{VERSION}"}
    assert set(wheels) == {VERSION}
