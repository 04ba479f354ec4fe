"""Entry point of vLLM's plugin group: runs in every process of every server on the machine."""

import logging
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from deft_backend.files.folders import state_directory
from deft_backend.hosts.vllm import versions
from deft_backend.hosts.vllm.versions import OWN_NAME, PLACEHOLDER, VLLM
from deft_backend.settings.config import Settings, SettingsError

logger = logging.getLogger("deft_backend")


def register() -> None:
    """Name tree attention ``CUSTOM`` and, where vLLM takes it, ``DEFT``; a failure is one line in
    the log. Raises SystemExit if the command line asks for the plugin and a ``DEFT_*`` value is not
    allowed: plugins load first, so the message is the log's last line.
    """
    try:
        _log_with_the_host()
        _register()
    except Exception as error:
        logger.warning(
            "deft: the plugin could not be registered (%r); this server runs without tree "
            "attention. Run `deft doctor`",
            error,
        )
    if asks_for_us(sys.argv):
        try:
            Settings.from_env()
        except SettingsError as error:
            raise SystemExit(f"deft: {error}") from None


def asks_for_us(arguments: Sequence[str]) -> bool:
    """Whether a server's command line names the plugin as its attention backend.

    >>> asks_for_us(["serve", "M", "--attention-backend", "deft"]), asks_for_us(["serve", "deft"])
    (True, False)
    """
    names = [word.partition("=")[0].replace("_", "-") for word in arguments]
    texts = values_of(arguments, "--attention-backend")[-1:]  # the last one is valid
    for name in sorted(set(names)):
        if re.fullmatch(r"(--attention-config|-ac)(\.backend)?", name):
            texts += values_of(arguments, name)
    ours = re.compile(rf"\b({PLACEHOLDER}|{OWN_NAME})\b", re.IGNORECASE)
    return any(ours.search(text) for text in texts)


def _log_with_the_host() -> None:
    """Add our lines to the host's log, in its format: vLLM configures only its own logger."""
    host = logging.getLogger("vllm")
    if host.handlers and not logger.handlers:
        for handler in host.handlers:
            logger.addHandler(handler)
        logger.setLevel(host.level)
        logger.propagate = host.propagate


def _register() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    versions.register("deft_backend.hosts.vllm.registered.Custom")  # loaded when a layer needs it
    reason = VLLM.refuse()
    if reason is None:
        _show_counters()
    # On a GPU, the plugin's class logs this itself. The CPU platform never asks that class.
    if not current_platform.is_cpu() or AttentionBackendEnum.CPU_ATTN.is_overridden():
        return
    if asks_for_us(sys.argv):
        reason = reason or "vLLM's CPU platform has one backend, with a KV cache of its own"
        logger.warning("deft: %s; all attention runs through the host's own backend", reason)


def _show_counters() -> None:
    """Let ``/metrics`` read the state files of its port, if this process is the API server."""
    from deft_backend.telemetry.metrics import register_states

    try:
        folder = state_directory(Settings.from_env())
    except SettingsError:  # stops only servers that ask for our backend
        return
    register_states(folder, port_of(sys.argv))


# What only the server's command line shows. Engine and worker processes keep that of the server.


def port_of(arguments: Sequence[str]) -> int:
    """The server's port, which vLLM's configuration does not hold.

    >>> port_of(["api_server", "--port", "8123"]), port_of(["serve", "M", "--port=81"]), port_of([])
    (8123, 81, 8000)
    """
    ports = [int(text) for text in values_of(arguments, "--port") if text.isdigit()]
    return ports[-1] if ports else 8000


def values_of(arguments: Sequence[str], name: str) -> list[str]:
    """An option's values, the valid one last: of ``--config``'s file, then of the command line."""
    values = _configured(arguments, name)
    for word, following in pairwise([*arguments, ""]):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == name:
            values.append(value if equals else following)
    return values


def _configured(arguments: Sequence[str], name: str) -> list[str]:
    import yaml  # vLLM itself reads the file with PyYAML

    files = [word for before, word in pairwise(arguments) if before == "--config"]
    try:
        content = yaml.safe_load(Path(files[0]).read_text()) if files else None
    except (OSError, ValueError, yaml.YAMLError):
        return []  # the server does not start with such a file
    key = name.removeprefix("--")
    return [str(content[key])] if isinstance(content, dict) and key in content else []
