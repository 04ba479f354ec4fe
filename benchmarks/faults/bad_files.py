"""Folders as a server must not trust them: damaged files, links, other versions."""

from __future__ import annotations

import json
from pathlib import Path


def spoil(cache: Path, port: int) -> list[str]:
    """Fill a cache folder with files that a server may read or replace; returns what is wrong."""
    servers, tables, kernels = (cache / name for name in ("servers", "tables", "kernels"))
    for folder in (servers, tables, kernels):
        folder.mkdir(parents=True)
    elsewhere = cache / "elsewhere.json"
    elsewhere.write_text("not yours")
    for rank in range(2):
        (servers / f"{port}-tp{rank}.json").symlink_to(elsewhere)
    (servers / f"{port}-tp0.batch.json").write_text("[" * 5000)
    (servers / f"{port}-tp0.wanted").write_text("")
    for number, text in enumerate(("", "{", '{"format": 99}', "\x00\xff", "[" * 50_000)):
        (tables / f"gpu-{number}.json").write_text(text, encoding="latin-1")
    manifest = {"format": 1, "package": "0.0.1", "kernels": {"../..": {"x.json": "0"}}}
    (kernels / "manifest.json").write_text(json.dumps(manifest)[:-9])
    (kernels / "manifest.json").chmod(0o666)
    return [
        "the state file is a link", "an answer file is damaged", "five cost tables are damaged",
        "the kernel folder is damaged and writable for others",
    ]  # fmt: skip


def still_there(cache: Path) -> bool:
    """Whether the file behind the link is as it was."""
    return (cache / "elsewhere.json").read_text() == "not yours"
