"""`deft doctor`: show the installation, the kernel that would run, and the missing parts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from deft_backend.cli.checks import (
    Check,
    check_device,
    check_entry_point,
    check_imports,
    check_packages,
    check_settings,
)
from deft_backend.cli.errors import say
from deft_backend.cli.models import chosen_model, tiny_model
from deft_backend.cli.shapes import HeadShape, model_shape, table_of, this_device
from deft_backend.settings.config import SettingsError

CANNOT_WORK = 1

CHECK_SECONDS = 20  # of the whole command
_AROUND_CASES = 2  # of them: Python starts, the last case ends, and the table is printed

# Head dimensions and dtypes of most checkpoints, the commonest first.
_COMMON = ((128, "bfloat16"), (128, "float16"), (64, "bfloat16"))

_SIGNS = {"ok": "[green]✓[/green]", "note": "[yellow]•[/yellow]", "problem": "[red]✗[/red]"}


def doctor(
    model: Annotated[str | None, Option(help="Which kernel decodes this model?")] = None,
    check: Annotated[bool, Option("--check", help="Run kernels and compare rows; 20 s.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether the plugin works here; show a repair command for each missing part.

    The exit code is 1 if the plugin cannot work, or if a kernel that --check runs is wrong or none
    could run.
    """
    until = time.monotonic() + CHECK_SECONDS - _AROUND_CASES
    shapes = [HeadShape(32, 8, *common) for common in _COMMON]
    if model is not None:
        shapes = [model_shape(chosen_model(model))]
    sections = {
        "Installed": [*check_packages(), *check_imports(), *check_entry_point()],
        "Machine": list(check_device()),
        "Settings": list(check_settings()),
    }
    kernels = _kernels(shapes)
    ran = _checked(shapes, until) if check else []
    works = all(each.status != "problem" for checks in sections.values() for each in checks)
    works = works and all(entry["failure"] is None for entry in ran)
    works = works and (not check or any(map(_has_run, ran)))
    if as_json:
        content = {name.lower(): [asdict(c) for c in each] for name, each in sections.items()}
        more = {"check": ran} if check else {}
        typer.echo(json.dumps({"works": works, "kernels": kernels, **content, **more}, indent=2))
    else:
        _print(sections, kernels, ran, works)
    if not works:
        raise typer.Exit(CANNOT_WORK)


def _kernels(shapes: list[HeadShape]) -> list[dict[str, Any]]:
    try:
        import torch

        from deft_backend.kernels import kernel_configuration, unsupported
    except Exception as error:  # the installation above shows it
        return [_entry(shape, "none", str(error)) for shape in shapes]
    device = this_device()
    entries = []
    for shape in shapes:
        query_heads, kv_heads, head_dim = shape[:3]
        dtype = getattr(torch, shape.dtype)
        why = unsupported(query_heads, kv_heads, head_dim, dtype, device)
        if why is not None:
            entries.append(_entry(shape, "host", why))
            continue
        config = kernel_configuration(head_dim, dtype, device, query_heads // kv_heads)
        tiles = "/".join(str(tile.height) for tile in config.tiles)
        why = f"tiles of {tiles} query vectors" + (", interpreted" if config.interpreted else "")
        entries.append({**_entry(shape, "tree attention", why), **_table(shape)})
    return entries


def _entry(shape: HeadShape, kernel: str, why: str) -> dict[str, Any]:
    place = {"heads": shape.heads, "head_dim": shape.head_dim, "dtype": shape.dtype}
    return {**place, "kernel": kernel, "why": why}


def _table(shape: HeadShape) -> dict[str, Any]:
    from deft_backend.costs.cost_model import CostModel

    try:
        _, used = table_of(shape)
    except SettingsError:
        return {}  # the settings above show the error
    if used.tuned:
        return {"table": f"tuned: {used.path}"}
    scaled = " (scaled)" if used.model.source != CostModel.load(used.path).source else ""
    entry = {"table": f"shipped: {used.path.name}{scaled}"}
    return entry if used.notice is None else {**entry, "remedy": used.notice}


def _checked(shapes: list[HeadShape], until: float) -> list[dict[str, Any]]:
    try:
        import torch

        from deft_backend.attention.self_check import CheckedShape, check_shapes
        from deft_backend.kernels import unsupported
    except Exception:
        return []  # the installation above shows the error
    device = this_device()
    if device.type == "cpu":  # the interpreter takes a second for a small batch
        shapes = [HeadShape(4, 2, 128, "bfloat16"), HeadShape(4, 2, 64, "float16")]
    run = [
        CheckedShape(*shape[:3], dtype, kv_dtype)
        for shape in shapes
        for dtype in [getattr(torch, shape.dtype)]
        for kv_dtype in (dtype, torch.float8_e4m3fn)
        if unsupported(*shape[:3], dtype, device, kv_dtype=kv_dtype) is None
    ]
    return [
        {
            "heads": f"{shape.num_query_heads}/{shape.num_kv_heads}",
            "head_dim": shape.head_dim,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "kv": str(shape.kv_dtype).removeprefix("torch."),
            "case": str(outcome.case),
            "error": outcome.error,
            "failure": outcome.failure,
        }
        for shape, outcome in check_shapes(run, device, until)
    ]


def _print_check(console: Console, ran: list[dict[str, Any]]) -> None:
    table = Table(title="Kernels that ran here, against float64", title_justify="left")
    for name in ("heads", "head dim", "dtype", "KV cache", "case", "largest error of a row"):
        table.add_column(name)
    for entry in ran:
        result = Text("not run: no time was left", style="dim")
        if entry["failure"] is not None:
            result = Text(f"✗ {entry['failure']}", style="red")
        elif entry["error"] is not None:
            result = Text(f"✓ {entry['error']:.1e}", style="green")
        case = (entry[name] for name in ("heads", "head_dim", "dtype", "kv", "case"))
        table.add_row(*map(str, case), result)
    console.print(table)
    on_gpu = this_device().type == "cuda"
    if not on_gpu:
        line = (
            "• No GPU here: the check ran the interpreter's kernels. It cannot check compiled "
            "kernels, shared memory or CUDA graphs; run it on the GPU as well"
        )
        say(console, line, "yellow")
    done = sum(map(_has_run, ran))
    if done == len(ran):
        return
    why = (
        "kernels are compiled first, and compiled code is kept: run the check again"
        if on_gpu
        else "Triton's interpreter is slow on a busy machine: run it when less else runs"
    )
    say(console, f"• {done} of {len(ran)} cases ran within {CHECK_SECONDS} s; {why}", "yellow")


def _has_run(entry: Mapping[str, Any]) -> bool:
    return entry["error"] is not None or entry["failure"] is not None


def _print(
    sections: dict[str, list[Check]],
    kernels: list[dict[str, Any]],
    ran: list[dict[str, Any]],
    works: bool,
) -> None:
    console = Console()
    for title, checks in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for check in checks:
            table.add_row(_SIGNS[check.status], check.subject, Text(check.state))
            if check.remedy and check.status != "ok":
                table.add_row("", "", Text(f"→ {check.remedy}", style="cyan"))
        console.print(table)
        console.print()
    table = Table(title="Which kernel would decode", title_justify="left")
    for name in ("heads", "head dim", "dtype", "kernel", "why", "cost table"):
        table.add_column(name)
    for entry in kernels:
        sign = "ok" if entry["kernel"] == "tree attention" else "note"
        kernel = f"{_SIGNS[sign]} {entry['kernel']}"
        shape = (entry["heads"], str(entry["head_dim"]), entry["dtype"])
        table.add_row(*shape, kernel, Text(entry["why"]), Text(entry.get("table", "")))
    console.print(table)
    if len(kernels) > 1:
        console.print("[dim]other shapes: --model[/dim]", highlight=False)
    for remedy in dict.fromkeys(entry["remedy"] for entry in kernels if "remedy" in entry):
        console.print(Text(f"→ {remedy}", style="cyan"), soft_wrap=True)
    if ran:
        _print_check(console, ran)
    if works:
        model = "" if tiny_model() is not None else " --model M"
        said = f"try deft ab --quick{model}, or deft serve{model}"
        console.print(f"[green]✓ the plugin works here[/green]: {said}", highlight=False)
    elif ran and not any(map(_has_run, ran)):
        console.print("[red]✗ no case of --check ran[/red], so nothing is known about the kernels")
    else:
        console.print(
            "[red]✗ the plugin cannot work here[/red]: run the commands behind the arrows"
        )
