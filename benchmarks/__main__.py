"""``python -m benchmarks``: the commands, one module each."""

from __future__ import annotations

import typer

from benchmarks.commands.e2e import e2e, e2e_merge
from benchmarks.commands.faults import faults
from benchmarks.commands.fuzz import fuzz
from benchmarks.commands.kernel import kernel, kernel_merge, kernel_plot
from benchmarks.commands.kernel_check import kernel_check
from benchmarks.commands.planning import planning_device, planning_host
from benchmarks.commands.sharing import sharing
from benchmarks.commands.soak import soak
from benchmarks.commands.start import start
from benchmarks.commands.step_hooks import step_hooks
from benchmarks.commands.zoo import zoo

app = typer.Typer(
    help="Measure deft-backend: its kernels, its planners, and servers that decode with it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)

app.command("kernel")(kernel)
app.command("kernel-merge")(kernel_merge)
app.command("kernel-plot")(kernel_plot)
app.command("kernel-check")(kernel_check)
app.command("fuzz")(fuzz)
app.command("faults")(faults)
app.command("soak")(soak)
app.command("e2e")(e2e)
app.command("e2e-merge")(e2e_merge)
app.command("start")(start)
app.command("sharing")(sharing)
app.command("planning-host")(planning_host)
app.command("planning-device")(planning_device)
app.command("step-hooks")(step_hooks)
app.command("zoo")(zoo)

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
