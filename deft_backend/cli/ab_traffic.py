"""The options of a comparison over time, and the traffic that they name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deft_backend.cli.ab_choices import Drafting, chosen_tree, chosen_workloads
from deft_backend.cli.errors import fail

if TYPE_CHECKING:
    from deft_backend.tools.harness.live_client import Offers
    from deft_backend.tools.harness.traffic import Traffic


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


def asked_traffic(asked: Asked, *, on_gpu: bool) -> Callable[[Offers], list[Traffic]]:
    """Read and check what the user named; the traffic itself waits for the servers' tokenizer."""
    from deft_backend.tools.ab import sizes
    from deft_backend.tools.ab.trace_traffic import trace_traffic
    from deft_backend.tools.harness.traffic import poisson, timed
    from deft_backend.tools.traces.arrivals import load_arrivals
    from deft_backend.tools.traces.made_arrivals import MOST_TOKENS

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

    def build(offers: Offers) -> list[Traffic]:
        ratio = offers.characters_a_token
        plans = sizes.make_plans(
            names, chosen, characters_a_token=ratio, tree=tree, scale=asked.scale
        )
        found = [timed(plan, asked.rate, asked.seed) for plan in plans]
        if arrivals and asked.trace is not None:
            found.append(
                trace_traffic(
                    arrivals, name=asked.trace.name, characters_a_token=ratio,
                    speed=asked.speed or 1.0, rate=asked.rate, seed=asked.seed,
                )
            )  # fmt: skip
        return found

    return build


def _refuse_idle_options(asked: Asked, names: Sequence[str]) -> None:
    """Refuse options that a trace of arrivals leaves without effect."""
    if asked.index:
        raise fail(f"--index is {asked.index}; it selects a tree, and {asked.trace} has arrivals")
    sizes = dict(zip(("--branches", "--prefix-tokens", "--max-tokens"), asked.sizes, strict=True))
    for name, value in {**sizes, "--quick": asked.quick or None}.items():
        if value is not None and not names:
            raise fail(f"{name} is for workloads, and a trace has its own sizes; omit {name}")
