"""Digests of the package's sources, so that compiled code and cost tables follow their changes."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def digest_of(places: Iterable[str]) -> str:
    """Digest of Python sources: their paths in the package and their texts.

    - `places`: Files and folders of the package, relative to it; a folder stands for all its
      modules.
    """
    digest = hashlib.sha256()
    for place in places:
        root = PACKAGE / place
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            name = path.relative_to(PACKAGE).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
