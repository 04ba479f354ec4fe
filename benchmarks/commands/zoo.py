"""``python -m benchmarks zoo``: many architectures, decoded and then checked token by token."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.commands.server_options import HostArguments
from benchmarks.row_files import write_rows
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.place import Place
from benchmarks.zoo.processes import end_all
from deft_backend.cli.errors import host_arguments, reported
from deft_backend.files.provenance import provenance
from deft_backend.tools.servers.command import installed_hosts, use_gpu, vllm_is_cpu_build


def zoo(
    host_args: HostArguments = None,
    only: Annotated[
        list[str] | None, typer.Option(help="An architecture; may be repeated. Default: all.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="sglang or vllm. Default: the installed one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file of rows; other rows in it stay.")] = Path(
        "reports/models.json"
    ),
    logs: Annotated[Path, typer.Option(help="Folder for models, answers and logs.")] = Path(
        "reports/zoo"
    ),
    at_once: Annotated[int, typer.Option(help="Architectures that run at the same time.")] = 1,
    seconds: Annotated[float, typer.Option(help="End the run after this time.")] = 3600.0,
) -> None:
    """Check the answers of small models of many architectures, token by token.

    For each architecture one engine decodes through tree attention. An engine with the host's own
    backend then answers the same requests and compares. On the CPU, only architectures run that
    the host's CPU engine can run.
    """
    from benchmarks.zoo.zoo_run import run

    named = host or installed_hosts()[0]
    gpu = use_gpu() and not (named == "vllm" and vllm_is_cpu_build())
    unknown = sorted(set(only or ()) - set(ARCHITECTURES))
    if unknown:
        raise typer.BadParameter(
            f"{unknown[0]} is not an architecture; expected one of {', '.join(ARCHITECTURES)}"
        )
    names = only or [
        name for name, architecture in ARCHITECTURES.items() if gpu or named in architecture.cpu
    ]
    with reported(ValueError):
        asked = engine_arguments(host_arguments(host_args))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    rows, runs = _known(out)
    runs.append(provenance())
    place = Place(named, gpu, asked=asked)
    for row in run(names, place, logs, at_once, seconds):
        rows[_key(row)] = {**row, "run": len(runs) - 1}
        out.parent.mkdir(parents=True, exist_ok=True)
        write_rows(out, list(rows.values()), {"runs": runs})
        typer.echo(_line(row))
    typer.echo(f"The README's line of these rows:\n{readme_line(list(rows.values()))}")


def _stop(number: int, frame: object) -> None:
    """End the engines and this process; the rows of finished architectures are written."""
    end_all()
    os._exit(128 + number)


def _key(row: dict[str, object]) -> tuple[object, ...]:
    names = ("host", "version", "architecture", "kv_dtype", "device")
    options = json.dumps(row.get("options", {}), sort_keys=True)
    return (*(row.get(name) for name in names), options)


Rows = dict[tuple[object, ...], dict[str, object]]


def _known(path: Path) -> tuple[Rows, list[object]]:
    """The rows of earlier runs, which new rows of the same engine and model replace; their runs."""
    if not path.is_file():
        return {}, []
    content = json.loads(path.read_text())
    return {_key(row): row for row in content["rows"]}, list(content["header"]["runs"])


def _line(row: dict[str, object]) -> str:
    return (
        f"{row['host']} {row['version']}  {row['architecture']:<12} {row['query_heads']}/"
        f"{row['kv_heads']} x {row['head_dim']}  {row['kv_dtype']}  layers: {row['layers_tree']} "
        f"tree, {row['layers_host']} host  tokens: {row['tokens_checked']}, "
        f"{row['tokens_wrong']} wrong, {row['ties']} ties  {row.get('note', '')}"
    )


def readme_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """The line of the README's table: architectures whose full layers tree attention decodes.

    An architecture counts if every row that checked tokens passed. An architecture stands in the
    second column if the host decodes all of its layers.
    """
    failed = {row["architecture"] for row in rows if row["tokens_wrong"]}
    good = [r for r in rows if r["tokens_checked"] and r["architecture"] not in failed]
    tree = {row["architecture"] for row in good if row["layers_tree"]}
    host = {row["architecture"] for row in good} - tree
    return f"| architectures checked | {_titles(tree)} | {_titles(host) or '–'} |"


def _titles(names: set[str]) -> str:
    return ", ".join(sorted(ARCHITECTURES[name].title for name in names))


def engine_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """A server's options as arguments of the host's engine: ``--page-size 64`` is page_size=64.

    An option without a value is True, one with several values is a list. Values in JSON are read.

    Raises
    ------
    ValueError
        If a value stands before the first option.
    """
    found: dict[str, list[Any]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, assigned, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [_read(value)] if assigned else []
        elif name:
            found[name].append(_read(word))
        else:
            raise ValueError(f"expected an option such as --page-size 64, got {word!r}")
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in found.items()
    }


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
