"""The origin of a figure: device, versions, commit and date, stored with every result."""

import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from deft_backend.settings.version import installed_version

PACKAGES = ("deft-backend", "torch", "triton", "sglang", "vllm", "flashinfer-python", "numpy")


def provenance() -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": _device(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := installed_version(name))},
    }


def _device() -> str:
    import torch

    if torch.cuda.is_available():  # only counts the devices: no CUDA context
        return f"{_gpu_name()} (CUDA {torch.version.cuda})"
    return f"CPU: {platform.processor() or platform.machine()}"


def _gpu_name() -> str:
    """PyTorch's name of the GPU, read in a separate process.

    PyTorch starts CUDA for it, which would take GPU memory from the servers under measurement.
    """
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_name()
    ask = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.run(
        [sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def _commit() -> str | None:
    if named := os.environ.get("GIT_COMMIT"):  # a copy without a repository
        return named
    root = Path(__file__).parents[2]
    archival = root / ".git_archival.txt"  # `git archive` writes the commit into it
    text = archival.read_text() if archival.is_file() else ""
    if archived := re.search(r"^node: ([0-9a-f]{12})", text, re.MULTILINE):
        return archived[1]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None
