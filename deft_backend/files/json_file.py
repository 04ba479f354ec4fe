"""Read a JSON file that a user names, with errors that explain the fault."""

from pathlib import Path
from typing import Any

from deft_backend.files.private_files import parsed


def read_json(path: Path, error: type[Exception], what: str = "") -> Any:
    """The content of a JSON file.

    - `error`: the error to raise, with a message, if the file cannot be read or holds no JSON.
    - `what`: the kind of file, for the message, for example "the trace ".
    """
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise error(f"cannot read {what}{path}: {cause.strerror or cause}") from cause
    except ValueError as cause:
        raise error(f"{path}: expected JSON; {cause}") from cause
