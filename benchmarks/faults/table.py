"""The faults: what happens, and what must come of it. docs/reliability.md shows this table."""

from __future__ import annotations

from dataclasses import dataclass

BOTH = ("sglang", "vllm")


@dataclass(frozen=True)
class Fault:
    """A fault that the harness injects.

    Attributes
    ----------
    name : str
        In the record.
    what : str
        What happens, in words.
    then : str
        What the server does.
    hosts : tuple of str
    """

    name: str
    what: str
    then: str
    hosts: tuple[str, ...] = BOTH


FAULTS = (
    Fault(
        "files",
        "State file, answer file, cost table and kernel folder are damaged, links, or of another "
        "version when the server starts.",
        "The server replaces its state file, ignores the others and answers right.",
    ),
    Fault(
        "poison",
        "All KV that no request of the batch may read is NaN. Page-table entries beyond each "
        "request's end lie outside of the cache.",
        "Kernels and planners read neither. Answers are right.",
    ),
    Fault(
        "planner",
        "The planner raises an error in every step.",
        "The host's kernel decodes these batches; one log line. After an error of the host "
        "planner, the next good plan counts again. After one of the device planner, the host's "
        "kernel decodes from then on.",
    ),
    Fault(
        "full-disk",
        "The disk is full when the server writes its state file.",
        "One log line; the server tries again every minute. Answers are right.",
    ),
    Fault("clock", "The clock jumps by a day, to and fro.", "Nothing depends on it."),
    Fault(
        "aborts",
        "Many clients hang up after a token or two, while others decode.",
        "The others' answers are right.",
    ),
    Fault("flush", "The prefix cache is flushed under load.", "Answers are right."),
    Fault(
        "pause",
        "Generation pauses and goes on under load.",
        "Answers are right.",
    ),
    Fault(
        "weights",
        "The weights are loaded again under load.",
        "Answers are right.",
        ("sglang",),
    ),
    Fault(
        "combined",
        "Three of the faults above at once, chosen by a seed, under load.",
        "As above.",
    ),
    Fault(
        "launch",
        "A kernel fails when it is launched, in the middle of a step.",
        "The host's kernel decodes this step and all later ones; one log line. Answers are right.",
    ),
    Fault(
        "shared-folders",
        "Two servers run with the same cache folder and the same state folder.",
        "Each writes files of its own. The answers of both are right.",
    ),
    Fault(
        "no-memory",
        "There is no memory for the workspace when the server starts.",
        "One log line names the error. The host's backend runs all attention.",
    ),
    Fault(
        "sigterm",
        "SIGTERM under load.",
        "Every token sent before the shutdown is correct. No process keeps running. The host "
        "decides the rest, as with its own backend: SGLang answers the requests in flight. "
        "vLLM 0.32 ends its engine at once and then waits until clients hang up; "
        "`--shutdown-timeout` lets it answer first.",
    ),
    Fault(
        "sigkill",
        "SIGKILL of the process that decodes, under load.",
        "The host ends the server. Requests in flight fail, as with the host's own backend. None "
        "hangs, and no process stays.",
    ),
)
