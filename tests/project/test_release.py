"""The version: from tags, even in a checkout that was never built, and cheap to import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = re.compile(r"\d+\.\d+\.\d+(\.dev\d+)?(\+[\w.]+)?")


@pytest.mark.parametrize("built", [None, "1.2.3"])
def test_the_version_of_a_checkout_and_of_a_build(tmp_path: Path, built: str | None) -> None:
    package = tmp_path / "deft_backend"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text((ROOT / "deft_backend" / "version.py").read_text())
    if built is not None:
        (package / "_version.py").write_text(f"version = {built!r}\n")
    script = "import sys, deft_backend.settings.version as v; print(v.VERSION, len(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=tmp_path, capture_output=True, text=True,
        check=True, env={"PYTHONPATH": str(tmp_path)}, timeout=60,
    ).stdout.split()  # fmt: skip
    assert VERSION.fullmatch(found[0])
    assert built is None or found[0] == built
    assert int(found[1]) < 80, "the module imports more than the interpreter itself does"


def test_both_fallbacks_name_the_same_version() -> None:
    in_module = re.search(r'VERSION = "(.*)"', (ROOT / "deft_backend" / "version.py").read_text())
    in_build = re.search(r'fallback-version = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert in_module is not None
    assert in_build is not None
    assert in_module[1] == in_build[1]


def test_git_archive_keeps_the_version() -> None:
    assert ".git_archival.txt export-subst" in (ROOT / ".gitattributes").read_text()
    assert "describe:tags=true" in (ROOT / ".git_archival.txt").read_text()
