"""Every file that names the version names the same one. `make package` builds with it."""

import re
from pathlib import Path

from deft_backend.settings.version import VERSION

ROOT = Path(__file__).parents[2]


def test_changelog_and_citation_name_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d\S*)", changelog, re.MULTILINE)
    assert newest is not None
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
