"""One reading of a server's counters, and the counters that kernels keep in CPU memory."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.files.json_fields import mapping, number, text, whole, within

SCHEMA = 2  # version of the state file's content


@dataclass(frozen=True)
class Counters:
    """Counts since the server started; subtract two readings to get the counts in between."""

    decode_steps: int = 0
    steps_tree: int = 0  # decode steps through tree attention
    plans: int = 0  # of the host planner, or of the device planner (one for each step)
    # Decode steps on the host's kernel, by reason.
    steps_host: Mapping[str, int] = field(default_factory=dict)
    kv_bytes_read: int = 0  # bytes that decode attention read from the KV cache, all layers
    kv_bytes_query_guided: int = 0  # bytes that the same steps would have read query by query
    # Seconds spent on those plans, including the forest. Compilation does not count, and on the CPU
    # neither does the time of Triton's interpreter.
    plan_seconds: float = 0.0
    # Query tokens of verifications through tree attention: draft tokens, and the token before them.
    verified_tokens: int = 0
    # Drafts that the host verified with any kernel, one for each request of a verification; 0 if
    # the host does not tell.
    verified_drafts: int = 0
    accepted_tokens: int = 0  # draft tokens of these drafts that the host accepted
    compile_seconds: float = 0.0  # spent on compiling or loading kernels and the host planner
    # Prefills of a few new tokens a request, through tree attention. They are no decode steps.
    short_extends: int = 0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a verification gives a request on average; None if the host reports no draft.

        >>> Counters(verified_drafts=10, accepted_tokens=13).acceptance_length
        2.3
        """
        drafts = self.verified_drafts
        return 1.0 + self.accepted_tokens / drafts if drafts else None

    @property
    def saved(self) -> float | None:
        """Share of the KV reads that tree attention saved, 0 to 1; None without a read.

        Also None in verifications in which several query blocks of a request each read its context.
        """
        read, guided = self.kv_bytes_read, self.kv_bytes_query_guided
        return 1.0 - read / guided if guided >= read and guided else None

    def __sub__(self, before: Counters) -> Counters:
        grown = {name: getattr(self, name) - getattr(before, name) for name in _FIGURES}
        host = {
            reason: steps - before.steps_host.get(reason, 0)
            for reason, steps in self.steps_host.items()
        }
        return Counters(**grown, steps_host={reason: n for reason, n in host.items() if n})

    def as_json(self) -> dict[str, Any]:
        """The fields of a state file."""
        return {**vars(self), "steps_host": dict(self.steps_host)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Counters:
        """Read the fields of a state file; raises FieldError for a counter that is not a number."""
        steps = mapping(content, "steps_host")
        with within("steps_host"):
            steps_host = {reason: whole(steps, reason) for reason in steps}
        read = {name: number if name.endswith("_seconds") else whole for name in _FIGURES}
        counts: dict[str, Any] = {name: of(content, name) for name, of in read.items()}
        return cls(**counts, steps_host=steps_host)


_FIGURES = tuple(each.name for each in fields(Counters) if each.name != "steps_host")


class DraftCounts(NamedTuple):
    """Drafts that the host has verified, and their accepted draft tokens."""

    drafts: int
    accepted: int


class DeviceCounts(NamedTuple):
    """Counts of the device planner: steps, tokens attended to, tokens loaded, nanoseconds."""

    steps: int
    attended: int
    loaded: int
    nanoseconds: int


class DeviceCounters:
    """Counts that kernels add up in CPU memory; zero until :meth:`attach`.

    A reading copies four words, without the driver and without a lock. It may see only some of a
    step's words; the next reading sees all of them.
    """

    def __init__(self) -> None:
        self._array = self._start = np.zeros(len(DeviceCounts._fields), np.int64)
        self._held: npt.NDArray[np.int64] | None = None
        self._attached = False

    def attach(self, array: npt.NDArray[np.int64]) -> None:
        """Count what is added to `array` from now on.

        - `array` [4] int64: as :class:`DeviceCounts`; cumulative, never set back. Its present
          values, from the warm-up, do not count.

        Raises ValueError if the array has another shape or type, or one is attached already.
        """
        if array.shape != self._array.shape or array.dtype != np.int64:
            raise ValueError(
                f"device counters of shape {array.shape} and type {array.dtype}; expected (4,) "
                "int64: steps, tokens attended, tokens loaded, nanoseconds"
            )
        if self._attached:
            raise ValueError("device counters are attached already; expected one source a server")
        self._attached = True
        self.hold()  # so that no reading sees the new array with the old start
        self._array = array
        self.go_on()

    def read(self) -> DeviceCounts:
        """Counts since :meth:`attach`, without those between :meth:`hold` and its end."""
        held = self._held
        return DeviceCounts(*(self._array - self._start if held is None else held).tolist())

    def forget(self, since: DeviceCounts) -> None:
        """Do not count what the device has added since an earlier reading."""
        self._start = self._array - np.array(since)

    def hold(self) -> None:
        """Stop counting; all work on the device must have ended."""
        if self._held is None:
            self._held = self._array - self._start

    def go_on(self) -> None:
        """Count again, from the values at :meth:`hold`; all work on the device must have ended."""
        if self._held is not None:
            self._start = self._array - self._held
            self._held = None


MOST = (1 << 31) - 1  # largest process id, rank and size of an attention

_TEXT = {"reader": text}
_ID = {"reader": partial(whole, most=MOST)}
_PORT = {"reader": partial(whole, most=65_535)}
_SIZE = {"reader": partial(whole, least=1, most=MOST)}


@dataclass
class ServerDescription:
    """The server process, its versions and settings, and the shape of its attention.

    A field's ``reader`` checks it in a state file that another process may have written.
    """

    pid: int = field(default_factory=os.getpid, kw_only=True, metadata=_ID)
    port: int = field(metadata=_PORT)
    rank: int = field(metadata=_ID)  # Tensor-parallel rank
    host: str = field(metadata=_TEXT)
    host_version: str = field(metadata=_TEXT)
    backend: str = field(metadata=_TEXT)
    policy: str = field(metadata=_TEXT)
    device: str = field(metadata=_TEXT)
    # Of the KV cache. Queries have it too, unless it has 8 bits.
    dtype: str = field(metadata=_TEXT)
    num_layers: int = field(metadata=_SIZE)
    num_query_heads: int = field(metadata=_SIZE)
    num_kv_heads: int = field(metadata=_SIZE)
    head_dim: int = field(metadata=_SIZE)
    dtype_bytes: int = field(metadata=_SIZE)  # bytes of one element of the KV cache

    def description(self) -> dict[str, Any]:
        """These fields, as a state file holds them."""
        return {each.name: getattr(self, each.name) for each in fields(ServerDescription)}


def read_description(content: Mapping[str, Any]) -> dict[str, Any]:
    """These fields of a state file; raises FieldError if one is missing or impossible."""
    return {
        each.name: each.metadata["reader"](content, each.name) for each in fields(ServerDescription)
    }


_UNSAFE = re.compile("[^A-Za-z0-9._-]")
_NAME = re.compile(
    r"(?P<port>[0-9]{1,5})-tp(?P<tp>[0-9]{1,9})(?:-pp(?P<pp>[0-9]{1,9}))?(?:-dp(?P<dp>[0-9]{1,9}))?"
    r"@(?P<machine>[A-Za-z0-9._-]{1,64})-(?P<namespace>[0-9]{1,20})-(?P<pid>[0-9]{1,10})\.json"
)


class Place(NamedTuple):
    """Where a process id means something."""

    machine: str  # the host name, which a container has of its own
    namespace: int  # of process ids; 0 if the system does not tell

    @classmethod
    @cache
    def here(cls) -> Place:
        """The place of this process."""
        machine = _UNSAFE.sub("_", socket.gethostname())[:64] or "_"
        try:
            return cls(machine, os.stat("/proc/self/ns/pid").st_ino)
        except OSError:
            return cls(machine, 0)


class StateName(NamedTuple):
    """The name of a state file: servers that share a folder never write the same one."""

    port: int
    tp: int
    pp: int | None
    dp: int | None
    place: Place
    pid: int

    @property
    def file_name(self) -> str:
        """The file's name, such as ``30000-tp0@node-4026531836-1234.json``."""
        ranks = "".join(f"-{name[:2]}{rank}" for name, rank in self.labels.items())
        return f"{self.port}{ranks}@{self.place.machine}-{self.place.namespace}-{self.pid}.json"

    @property
    def labels(self) -> dict[str, str]:
        """The ranks, as labels of metrics."""
        ranks = {"tp_rank": self.tp, "pp_rank": self.pp, "dp_rank": self.dp}
        return {name: str(rank) for name, rank in ranks.items() if rank is not None}

    @classmethod
    def parse(cls, file_name: str) -> StateName | None:
        """The parts of a state file's name; None for any other file.

        >>> name = StateName.parse("30000-tp12-pp1-dp0@x-tp7.lan-0-1.json")
        >>> name.labels, name.place.machine
        ({'tp_rank': '12', 'pp_rank': '1', 'dp_rank': '0'}, 'x-tp7.lan')
        """
        match = _NAME.fullmatch(file_name)
        if match is None:
            return None
        pp, dp = (None if match[kind] is None else int(match[kind]) for kind in ("pp", "dp"))
        place = Place(match["machine"], int(match["namespace"]))
        return cls(int(match["port"]), int(match["tp"]), pp, dp, place, int(match["pid"]))


def process_runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    if pid < 1:  # 0 and below name groups of processes
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's process
        return True
    except (OSError, OverflowError):
        return False
    try:
        # Bytes: a program may call itself anything, also what is no UTF-8.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (OSError, IndexError):  # no /proc here, or it has just ended
        return True
