"""The version: one file holds it, the build reads it, and it is cheap to import."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION_FILE = "deft_backend/settings/version.py"


def version_in_file(pattern):
    found = re.search(pattern, (ROOT / VERSION_FILE).read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def test_the_version_is_read_without_the_package(tmp_path):
    """A copy of the file alone gives the version: no tag, no git, no import."""
    (tmp_path / "version.py").write_text((ROOT / VERSION_FILE).read_text(encoding="utf-8"))
    script = "import sys, version; print(version.VERSION, len(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-S", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert re.fullmatch(r"\d+\.\d+\.\d+", printed[0])
    assert int(printed[1]) < 80, "the module imports more than the interpreter itself does"


def test_the_build_reads_the_version_file():
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'path = "{VERSION_FILE}"' in settings
    assert 'dynamic = ["version"]' in settings
    pattern = re.search(r"^pattern = '(.*)'$", settings, re.MULTILINE)
    assert pattern is not None
    assert version_in_file(pattern[1]) == version_in_file(r'VERSION = "(.*)"')


def test_changelog_and_citation_name_the_version():
    version = version_in_file(r'VERSION = "(.*)"')
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d\S*)", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_commands_to_copy_name_the_version():
    """Compose and Kubernetes start the tags that the Dockerfiles say to build."""
    version = version_in_file(r'VERSION = "(.*)"')
    files = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in (*files, *pages)]
    tags = [tag for text in texts for tag in re.findall(r"-t deft-(?:sglang|vllm)(\S*)", text)]
    images = [tag for text in texts for tag in re.findall(r"image: deft-\w+(\S*)", text)]
    wheels = [name for text in texts for name in re.findall(r"deft_backend-(\S*)-py3", text)]
    assert set(tags) == set(images) == {f":{version}"}
    assert set(wheels) == {version}


def test_git_archive_keeps_the_commit():
    assert ".git_archival.txt export-subst" in (ROOT / ".gitattributes").read_text()
    assert (ROOT / ".git_archival.txt").read_text() == "node: $Format:%H$\n"
