"""What `deft ab`'s options name, checked before a server starts."""

from __future__ import annotations

import datetime
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from deft_backend.cli.errors import fail
from deft_backend.cli.models import named_model
from deft_backend.files.folders import create_private
from deft_backend.policies import get_policy
from deft_backend.tools.ab.workloads import CHOICES, WORKLOADS, WorkloadError
from deft_backend.tools.servers.model_files import ModelFilesError
from deft_backend.tools.traces.trace_files import ThoughtTree, TraceError, load_thought_trees

DRAFT_TOKENS = 4
"""Draft tokens of a verification, unless the user gives a number."""


def chosen_workloads(asked: Sequence[str] | None) -> list[str]:
    """Names of workloads, each once.

    Raises
    ------
    WorkloadError
        If one is unknown.
    """
    for name in asked or ():
        if name not in CHOICES:
            raise WorkloadError(
                f"there is no workload {name!r}; expected one of {', '.join(CHOICES)}"
            )
    return list(dict.fromkeys(asked or WORKLOADS))


def chosen_tree(
    trace: Path | None, index: int, scale: float, names: Sequence[str]
) -> ThoughtTree | None:
    """The tree of a trace in DeFT's format.

    Raises
    ------
    TraceError
        If the file is wrong or has no such tree.
    """
    if trace is None:
        if scale != 1.0 or index:
            raise fail("--scale and --index belong to --trace, which is missing")
        return None
    if "tree-of-thoughts" not in names:
        raise fail("--trace is replayed by the workload tree-of-thoughts, which is not selected")
    trees = load_thought_trees(trace)
    if index >= len(trees):
        raise TraceError(f"{trace} holds {len(trees)} trees; expected --index below that")
    return trees[index]


def check_backends(policy: str | None, baseline: str | None, host: str) -> None:
    """Refuse a baseline that is not the host's; raises PolicyError for an unknown policy."""
    from deft_backend.tools.servers.command import BACKEND, BACKEND_NAMES

    if baseline is not None and not baseline.strip():
        raise fail(f"--baseline is {baseline!r}; expected a backend of the host")
    if baseline in (BACKEND, BACKEND_NAMES[host]):
        raise fail(f"--baseline is {baseline!r}, the plugin itself; expected a host's backend")
    if policy is not None:
        get_policy(policy)


class Drafting(NamedTuple):
    """`--speculative` and `--draft-tokens`."""

    draft: str | None
    tokens: int | None

    def check(self) -> None:
        if self.draft is None and self.tokens is not None:
            raise fail("--draft-tokens belongs to --speculative, which is missing")

    def arguments(self, host: str, extra: Sequence[str]) -> list[str]:
        """The host's options, with those for drafts before them: the user's own override these."""
        from deft_backend.tools.servers.speculation import speculative_arguments

        if self.draft is None:
            return list(extra)
        tokens = DRAFT_TOKENS if self.tokens is None else self.tokens
        return [*speculative_arguments(host, self._drafter(self.draft), tokens), *extra]

    def _drafter(self, draft: str) -> str:
        """The method, or the draft model as the host names it; fails before a server starts."""
        from deft_backend.tools.servers.speculation import NGRAM

        if draft == NGRAM:
            return draft
        try:
            found = named_model(draft)
            found.look_up()
        except ModelFilesError as error:
            raise fail(
                f"--speculative is {draft!r}; expected {NGRAM!r}, or a draft model's folder or hub "
                f"name ({error}). Other methods are options of the host, behind '--'"
            ) from None
        return found.name


def report_folder(out: Path | None) -> Path:
    """The folder of the report: the user's, or one with the time in its name."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return out or Path("reports") / f"ab-{stamp}"


def make_report_folder(folder: Path) -> None:
    """Make the report's folder before anything runs: a run may take hours."""
    with written_into(folder):
        create_private(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def written_into(folder: Path) -> Iterator[None]:
    """Turn errors of writing the report into a message."""
    try:
        yield
    except OSError as error:
        raise fail(
            f"cannot write the report into {folder}: {error.strerror or error}; name a folder "
            "with --out"
        ) from None
