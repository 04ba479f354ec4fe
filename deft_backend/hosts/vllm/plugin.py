"""Entry point of vLLM's plugin group: runs in every process of every server on the machine."""

import logging
import re
import sys
from collections.abc import Sequence

from deft_backend.files.folders import state_directory
from deft_backend.hosts.common.limits import observing
from deft_backend.hosts.vllm import versions
from deft_backend.hosts.vllm.report.command_line import port_of, values_of
from deft_backend.hosts.vllm.versions import OWN_NAME, PLACEHOLDER, VLLM
from deft_backend.settings.config import Settings, SettingsError

logger = logging.getLogger("deft_backend")

MODULE = "deft_backend.hosts.vllm.start.registered"
"""Where vLLM finds the classes registered here, when a layer needs them."""

OBSERVED = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TRITON_FLASH_ATTN",
            "TRITON_FLASHINFER")  # fmt: skip
"""Backends of the CUDA platform that ``DEFT_OBSERVE`` counts, where a version has them. The CPU
platform has only one."""


def register() -> None:
    """Name tree attention ``CUSTOM`` and, where vLLM takes it, ``DEFT``.

    A server that asks for neither stays as it is. A failure costs one line in the log.

    Raises SystemExit if the server's command line asks for the plugin and ``DEFT_*`` variables have
    values that are not allowed. Plugins load first, so the message is the log's last line.
    """
    try:
        _log_with_the_host()
        _register()
    except Exception as error:
        logger.warning(
            "deft: the plugin could not be registered (%r); this server runs without tree "
            "attention. Run `deft doctor`", error,
        )  # fmt: skip
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
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    on_cpu = bool(current_platform.is_cpu())
    versions.register(f"{MODULE}.Custom")
    reason = VLLM.refuse()
    if reason is not None:
        if observing():
            logger.warning("deft: DEFT_OBSERVE counts nothing in this server: %s", reason)
        # On a GPU, the plugin's class logs this itself. The CPU platform never asks that class.
        if on_cpu and asks_for_us(sys.argv):
            logger.warning("deft: %s; all attention runs through the host's own backend", reason)
        return
    if on_cpu:
        # The CPU platform always asks for this name. The class follows from the server's
        # configuration, once that is known.
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{MODULE}.CPU_ATTN")
    elif observing():
        for name in AttentionBackendEnum.__members__.keys() & OBSERVED:
            register_backend(AttentionBackendEnum[name], f"{MODULE}.{name}")
    _show_counters()


def _show_counters() -> None:
    """Let ``/metrics`` read the state files of its port, if this process is the API server.

    A server without tree attention and without ``DEFT_OBSERVE`` has nothing to show.
    """
    from deft_backend.telemetry.metrics import register_states

    try:
        settings = Settings.from_env()
    except SettingsError:  # stops only servers that ask for our backend
        return
    register_states(state_directory(settings), port_of(sys.argv))
