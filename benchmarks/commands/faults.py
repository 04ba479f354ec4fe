"""``python -m benchmarks faults``: real servers under faults; the record behind reliability.md."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from deft_backend.cli.errors import fail
from deft_backend.cli.serve import HostOption, chosen_host


def faults(
    out: Annotated[Path, typer.Option(help="JSON file of rows; rows of the other host stay.")],
    host: HostOption = None,
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = Path("models/tiny-llama"),
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and combinations.")] = 0,
    combinations: Annotated[
        int, typer.Option(min=0, help="Random combinations of three faults.")
    ] = 4,
    only: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME…]", help="Only these faults.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder that keeps the servers' logs.")] = None,
    page: Annotated[Path | None, typer.Option(help="Draw the record into this page.")] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Run nothing; only draw --page.")] = False,
) -> None:
    """Inject faults into servers on the CPU and compare every answer with transformers'.

    Exits with 1 if an answer is wrong or lost, or a process stays.
    """
    from benchmarks.faults.record import drawn_into, merged, read_record
    from benchmarks.faults.run import Harness
    from benchmarks.faults.table import FAULTS
    from benchmarks.row_files import RowsError, make_folder, write_rows
    from deft_backend.cli.errors import reported
    from deft_backend.files.provenance import provenance

    if draw:
        if page is None:
            raise fail("--draw needs the page: --page docs/reliability.md")
        with reported(RowsError):
            page.write_text(drawn_into(page.read_text(), read_record(out)[0]))
        return
    chosen = None if only is None else {name.strip() for name in only.split(",")}
    known = {fault.name for fault in FAULTS}
    if chosen is not None and not chosen <= known:
        raise fail(f"--only is {only!r}; expected some of {', '.join(sorted(known))}")
    name = chosen_host(host, needed=True)
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    with reported(RowsError), tempfile.TemporaryDirectory() as temporary:
        make_folder(out)
        folder = Path(temporary) if logs is None else logs
        harness = Harness(str(name), folder, model.resolve(), seed, combinations, typer.echo)
        try:
            harness.run(chosen)
        finally:
            header = {**provenance(), "command": command, "seed": seed}
            rows, headers = merged(out, str(name), harness.rows, header)
            write_rows(out, rows, headers)
            if page is not None:
                page.write_text(drawn_into(page.read_text(), rows))
    failed = [row for row in harness.rows if not row["ok"]]
    typer.echo(f"{len(harness.rows)} faults, {len(failed)} not as promised")
    raise typer.Exit(bool(failed))
