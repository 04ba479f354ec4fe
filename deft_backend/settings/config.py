"""Settings: the ``DEFT_*`` environment variables, in one table."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deft_backend.settings.policy_names import AUTO, POLICY_NAMES

logger = logging.getLogger(__name__)

LOG_LEVELS = {"quiet": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
PLANNERS = ("auto", "host", "device")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class SettingsError(ValueError):
    """An environment variable has a value that is not allowed."""


@dataclass(frozen=True)
class Settings:
    """The user's settings for a server, parsed from the environment.

    See :data:`VARIABLES` for the variable behind each field, and ``docs/configuration.md``.
    """

    policy: str = AUTO
    planner: str = "auto"
    min_share: float = 1.1
    min_batch: int = 2
    min_shared_tokens: int = 64
    min_saved_ms: float = 0.5
    max_batch: int = 2048
    fallback_backend: str | None = None
    log: str = "info"
    verify: bool = False
    observe: bool = False
    untested_host: bool = False
    state_dir: Path | None = None
    cache_dir: Path | None = None
    kernel_cache: Path | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Parse and validate every variable.

        - `env`: Variables by name; default: the process's environment.

        Raises SettingsError if a value is not allowed. The message names every such variable, its
        value and the allowed ones, one variable a line.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        wrong: list[str] = []
        for variable in VARIABLES:
            text = env.get(variable.name, "").strip()
            if not text:  # unset and empty mean the same: the default
                continue
            try:
                values[variable.field] = variable.parse(text)
            except ValueError:
                wrong.append(f"{variable.name} is {text!r}; expected {variable.allowed}")
        if wrong:
            raise SettingsError("\n".join(wrong))
        return cls(**values)


@dataclass(frozen=True)
class Variable:
    """One environment variable: what it sets, how it is read, what it may hold."""

    name: str
    field: str
    parse: Callable[[str], Any]
    allowed: str
    meaning: str

    @property
    def default(self) -> str:
        """The default as a user would write it; empty if there is none."""
        value = getattr(Settings(), self.field)
        return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return parse


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError
        return value

    return parse


def _share(text: str) -> float:
    value = float(text)
    if not 1.0 <= value < float("inf"):
        raise ValueError
    return value


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise ValueError
    return value


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError
    return text.lower() in _TRUE


def _directory(text: str) -> Path:
    try:
        path = Path(text).expanduser()
        if path.exists() and not path.is_dir():
            raise ValueError
    except (OSError, RuntimeError) as error:  # unknown user, no permission, name too long
        raise ValueError(str(error)) from error
    return path


_SWITCH = "1 (or true, yes, on) or 0 (or false, no, off)"

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "DEFT_POLICY",
        "policy",
        _one_of(POLICY_NAMES),
        "one of " + ", ".join(POLICY_NAMES),
        "The rule that groups queries and KV.",
    ),
    Variable(
        "DEFT_PLANNER",
        "planner",
        _one_of(PLANNERS),
        "one of " + ", ".join(PLANNERS),
        "Which planner makes the plans. `host`: on the CPU, when the batch's composition changes; "
        "vLLM offers it without a GPU only. `device`: on the GPU, in every step, inside the "
        "step's CUDA graph, with every policy but `deft-flatten`. `auto`: the device planner on "
        "Hopper GPUs and in every vLLM server, unless the policy is `deft-flatten`; otherwise the "
        "host planner.",
    ),
    Variable(
        "DEFT_MIN_SHARE",
        "min_share",
        _share,
        "a number of 1 or more",
        "Smallest share F_s: tokens attended to, divided by tokens stored. If a batch shares "
        "less, the host's kernel decodes it.",
    ),
    Variable(
        "DEFT_MIN_BATCH",
        "min_batch",
        _integer(1),
        "an integer of 1 or more",
        "Smallest batch, in requests, for tree attention. The host's kernel decodes smaller ones.",
    ),
    Variable(
        "DEFT_MIN_SHARED_TOKENS",
        "min_shared_tokens",
        _integer(0),
        "an integer of 0 or more",
        "KV tokens that tree attention must save in a step. If it saves fewer, the host's "
        "kernel decodes the batch.",
    ),
    Variable(
        "DEFT_MIN_SAVED_MS",
        "min_saved_ms",
        _milliseconds,
        "a number of 0 or more",
        "On a GPU: milliseconds of KV reads that tree attention must save in a step, over all "
        "layers, at the bandwidth in the cost table. If it saves less, the host's kernel "
        "decodes the batch.",
    ),
    Variable(
        "DEFT_MAX_BATCH",
        "max_batch",
        _integer(1, 4096),
        "an integer from 1 to 4096",
        "Largest batch, in requests, for tree attention. It sizes the plan and the workspace. "
        "The host's kernel decodes larger batches.",
    ),
    Variable(
        "DEFT_FALLBACK_BACKEND",
        "fallback_backend",
        str,
        "the name of one of the host's attention backends",
        "The host's backend that runs everything that tree attention does not cover. Unset: the "
        "host chooses it.",
    ),
    Variable(
        "DEFT_LOG",
        "log",
        _one_of(tuple(LOG_LEVELS)),
        "one of " + ", ".join(LOG_LEVELS),
        "What the log shows. `quiet`: warnings. `info`: also the set-up and lines about "
        "decoding. `debug`: also every plan.",
    ),
    Variable(
        "DEFT_VERIFY",
        "verify",
        _switch,
        _SWITCH,
        "Check tree attention while the server runs, which synchronises with the device. SGLang: "
        "compare every plan with the page tables, and decode the batch of a wrong plan with the "
        "host's kernel. vLLM: compare every step with the host's result, and decode with the "
        "host's kernel after a difference. The log shows an error.",
    ),
    Variable(
        "DEFT_OBSERVE",
        "observe",
        _switch,
        _SWITCH,
        "Count decode steps and KV bytes of a server that runs another attention backend.",
    ),
    Variable(
        "DEFT_UNTESTED_HOST",
        "untested_host",
        _switch,
        _SWITCH,
        "Try tree attention on a version of SGLang or vLLM outside the window, if it has every "
        "member that the plugin uses. Otherwise such a host decodes without tree attention.",
    ),
    Variable(
        "DEFT_STATE_DIR",
        "state_dir",
        _directory,
        "a directory, existing or to be made",
        "Where servers write their state files for `deft explain`, `ab`, `top` and `inspect`. "
        "Unset: `servers` in the cache folder.",
    ),
    Variable(
        "DEFT_CACHE_DIR",
        "cache_dir",
        _directory,
        "a directory, existing or to be made",
        "The package's cache folder. It holds the cost tables of `deft tune` (`tables`), the "
        "kernels of `deft warm` (`kernels`), servers' state (`servers`) and the driver stand-in "
        "(`driver-stub`). Unset: `deft-backend` in the user's cache folder, `$XDG_CACHE_HOME` or "
        "`~/.cache`.",
    ),
    Variable(
        "DEFT_KERNEL_CACHE",
        "kernel_cache",
        _directory,
        "a directory, existing or to be made",
        "The folder of compiled kernels that `deft warm` filled. Servers only read it. Unset: "
        "`kernels` in the cache folder.",
    ),
)
"""Every environment variable that the package reads."""

_warned: set[str] = set()


def warn_unknown(env: Mapping[str, str] | None = None) -> list[str]:
    """Log each ``DEFT_*`` variable that does not exist once, with the closest known name.

    Returns the messages logged by this call.
    """
    messages = []
    for name, hint in unknown_settings(os.environ if env is None else env):
        if name not in _warned:
            _warned.add(name)
            messages.append(f"{name} is set, but no such setting exists; {hint}")
            logger.warning(messages[-1])
    return messages


def unknown_settings(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each ``DEFT_*`` variable that does not exist, with a hint at the closest known name."""
    known = [variable.name for variable in VARIABLES]
    for name in sorted(env):
        if name.startswith("DEFT_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            yield name, f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
