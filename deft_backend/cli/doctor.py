"""`deft doctor`: what is installed, which kernel would run, what is missing and what mends it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deft_backend.cli.checks import (
    Check,
    check_device,
    check_entry_point,
    check_packages,
    check_settings,
)
from deft_backend.cli.errors import fail

CANNOT_WORK = 1

_SIGNS = {"ok": "[green]✓[/green]", "note": "[yellow]•[/yellow]", "problem": "[red]✗[/red]"}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def doctor(
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint's folder: which kernel would it get?")
    ] = None,
    heads: Annotated[str, typer.Option(help="Query heads/KV heads.")] = "32/8",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether the plugin can work here, and for each missing thing the command that mends it.

    Exits with 1 if it cannot.
    """
    shapes = _shapes(model, heads)
    sections = {
        "Installed": [*check_packages(), *check_entry_point()],
        "Machine": list(check_device()),
        "Settings": list(check_settings()),
    }
    kernels = _kernels(shapes)
    works = all(check.status != "problem" for checks in sections.values() for check in checks)
    if as_json:
        content: dict[str, Any] = {"works": works, "kernels": kernels}
        content |= {name.lower(): [asdict(c) for c in found] for name, found in sections.items()}
        typer.echo(json.dumps(content, indent=2))
    else:
        _print(sections, kernels, works)
    if not works:
        raise typer.Exit(CANNOT_WORK)


def _shapes(model: Path | None, heads: str) -> list[tuple[int, int, int, str]]:
    """Query heads, KV heads, head dimension and dtype of each kernel asked about."""
    if model is not None:
        return [_model_shape(model)]
    try:
        query_heads, kv_heads = (int(part) for part in heads.split("/"))
    except ValueError:
        raise fail(f"--heads is {heads!r}; expected QUERY/KV such as 32/8") from None
    if min(query_heads, kv_heads) < 1:
        raise fail(f"--heads is {heads!r}; expected QUERY/KV such as 32/8")
    return [(query_heads, kv_heads, d, t) for d in (64, 96, 128, 256) for t in _DTYPES.values()]


def _model_shape(model: Path) -> tuple[int, int, int, str]:
    path = model / "config.json"
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        query_heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or query_heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // query_heads)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise fail(f"cannot read the attention's shape from {path}: {error!r}") from None
    if dtype not in _DTYPES.values():
        raise fail(f"{path}: dtype is {dtype!r}; expected one of {', '.join(_DTYPES.values())}")
    return query_heads, kv_heads, head_dim, dtype


def _kernels(shapes: list[tuple[int, int, int, str]]) -> list[dict[str, Any]]:
    """What would decode each shape here: tree attention or, with the reason, the host's kernel."""
    try:
        import torch

        from deft_backend.kernels import launch_config, unsupported
    except ImportError as error:
        return [
            {"heads": f"{q}/{kv}", "head_dim": d, "dtype": t, "kernel": "none", "why": str(error)}
            for q, kv, d, t in shapes
        ]
    device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
    found = []
    for query_heads, kv_heads, head_dim, name in shapes:
        dtype = getattr(torch, name)
        why = unsupported(query_heads, kv_heads, head_dim, dtype, device)
        entry = {"heads": f"{query_heads}/{kv_heads}", "head_dim": head_dim, "dtype": name}
        if why is None:
            config = launch_config(head_dim, dtype, device)
            tiles = "/".join(str(tile.rows) for tile in config.tiles)
            why = f"tiles of {tiles} rows" + (", interpreted" if config.interpreted else "")
            found.append({**entry, "kernel": "tree attention", "why": why})
        else:
            found.append({**entry, "kernel": "host", "why": why})
    return found


def _on_gpu() -> bool:
    from deft_backend.hosts.launch import use_gpu

    try:
        return use_gpu()
    except ImportError:
        return False


def _print(sections: dict[str, list[Check]], kernels: list[dict[str, Any]], works: bool) -> None:
    console = Console()
    for title, checks in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for check in checks:
            table.add_row(_SIGNS[check.status], check.subject, Text(check.found))
            if check.remedy and check.status != "ok":
                table.add_row("", "", Text(f"→ {check.remedy}", style="cyan"))
        console.print(table)
        console.print()
    table = Table(title="Which kernel would decode", title_justify="left")
    for name in ("heads", "head_dim", "dtype", "kernel", "why"):
        table.add_column("head dim" if name == "head_dim" else name)
    for entry in kernels:
        sign = "ok" if entry["kernel"] == "tree attention" else "note"
        kernel = f"{_SIGNS[sign]} {entry['kernel']}"
        table.add_row(
            entry["heads"], str(entry["head_dim"]), entry["dtype"], kernel, Text(entry["why"])
        )
    console.print(table)
    if works:
        console.print("[green]✓ the plugin can work here[/green]: deft serve, or deft ab --quick")
    else:
        console.print("[red]✗ the plugin cannot work here[/red]; see the arrows above")
