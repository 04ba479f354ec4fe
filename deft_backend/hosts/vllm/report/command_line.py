"""What only the server's command line shows: its port, and the backend that it selects.

vLLM's engine and worker processes keep the command line of the server that started them.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

DEFAULT_PORT = 8000


def port_of(arguments: Sequence[str]) -> int:
    """The server's port, which vLLM's configuration does not hold.

    >>> port_of(["api_server", "--port", "8123"]), port_of(["serve", "M", "--port=81"]), port_of([])
    (8123, 81, 8000)
    """
    ports = [int(text) for text in values_of(arguments, "--port") if text.isdigit()]
    return ports[-1] if ports else DEFAULT_PORT


def values_of(arguments: Sequence[str], name: str) -> list[str]:
    """An option's values, the valid one last: of ``--config``'s file, then of the command line."""
    values = _configured(arguments, name)
    for word, following in pairwise([*arguments, ""]):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == name:
            values.append(value if equals else following)
    return values


def _configured(arguments: Sequence[str], name: str) -> list[str]:
    """The option in the YAML file that the command line names, if there is one."""
    import yaml  # vLLM itself reads the file with PyYAML

    files = [word for before, word in pairwise(arguments) if before == "--config"]
    try:
        content = yaml.safe_load(Path(files[0]).read_text()) if files else None
    except (OSError, ValueError, yaml.YAMLError):
        return []  # the server does not start with such a file
    key = name.removeprefix("--")
    return [str(content[key])] if isinstance(content, dict) and key in content else []
