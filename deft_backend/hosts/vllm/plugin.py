"""Entry point of vLLM's plugin group: runs in every process of every server on the machine."""

from __future__ import annotations

import logging
import sys

from deft_backend.files.folders import state_directory
from deft_backend.hosts.common.limits import observing
from deft_backend.hosts.vllm import versions
from deft_backend.hosts.vllm.versions import OWN_NAME, PLACEHOLDER, VLLM
from deft_backend.settings.config import Settings, SettingsError

logger = logging.getLogger("deft_backend")

MODULE = "deft_backend.hosts.vllm.start.registered"
"""The module in which vLLM finds the classes registered here; it resolves each when a layer needs
it."""

OBSERVED = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TRITON_FLASH_ATTN",
            "TRITON_FLASHINFER")  # fmt: skip
"""Backends of the CUDA platform that ``DEFT_OBSERVE`` counts, where a version has them. The CPU
platform has only one."""


def register() -> None:
    """Name tree attention ``CUSTOM`` and, where vLLM takes it, ``DEFT``.

    A server that asks for neither stays as it is. A failure costs one line in the log. Nothing here
    imports Numba. When a worker starts on the CPU, vLLM replaces kernels of its own. For this it
    looks through all modules, and it fails at one of Numba's.
    """
    try:
        _log_with_the_host()
        _register()
    except Exception as error:
        logger.warning("deft: the plugin is not available in this server: %r", error)


def _log_with_the_host() -> None:
    """Add our lines to the host's log, in its format: vLLM configures only its own logger."""
    host = logging.getLogger("vllm")
    if host.handlers and not logger.handlers:
        for handler in host.handlers:
            logger.addHandler(handler)
        logger.setLevel(host.level)
        logger.propagate = host.propagate


def _register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    versions.register(f"{MODULE}.Custom")
    reason = VLLM.refuse()
    if reason is not None:
        _leave_alone(reason)
        return
    if _on_cpu():
        # The CPU platform always asks for this name. The class follows from the server's
        # configuration, once that is known.
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{MODULE}.CPU_ATTN")
    elif observing():
        for name in AttentionBackendEnum.__members__.keys() & OBSERVED:
            register_backend(AttentionBackendEnum[name], f"{MODULE}.{name}")
    _show_counters()


def _leave_alone(reason: str) -> None:
    """Log why the host's backends stay as they are, if the user asked for something else."""
    if observing():
        logger.warning("deft: DEFT_OBSERVE does not work in this server: %s", reason)
    # On a GPU, the plugin's class logs this itself. The CPU platform never asks that class.
    if _on_cpu() and any(name in word for word in sys.argv for name in (PLACEHOLDER, OWN_NAME)):
        logger.warning("deft: %s; all attention runs through the host's own backend", reason)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _show_counters() -> None:
    """Let ``/metrics`` read the state files of its port, if this process is the API server.

    A server without tree attention and without ``DEFT_OBSERVE`` has nothing to show.
    """
    from deft_backend.hosts.vllm.report.port import port_of
    from deft_backend.telemetry.metrics import register_states

    try:
        settings = Settings.from_env()
    except (
        SettingsError
    ):  # reported if the server asks for our backend; other servers need no settings
        return
    register_states(state_directory(settings), port_of(sys.argv))
