"""Options of the commands that start servers of both backends."""

from __future__ import annotations

from typing import Annotated

import typer

HostArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- HOST OPTIONS]", help="Every server gets them unchanged."),
]
CheckpointOption = Annotated[
    str | None, typer.Option(help="Checkpoint folder. Default: write a checkpoint of --shape.")
]
ReferenceOption = Annotated[
    str | None,
    typer.Option(
        help="Backend whose answers are the reference. In SGLang, the server with the plugin also "
        "prefills with it. pytorch: a model in plain PyTorch checks the answers of traffic."
    ),
]
TogetherOption = Annotated[
    bool,
    typer.Option(
        "--together",
        help="Start all servers at once, and run each workload on one after the other. The host's "
        "options must give each server its share of the GPU.",
    ),
]
