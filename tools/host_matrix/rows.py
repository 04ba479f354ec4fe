"""The record of the host versions that passed: one row for each version, device and suite."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deft_backend.hosts.common.contract import version_key
from tools.host_matrix.environment import ROOT, NoEnvironmentError, installed_versions
from tools.host_matrix.releases import DISTRIBUTIONS
from tools.host_matrix.suite import Outcome

RECORD = ROOT / "docs" / "results" / "hosts.json"

Row = dict[str, Any]


def row_of(host: str, suite: str, environment: Path, outcome: Outcome) -> Row:
    found = installed_versions(environment, "torch", "triton")
    return {
        "host": host,
        "version": version_of(host, environment),
        "torch": found["torch"],
        "triton": found["triton"],
        "device": outcome.device,
        "suite": suite,
        "passed": outcome.passed,
        "failed": outcome.failed,
        "tree_steps": outcome.tree_steps,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def version_of(host: str, environment: Path) -> str:
    """The host's version in an environment; raises NoEnvironmentError if it is not installed."""
    found = installed_versions(environment, DISTRIBUTIONS[host], host)
    version = found[DISTRIBUTIONS[host]] or found[host]
    if version is None:
        raise NoEnvironmentError(f"{environment} holds no {host}; install it there first")
    return version


def put(row: Row, record: Path = RECORD) -> None:
    """Add a row to the record; it replaces the row of the same version, device and suite."""
    rows: list[Row] = json.loads(record.read_text()) if record.exists() else []
    rows = [r for r in rows if _key(r) != _key(row)] + [row]
    rows.sort(key=lambda r: (r["host"], version_key(r["version"]), *_key(r)))
    lines = ",\n".join(f"  {json.dumps(r)}" for r in rows)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(f"[\n{lines}\n]\n")


def _key(row: Row) -> tuple[str, str, str, str]:
    return row["host"], row["version"], row["device"], row["suite"]


def _commit() -> str:
    """The commit of the checkout, marked if files differ from it."""
    commit = _git("rev-parse", "--short=7", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORD}")
    return f"{commit}+" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
