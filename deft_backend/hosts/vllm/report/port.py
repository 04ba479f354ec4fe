"""Find the server's port, which vLLM's configuration does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

DEFAULT_PORT = 8000


def port_of(arguments: Sequence[str]) -> int:
    """The server's port, from its command line.

    vLLM's configuration does not hold the port. Its engine and worker processes keep the command
    line of the server that started them. As in vLLM, the last of several ports on the command line
    is valid, and it overrides the file behind ``--config``.

    Examples
    --------
    >>> port_of(["api_server", "--port", "8123"]), port_of(["serve", "M", "--port=81"]), port_of([])
    (8123, 81, 8000)
    """
    port = _configured_port(arguments) or DEFAULT_PORT
    for at, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name == "--port":
            value = value or (arguments[at + 1] if at + 1 < len(arguments) else "")
            if value.isdigit():
                port = int(value)
    return port


def _configured_port(arguments: Sequence[str]) -> int | None:
    """The port in the YAML file that the command line names, if there is one."""
    import yaml  # vLLM itself reads the file with PyYAML

    names = [word for before, word in pairwise(arguments) if before == "--config"]
    try:
        content = yaml.safe_load(Path(names[0]).read_text()) if names else None
    except (OSError, ValueError, yaml.YAMLError):
        return None  # the server does not start with such a file
    port = str(content.get("port")) if isinstance(content, dict) else ""
    return (
        int(port) if port.isdigit() else None
    )  # with or without quotes, as the host's parser accepts it
