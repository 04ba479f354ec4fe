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

from deft_backend.files.json_fields import number, records, text, whole, within

SCHEMA = 4  # version of the state file's content

DECODE, MIXED, VERIFICATION = KINDS = ("decode", "mixed", "verification")
"""Kinds of steps: each request decodes one token; some decode and others compute their prompts;
each request verifies a draft."""


class Decoded(NamedTuple):
    """What one step decodes: its decode rows, which are the requests that decode or verify."""

    kind: str
    rows: int
    tokens: int  # of their contexts; 0 if the CPU does not know them
    verified: int = 0  # query tokens, if they verify drafts


class Steps(NamedTuple):
    steps: int = 0
    rows: int = 0
    # KV bytes of the rows' contexts in all layers: what decoding them query by query reads.
    kv_bytes: int = 0

    def plus(self, other: Steps, sign: int = 1) -> Steps:
        return Steps(*(a + sign * b for a, b in zip(self, other, strict=True)))


class Content(NamedTuple):
    kind: str
    reason: str | None  # why the host's kernel decoded the rows; None: tree attention did


@dataclass(frozen=True)
class Counters:
    """Counts since the server started; subtract two readings to get the counts in between."""

    steps: Mapping[Content, Steps] = field(default_factory=dict)  # those with decode rows
    plans: int = 0  # one for each step of tree attention and group of layers that counts
    kv_bytes_read: int = 0  # bytes that decode attention read from the KV cache, all layers
    kv_bytes_query_guided: int = 0  # bytes that the same steps would have read query by query
    # Seconds spent on those plans. On the CPU, the time of Triton's interpreter does not count.
    plan_seconds: float = 0.0
    # Query tokens of verifications through tree attention: draft tokens, and the token before them.
    verified_tokens: int = 0
    compile_seconds: float = 0.0  # spent on compiling or loading kernels

    def total(self, kind: str | None = None, *, tree: bool | None = None) -> Steps:
        """The steps of a kind, or of all; through tree attention, through the host's kernel, or
        through both.

        >>> tree, host = Content("mixed", None), Content("mixed", "shares nothing")
        >>> counters = Counters({tree: Steps(2, 9), host: Steps(1, 3)})
        >>> counters.total("mixed", tree=True), counters.decode_steps
        (Steps(steps=2, rows=9, kv_bytes=0), 3)
        """
        found = Steps()
        for content, steps in self.steps.items():
            if kind in (None, content.kind) and tree in (None, content.reason is None):
                found = found.plus(steps)
        return found

    @property
    def decode_steps(self) -> int:
        return self.total().steps

    @property
    def steps_tree(self) -> int:
        return self.total(tree=True).steps

    @property
    def steps_host(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for content, steps in self.steps.items():
            if content.reason is not None:
                found[content.reason] = found.get(content.reason, 0) + steps.steps
        return found

    @property
    def tree_share(self) -> float | None:
        """Which part of the decoding tree attention did, by KV bytes of contexts; None without."""
        every = self.total().kv_bytes
        return self.total(tree=True).kv_bytes / every if every else None

    @property
    def saved(self) -> float | None:
        """Share of the KV reads that tree attention saved, 0 to 1; None without a read."""
        read, guided = self.kv_bytes_read, self.kv_bytes_query_guided
        return 1.0 - read / guided if guided >= read and guided else None

    def __sub__(self, before: Counters) -> Counters:
        grown = {name: getattr(self, name) - getattr(before, name) for name in _FIGURES}
        steps = {
            content: now.plus(before.steps.get(content, Steps()), -1)
            for content, now in self.steps.items()
        }
        return Counters({content: n for content, n in steps.items() if any(n)}, **grown)

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": [
                {**content._asdict(), **steps._asdict()} for content, steps in self.steps.items()
            ],
            **{name: getattr(self, name) for name in _FIGURES},
            "decode_steps": self.decode_steps,
            "steps_tree": self.steps_tree,
            "steps_host": self.steps_host,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Counters:
        """Read the fields of a state file; raises FieldError for a counter that is not a number."""
        read = {name: number if name.endswith("_seconds") else whole for name in _FIGURES}
        counts: dict[str, Any] = {name: of(content, name) for name, of in read.items()}
        return cls(dict(map(_steps_of, records(content, "steps"))), **counts)


_FIGURES = tuple(each.name for each in fields(Counters) if each.name != "steps")


def _steps_of(row: Mapping[str, Any]) -> tuple[Content, Steps]:
    with within("steps"):
        reason = None if row.get("reason", "") is None else text(row, "reason")
        counts = (whole(row, name) for name in Steps._fields)
        return Content(text(row, "kind"), reason), Steps(*counts)


class DeviceCounters:
    """Counts that kernels add up in CPU memory; zero until :meth:`attach`. A reading copies four
    words without a lock, and may see only some of a step's words.
    """

    def __init__(self) -> None:
        self._array = self._start = np.zeros(4, np.int64)
        self._held: npt.NDArray[np.int64] | None = None

    def attach(self, array: npt.NDArray[np.int64]) -> None:
        """Count what is added to `array` [4] int64 from now on; raises ValueError."""
        if array.shape != self._array.shape or array.dtype != np.int64:
            raise ValueError(
                f"device counters of shape {array.shape} and type {array.dtype}; expected (4,) "
                "int64: steps, tokens attended, tokens loaded, nanoseconds"
            )
        self.hold()  # so that no reading sees the new array with the old start
        self._array = array
        self.go_on()

    def read(self) -> tuple[int, ...]:
        """Counts since :meth:`attach`, without those between :meth:`hold` and its end: steps,
        tokens attended to, tokens loaded, nanoseconds.
        """
        held = self._held
        return tuple((self._array - self._start if held is None else held).tolist())

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
    """The server process, its versions and settings, and the shape of its attention."""

    pid: int = field(default_factory=os.getpid, kw_only=True, metadata=_ID)
    port: int = field(metadata=_PORT)
    rank: int = field(metadata=_ID)  # Tensor-parallel rank
    host: str = field(metadata=_TEXT)
    host_version: str = field(metadata=_TEXT)
    backend: str = field(metadata=_TEXT)
    policy: str = field(metadata=_TEXT)
    # `Invariant.short_tokens`; 0 for the other policies.
    short_tokens: int = field(default=0, kw_only=True, metadata=_ID)
    device: str = field(metadata=_TEXT)
    # Of the KV cache. Queries have it too, unless it has 8 bits.
    dtype: str = field(metadata=_TEXT)
    num_layers: int = field(metadata=_SIZE)
    num_query_heads: int = field(metadata=_SIZE)
    num_kv_heads: int = field(metadata=_SIZE)
    head_dim: int = field(metadata=_SIZE)
    dtype_bytes: int = field(metadata=_SIZE)  # bytes of one element of the KV cache

    def description(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(ServerDescription)}


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
        ranks = "".join(f"-{name[:2]}{rank}" for name, rank in self.labels.items())
        return f"{self.port}{ranks}@{self.place.machine}-{self.place.namespace}-{self.pid}.json"

    @property
    def labels(self) -> dict[str, str]:
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
