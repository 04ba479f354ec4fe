"""The host versions that the tests ran with; others need ``DEFT_UNTESTED_HOST=1``. A contract
cannot show that a member still means the same, and a changed meaning gives wrong output.
"""

import os
from dataclasses import dataclass

from deft_backend.hosts.common.contract import version_key
from deft_backend.settings.config import Settings, SettingsError
from deft_backend.settings.version import installed_version


@dataclass(frozen=True)
class TestedVersions:
    """The window of one host: every version from `lowest` to below `beyond`."""

    name: str  # the host's own
    distributions: tuple[str, ...]  # names that it may be installed under; the first is its own
    lowest: str
    beyond: str

    def __str__(self) -> str:
        return f">={self.lowest}, <{self.beyond}"

    @property
    def newest(self) -> str:
        """The last version of the window, or the last series of versions.

        >>> TestedVersions("Some host", ("some-host",), "0.5.17", "0.5.24").newest
        '0.5.23'
        """
        *leading, last = (int(number) for number in self.beyond.split("."))
        if not last:
            raise ValueError(f"the window ends before {self.beyond}; expected no 0 at its end")
        return ".".join(str(number) for number in (*leading, last - 1))

    def newer(self, version: str) -> str | None:
        return self.newest if version_key(version) < version_key(self.newest) else None

    def installed(self) -> str | None:
        return next(filter(None, map(installed_version, self.distributions)), None)

    def holds(self, version: str) -> bool:
        return version_key(self.lowest) <= version_key(version) < version_key(self.beyond)

    def refuse(self) -> str | None:
        """Why this environment's version gets no tree attention, in one line, or None."""
        version = self.installed()
        if version is None or self.holds(version) or tries_others():
            return None
        return (
            f"tree attention was tested with {self.name} {self} and this is {version} "
            "(DEFT_UNTESTED_HOST=1 tries it)"
        )


def tries_others() -> bool:
    """Whether ``DEFT_UNTESTED_HOST`` is set to yes; an invalid value is no: others report it."""
    name = "DEFT_UNTESTED_HOST"
    try:
        return Settings.from_env({name: os.environ.get(name, "")}).untested_host
    except SettingsError:
        return False
