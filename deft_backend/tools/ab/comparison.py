"""Both sides of a comparison, one after the other."""

import asyncio
from collections.abc import Callable, Sequence

from deft_backend.files.provenance import provenance
from deft_backend.tools.ab.progress import Progress
from deft_backend.tools.ab.result import AbResult, compare_sides
from deft_backend.tools.ab.run import SideRun, run_side
from deft_backend.tools.ab.sides import Side
from deft_backend.tools.harness.client import Offers, ServerClient, ServerError
from deft_backend.tools.harness.replay import Replayed
from deft_backend.tools.harness.workload import Workload


def both_answer(urls: Sequence[str]) -> None:
    """Before a long run on the first server, check that both servers answer."""

    async def ask() -> None:
        for url in urls:
            async with ServerClient(url) as client:
                await client.models()

    asyncio.run(ask())


def compare(
    sides: tuple[Side, Side],
    build: Callable[[Offers], list[Workload]],
    model: str | None,
    progress: Progress,
    *,
    exact: bool,
) -> AbResult:
    """Run both sides, one after the other; an interrupted run gives what it has."""
    made: list[Workload] = []

    def workloads(offers: Offers) -> list[Workload]:
        if not made:
            made.extend(build(offers))
        return made

    runs: list[SideRun] = []
    interrupted = False
    for side in sides:
        first = runs[0] if runs else None
        progress.announce(side.title)
        try:
            with side.open() as server:
                run, interrupted = asyncio.run(
                    run_side(server, side.name, workloads, model, first, progress, exact)
                )
        except ServerError as error:
            if first is None:
                raise
            run = _silent_side(side, first, str(error))  # keep what the first one did
        except KeyboardInterrupt:  # while the second server starts
            if first is None:
                raise
            interrupted = True
            break
        runs.append(run)
        if interrupted:
            break
    names = (sides[0].name, sides[1].name)
    return compare_sides(
        names, runs, made, interrupted=interrupted, provenance=provenance(), exact=exact
    )


def _silent_side(side: Side, first: SideRun, why: str) -> SideRun:
    """The run of a second server that answered nothing."""
    nothing = tuple(Replayed((), 0.0, died=why) for _ in first.runs)
    return SideRun(side.name, "", first.offers, nothing, (), ())
