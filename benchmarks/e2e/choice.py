"""The user's choices, one structure for each subject; None selects what fits the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WORKLOADS = (
    "grid", "first-tokens", "documents", "trees", "beams", "draft-trees", "rollouts", "agents",
    "chats", "clients", "traffic", "scheduler",
)  # fmt: skip


class ChoiceError(ValueError):
    """The choice cannot be measured; the message names the value and the expected values."""


@dataclass(frozen=True)
class Output:
    """The run's output files.

    Attributes
    ----------
    rows : Path
        JSON file of rows; a file that exists is added to.
    command : str
        The command as the user typed it, for the header.
    """

    rows: Path
    command: str = ""

    @property
    def log_folder(self) -> Path:
        """Of the servers' logs, next to `rows`."""
        return self.rows.with_suffix(".logs")


@dataclass(frozen=True)
class ServerChoice:
    """The servers of a run.

    Attributes
    ----------
    host : str
        ``sglang`` or ``vllm``.
    backends : sequence of str, optional
        Attention backends, one server for each.
    reference : str, optional
        Backend whose answers the others' are compared with.
    options : sequence of str
        Options of the host, for every server.
    tensor_parallel : int
        GPUs over which each server splits the model.
    start_seconds : float
        Time limit for a server's start.
    drafts : str, optional
        ``KIND,TOKENS,ACCEPTED``: how the servers draft.
    policy : str, optional
        The plugin's policy.
    """

    host: str = "sglang"
    backends: Sequence[str] | None = None
    reference: str | None = None
    options: Sequence[str] = ()
    tensor_parallel: int = 1
    start_seconds: float = 500.0
    drafts: str | None = None
    policy: str | None = None


@dataclass(frozen=True)
class ModelChoice:
    """The model of the servers.

    Attributes
    ----------
    path : str, optional
        The user's checkpoint folder. None writes a checkpoint of `shape` with `weights`.
    shape : str, optional
    weights : str
        ``random`` or ``dummy``.
    checkpoint : Path, optional
        Folder that keeps the written checkpoint for later runs.
    layers : int, optional
        Write only so many layers of `shape`.
    """

    path: str | None = None
    shape: str | None = None
    weights: str = "random"
    checkpoint: Path | None = None
    layers: int | None = None


@dataclass(frozen=True)
class BatchChoice:
    """Batches of prompts, each sent at once.

    Attributes
    ----------
    cases : sequence of str
        ``PREFIX,BRANCHES,SUFFIX`` in place of the default grid.
    gen : int, optional
        Output tokens that are timed.
    repeats : int, optional
        Timed repeats of a batch; for trees, replays at most.
    """

    cases: Sequence[str] = ()
    gen: int | None = None
    repeats: int | None = None


@dataclass(frozen=True)
class TreeChoice:
    """Recorded trees of thoughts: a file or folder, and a factor on their lengths."""

    traces: Path | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class ClientChoice:
    """Shapes of the host's own benchmark client, and runs of each."""

    shapes: Sequence[str] | None = None
    runs: int = 1


@dataclass(frozen=True)
class TrafficChoice:
    """Mixed traffic.

    Attributes
    ----------
    minutes : float
    part : int
        Another number gives other traffic.
    tolerance : float, optional
        Log-probabilities closer than this are a tie; None follows from the dtype.
    """

    minutes: float = 8.0
    part: int = 1
    tolerance: float | None = None


@dataclass(frozen=True)
class Choice:
    """All of the user's choices."""

    output: Output
    workloads: Sequence[str] = ("grid",)
    servers: ServerChoice = field(default_factory=ServerChoice)
    model: ModelChoice = field(default_factory=ModelChoice)
    batches: BatchChoice = field(default_factory=BatchChoice)
    trees: TreeChoice = field(default_factory=TreeChoice)
    clients: ClientChoice = field(default_factory=ClientChoice)
    traffic: TrafficChoice = field(default_factory=TrafficChoice)


def one_of(what: str, name: str, known: Iterable[str]) -> str:
    """`name`, if it is known.

    Raises
    ------
    ChoiceError
        Otherwise.
    """
    names = list(known)
    if name not in names:
        raise ChoiceError(f"{what} is {name!r}; expected one of {', '.join(names)}")
    return name
