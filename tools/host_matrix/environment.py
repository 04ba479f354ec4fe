"""Make an environment with one version of a host, this package and the tests' requirements."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.host_matrix.requirements import pins_a_stub, requirements_of
from tools.host_matrix.version_choice import DISTRIBUTIONS
from tools.host_matrix.wheels import download_wheel

ROOT = Path(__file__).parents[2]
FREE_GB = {"sglang": 14, "vllm": 8}
"""Disk space that the installation of an environment needs."""

# Print errors only. Python compiles what it imports; pip would compile all files of a host, which
# takes longer than its tests need.
_PIP = (
    "-m", "pip", "install", "--quiet", "--quiet", "--progress-bar", "off", "--no-compile",
)  # fmt: skip


class NoEnvironmentError(RuntimeError):
    """The environment could not be made; the message tells the user why."""


def create(host: str, version: str, folder: Path) -> None:
    """Install a host and this checkout, editable, into a virtual environment.

    An existing environment is completed.

    Raises
    ------
    NoEnvironmentError
        If the disk is full or an installation fails.
    WheelError
        If the index does not have the version.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(host, folder)
    if not python_of(folder).exists():
        _run([sys.executable, "-m", "venv", str(folder)])
    python = str(python_of(folder))
    _run([python, *_PIP, "--upgrade", "pip"])
    ours = ["--editable", f"{ROOT}[test]"]
    with tempfile.TemporaryDirectory(prefix="host-matrix-") as downloads:
        wheel = download_wheel(DISTRIBUTIONS[host], version, Path(downloads))
        if host == "sglang" and not pins_a_stub(wheel):
            _run([python, *_PIP, str(wheel), *ours])
            return
        listed = Path(downloads) / "requirements.txt"
        listed.write_text("\n".join(requirements_of(wheel)) + "\n")
        _run([python, *_PIP, "--requirement", str(listed), *ours])
        _run([python, *_PIP, "--no-deps", str(wheel)])


def remove(folder: Path) -> None:
    """Delete an environment."""
    shutil.rmtree(folder, ignore_errors=True)


def python_of(folder: Path) -> Path:
    """The environment's interpreter."""
    return folder / "bin" / "python"


def installed_versions(folder: Path, *distributions: str) -> dict[str, str | None]:
    """Versions of distributions in an environment; None for those it does not have."""
    program = (
        "import json, sys\n"
        "from importlib.metadata import PackageNotFoundError, version\n"
        "def find(name):\n"
        "    try:\n"
        "        return version(name)\n"
        "    except PackageNotFoundError:\n"
        "        return None\n"
        "print(json.dumps({name: find(name) for name in sys.argv[1:]}))\n"
    )
    done = subprocess.run(
        [str(python_of(folder)), "-c", program, *distributions],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def _check_disk(host: str, folder: Path) -> None:
    free = shutil.disk_usage(folder.parent).free / 1e9
    if not folder.exists() and free < FREE_GB[host]:
        raise NoEnvironmentError(
            f"{folder.parent} has {free:.0f} GB free; an environment with {host} needs "
            f"{FREE_GB[host]} GB. Free some, or name another folder"
        )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise NoEnvironmentError(f"exit code {done.returncode} from: {' '.join(command)}")
