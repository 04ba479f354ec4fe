"""``python -m benchmarks fuzz``: random plans and attention for a given time."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from deft_backend.cli.errors import fail


def fuzz(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Time for plans, and again for attention.")
    ] = 60.0,
    plans: Annotated[
        int, typer.Option(min=0, help="End after so many plans; 0: only the time counts.")
    ] = 0,
    what: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="plans, attention, or both.")
    ] = "plans,attention",
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one for each core.")
    ] = None,
    settings: Annotated[
        int, typer.Option(min=1, help="Shapes that each process takes; a GPU compiles for each.")
    ] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Another seed runs other batches.")] = 0,
    cases: Annotated[
        Path, typer.Option(help="Folder for failing seeds; the tests replay what it holds.")
    ] = Path("tests/benchmarks/fuzz_cases"),
) -> None:
    """Compare plans of host and device with each other, and attention with a plain reference.

    Requests have one query token or several, as chains and as token trees. KV caches have 16 or 8
    bits and the layouts of hosts. Some attention has sinks or a soft cap.

    Each failing seed becomes a file in --cases. Exits with 1 if a seed fails.
    """
    import torch

    from benchmarks.fuzz.case_files import keep
    from benchmarks.fuzz.fuzz_process import WHATS
    from benchmarks.fuzz.fuzz_run import Fuzz, run
    from benchmarks.row_files import RowsError, make_folder, write_rows
    from deft_backend.cli.errors import reported
    from deft_backend.compile.usable_cpus import usable_cpus
    from deft_backend.files.provenance import provenance

    chosen = tuple(name.strip() for name in what.split(",") if name.strip())
    unknown = [name for name in chosen if name not in WHATS]
    if unknown or not chosen:
        raise fail(f"--what is {what!r}; expected {' or '.join(WHATS)}, or both with a comma")
    on_gpu = torch.cuda.is_available()
    dtypes = ("bfloat16", "float16") if on_gpu else ("bfloat16", "float16", "float32")
    with reported(RowsError):
        make_folder(out)
        rows = run(
            Fuzz(
                chosen, seconds, plans, processes or usable_cpus(), settings, seed,
                "cuda" if on_gpu else "cpu", dtypes,
            ),
            typer.echo,
        )  # fmt: skip
        failures = [failure for row in rows for failure in row["failures"]]
        kept = keep(failures, cases)  # before the rows, whose disk may be full
        command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
        write_rows(out, rows, {**provenance(), "command": command})
    for row in rows:
        same = (
            f", {row['same']} of {row['compared']} the same on host and device, {row['ties']} ties"
        )
        typer.echo(
            f"{row['what']}: {row['plans']} plans in {row['seconds']} s"
            f"{same if row['compared'] else ''}; {len(row['failures'])} failures; "
            f"largest errors {row['largest_error']}"
        )
    for path in kept:
        typer.echo(f"FAILED {path}")
    raise typer.Exit(bool(failures))
