"""Files that a command writes where its user says."""

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a file in one go, so that an interrupted command leaves the old one as it was.

    A link stays a link. A device or a pipe cannot be replaced, and is written in place.

    Raises OSError if it cannot be written. No part of it stays behind.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
