"""What `deft ab`'s options name, checked before a server starts."""

from __future__ import annotations

import datetime
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deft_backend.cli.errors import fail
from deft_backend.cli.models import named_model
from deft_backend.files.folders import create_private
from deft_backend.policies import get_policy
from deft_backend.tools.ab.workloads import CHOICES, WORKLOADS
from deft_backend.tools.harness.workload import Workload, WorkloadError, poisson
from deft_backend.tools.servers.model_files import ModelFilesError
from deft_backend.tools.traces.arrivals import load_arrivals
from deft_backend.tools.traces.made_arrivals import MOST_TOKENS
from deft_backend.tools.traces.recorded_trees import ThoughtTree, TraceError
from deft_backend.tools.traces.trace_files import load_thought_trees

if TYPE_CHECKING:
    from deft_backend.tools.harness.client import Offers

DRAFT_TOKENS = 4  # draft tokens of a verification, unless the user gives a number


def chosen_workloads(asked: Sequence[str] | None) -> list[str]:
    """Names of workloads, each once.

    Raises WorkloadError if one is unknown.
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

    Raises TraceError if the file is wrong or has no such tree.
    """
    if trace is None:
        if scale != 1.0 or index:
            raise fail("--scale and --index belong to --trace, which is missing")
        return None
    if "tree-of-thoughts" not in names:
        raise fail("--trace needs --workload tree-of-thoughts, which is not selected")
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
            model = named_model(draft)
            model.look_up()
        except ModelFilesError as error:
            raise fail(
                f"--speculative is {draft!r}; expected {NGRAM!r}, or a draft model's folder or hub "
                f"name ({error}). Other methods are options of the host, behind '--'"
            ) from None
        return model.name


@dataclass(frozen=True)
class Asked:
    """The command's options, as the user gave them."""

    urls: tuple[str, str] | None
    model: str | None
    revision: str | None
    host: str | None
    workloads: Sequence[str] | None
    rate: float | None
    sizes: tuple[int | None, int | None, int | None]
    quick: bool
    trace: Path | None
    arrivals: bool
    index: int
    scale: float
    speed: float | None
    limit: int | None
    seed: int
    policy: str | None
    baseline: str | None
    extra: tuple[str, ...]
    drafting: Drafting
    out: Path | None
    exact: bool


def asked_workloads(asked: Asked, *, on_gpu: bool) -> Callable[[Offers], list[Workload]]:
    """Read and check what the user named; the requests wait for the server's tokenizer."""
    from deft_backend.tools.ab import sizes
    from deft_backend.tools.ab.trace_workload import trace_workload

    names: list[str] = []
    if asked.workloads or not asked.arrivals:
        names = chosen_workloads(asked.workloads)
    tree, arrivals = None, []
    if asked.arrivals:
        assert asked.trace is not None
        _refuse_idle_options(asked, names)
        if not 0 < asked.scale < float("inf"):
            raise fail(f"--scale is {asked.scale}; expected a number above 0")
        loaded = load_arrivals(asked.trace, asked.limit)
        arrivals = [arrival.scaled(asked.scale) for arrival in loaded]
        longest = max(arrival.input_length for arrival in arrivals)
        if longest > MOST_TOKENS:  # making its text would take the client's memory
            raise fail(
                f"with --scale {asked.scale:g}, a prompt of {asked.trace} has {longest:,} tokens; "
                f"expected at most {MOST_TOKENS:,}"
            )
    else:
        tree = chosen_tree(asked.trace, asked.index, asked.scale, names)
    if asked.rate is not None:
        poisson(1, asked.rate, asked.seed)  # refuses an impossible rate now
    if asked.speed is not None and not 0 < asked.speed < float("inf"):
        raise fail(f"--speed is {asked.speed}; expected a number above 0")
    chosen = sizes.chosen_sizes(asked.sizes, on_gpu=on_gpu, quick=asked.quick)

    def build(offers: Offers) -> list[Workload]:
        ratio = offers.characters_a_token
        made = sizes.make_workloads(
            names, chosen, characters_a_token=ratio, tree=tree, scale=asked.scale
        )
        workloads = [workload.arriving(asked.rate, asked.seed) for workload in made]
        if arrivals and asked.trace is not None:
            workloads.append(
                trace_workload(
                    arrivals, name=asked.trace.name, characters_a_token=ratio,
                    speed=asked.speed or 1.0, rate=asked.rate, seed=asked.seed,
                )
            )  # fmt: skip
        return workloads

    return build


def _refuse_idle_options(asked: Asked, names: Sequence[str]) -> None:
    """Refuse options that a trace of arrivals leaves without effect."""
    if asked.index:
        raise fail(f"--index is {asked.index}; it selects a tree, and {asked.trace} has arrivals")
    sizes = dict(zip(("--branches", "--prefix-tokens", "--max-tokens"), asked.sizes, strict=True))
    for name, value in {**sizes, "--quick": asked.quick or None}.items():
        if value is not None and not names:
            raise fail(f"{name} is for workloads, and a trace has its own sizes; omit {name}")


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
