"""Settings: the ``DEFT_*`` environment variables, in one table."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from deft_backend.settings.policy_names import AUTO, INVARIANT, POLICY_NAMES

logger = logging.getLogger(__name__)

LOG_LEVELS = {"quiet": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class SettingsError(ValueError):
    """An environment variable has a value that is not allowed."""


class NoBatchError(SettingsError):
    """Each variable is allowed, and together they leave tree attention no batch."""


class Variable(NamedTuple):
    """One environment variable: the field of :class:`Settings` that it sets, and how it is read."""

    field: str
    parse: Callable[[str], Any]
    allowed: str
    meaning: str

    @property
    def name(self) -> str:
        return f"DEFT_{self.field.upper()}"

    def read(self, text: str) -> Any:
        """The value of a text; raises SettingsError if it is not allowed."""
        try:
            return self.parse(text)
        except ValueError:
            raise SettingsError(f"{self.name} is {text!r}; expected {self.allowed}") from None

    @property
    def default(self) -> str:
        """The default as a user would write it; empty if there is none."""
        value = getattr(Settings(), self.field)
        return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


Reader = tuple[Callable[[str], Any], str]
"""How a text is read, and which texts are allowed; the function raises ValueError for others."""


def _one_of(names: Iterable[str]) -> Reader:
    known = {name: name for name in names}

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError
        return text

    return parse, "one of " + ", ".join(known)


def _integer(least: int, most: int | None = None) -> Reader:
    def parse(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise ValueError
        return value

    return (
        parse,
        f"an integer {f'of {least} or more' if most is None else f'from {least} to {most}'}",
    )


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


_SWITCH: Reader = _switch, "1 (or true, yes, on) or 0 (or false, no, off)"
_DIRECTORY: Reader = _directory, "a directory, existing or to be made"


def _setting(default: Any, reader: Reader, meaning: str) -> Any:
    """A field of :class:`Settings` with all that :class:`Variable` says about it."""
    return field(default=default, metadata={"variable": (*reader, meaning)})


@dataclass(frozen=True)
class Settings:
    """The user's settings for a server, parsed from the environment.

    The variable of a field has its name in capitals, behind ``DEFT_``. See also
    ``docs/configuration.md``.
    """

    policy: str = _setting(AUTO, _one_of(POLICY_NAMES), "The rule that groups queries and KV.")
    min_batch: int = _setting(
        2,
        _integer(1),
        "Smallest batch, in requests, for tree attention. The host's kernel decodes smaller ones.",
    )
    max_batch: int = _setting(
        2048,
        _integer(1, 4096),
        "Largest batch, in requests, for tree attention. It sizes the plan and the workspace. "
        "The host's kernel decodes larger batches.",
    )
    mla: bool | None = _setting(
        None,
        _SWITCH,
        "Tree attention for MLA models on Hopper; it saves time behind long prefixes. Unset: on in "
        "the host versions whose records show no wrong token (SGLang 0.5.17 and 0.5.23, vLLM 0.26 "
        "and 0.33).",
    )
    fallback_backend: str | None = _setting(
        None,
        (str, "the name of one of the host's attention backends"),
        "The host's backend that runs everything that tree attention does not cover. Unset: the "
        "host chooses it.",
    )
    log: str = _setting(
        "info",
        _one_of(LOG_LEVELS),
        "What the log shows. `quiet`: warnings. `info`: also the set-up and lines about "
        "decoding. `debug`: also the traces of failures.",
    )
    verify: bool = _setting(
        False,
        _SWITCH,
        "Check tree attention while the server runs: the host's kernel computes every step as "
        "well, without CUDA graphs of attention, so steps take longer. After a difference the log "
        "shows an error, and the host's kernel decodes.",
    )
    untested_host: bool = _setting(
        False,
        _SWITCH,
        "Try tree attention on a version of SGLang or vLLM outside the window, if it has every "
        "member that the plugin uses. Otherwise such a host decodes without tree attention.",
    )
    cache_dir: Path | None = _setting(
        None,
        _DIRECTORY,
        "The package's cache folder, for tables, kernels and servers' state. Unset: `deft-backend` "
        "in the user's cache folder, `$XDG_CACHE_HOME` or `~/.cache`.",
    )
    kernel_cache: Path | None = _setting(
        None,
        _DIRECTORY,
        "The folder of compiled kernels that `deft warm` filled. Servers only read it. Unset: "
        "`kernels` in the cache folder.",
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Parse and validate every variable.

        - `env`: variables by name; default: the process's environment.

        Raises SettingsError with a line for each variable that was removed or whose value is not
        allowed, or if no batch is left for tree attention.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        wrong = list(removed_settings(env).values())
        for variable in VARIABLES:
            text = env.get(variable.name, "").strip()
            if not text:  # unset and empty mean the same: the default
                continue
            try:
                values[variable.field] = variable.read(text)
            except SettingsError as error:
                wrong.append(str(error))
        if wrong:
            raise SettingsError("\n".join(wrong))
        settings = cls(**values)
        # Policy `invariant` has no smallest batch.
        if settings.policy != INVARIANT and settings.min_batch > settings.max_batch:
            raise NoBatchError(
                f"DEFT_MIN_BATCH is {settings.min_batch} and DEFT_MAX_BATCH {settings.max_batch}, "
                "so the host would decode every batch; set the first to the second or less"
            )
        return settings


VARIABLES = tuple(Variable(each.name, *each.metadata["variable"]) for each in fields(Settings))
"""Every environment variable that the package reads."""

_EVERY_BATCH = "tree attention decodes every batch of DEFT_MIN_BATCH requests or more"

REMOVED = {
    "DEFT_PLANNER": "a GPU plans its batches itself, and a server on the CPU plans in NumPy",
    "DEFT_SHORT_EXTENDS": "the host's kernel computes every prefill; no measurement showed a gain",
    "DEFT_OBSERVE": "`deft ab` computes what the host's kernel reads from the requests' lengths",
    "DEFT_STATE_DIR": "state files are in `servers` in the cache folder; set DEFT_CACHE_DIR",
    "DEFT_MIN_SHARE": _EVERY_BATCH,
    "DEFT_MIN_SHARED_TOKENS": _EVERY_BATCH,
    "DEFT_MIN_SAVED_MS": _EVERY_BATCH,
}
"""Variables of earlier versions, each with what replaced it."""

_warned: set[str] = set()


def removed_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Each variable of `env` that was removed, with the reason why a server refuses it."""
    return {
        name: f"{name} was removed: {instead}; unset it"
        for name, instead in REMOVED.items()
        if env.get(name, "").strip()
    }


def warn_unknown(env: Mapping[str, str] | None = None) -> None:
    """Log each ``DEFT_*`` variable that does not exist once, with the closest known name."""
    for name, hint in unknown_settings(os.environ if env is None else env):
        if name not in _warned:
            _warned.add(name)
            logger.warning("deft: %s is set, but no such setting exists; %s", name, hint)


def unknown_settings(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each ``DEFT_*`` variable that does not exist, with a hint at the closest known name."""
    known = [variable.name for variable in VARIABLES]
    for name in sorted(env):
        if name.startswith("DEFT_") and name not in known and name not in REMOVED:
            close = difflib.get_close_matches(name, known, n=1)
            yield name, f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
