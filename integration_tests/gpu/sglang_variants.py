"""SGLang servers on GPUs with different dtypes, pages, ranks and adapters, all started at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.e2e.served_model import Model
from deft_backend.servers.command import StartError, free_port, server_command
from deft_backend.servers.process import ServerProcess
from integration_tests.common.server import START_SECONDS, Server

ADAPTER = "adapted"
"""Name of the adapter on servers with LoRA."""

COMMON = (
    "--skip-tokenizer-init", "--sampling-backend", "pytorch",
    "--cuda-graph-backend-prefill=disabled", "--cuda-graph-bs-decode", "1", "8", "32", "64",
    # Each server gets a share of the GPU, although it measures free memory while others start.
    "--mem-fraction-static", "0.5", "--max-total-tokens", "100000",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A server.

    Attributes
    ----------
    backend : str
        ``deft``, or the host's own backend for the reference answers.
    flags : tuple of str
    settings : mapping
        Environment variables.
    against : str
        The variant that checks its answers.
    ranks : int
        Number of GPUs.
    lora : bool
        Whether it also serves the adapter.
    states : tuple of str
        Names of its ranks' state files, behind the port.
    in_step : bool
        Whether its ranks decode the same batches.
    """

    backend: str
    flags: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    against: str = "host"
    ranks: int = 1
    lora: bool = False
    states: tuple[str, ...] = ("tp0",)
    in_step: bool = True


DEVICE = {"DEFT_PLANNER": "device"}
HOST = {"DEFT_PLANNER": "host", "DEFT_MIN_SAVED_MS": "0"}

REFERENCES: Mapping[str, Variant] = {
    "host": Variant("fa3"),
    "host-float16": Variant("fa3", ("--dtype", "float16")),
    "host-lora": Variant("fa3", lora=True),
}

VARIANTS: Mapping[str, Variant] = {
    "default": Variant("deft"),
    "planned-on-the-host": Variant("deft", settings=HOST),
    "float16": Variant("deft", ("--dtype", "float16"), DEVICE, "host-float16"),
    "pages-of-16": Variant("deft", ("--page-size", "16", "--chunked-prefill-size", "512"), DEVICE),
    "lora": Variant("deft", settings=DEVICE, against="host-lora", lora=True),
    "memory-saver": Variant("deft", ("--enable-memory-saver",), DEVICE),
    "hierarchical": Variant(
        "deft", ("--enable-hierarchical-cache", "--hicache-ratio", "2"), settings=HOST
    ),
    "two-ranks": Variant(
        "deft", ("--tensor-parallel-size", "2"), DEVICE, "default", 2, states=("tp0", "tp1")
    ),
    "two-ranks-planned-on-the-host": Variant(
        "deft", ("--tensor-parallel-size", "2"), HOST, "default", 2, states=("tp0", "tp1")
    ),
    "two-stages": Variant(
        "deft",
        ("--pipeline-parallel-size", "2"),
        DEVICE,
        "default",
        2,
        states=("tp0-pp0", "tp0-pp1"),
        in_step=False,
    ),
    "data-parallel": Variant(
        "deft",
        ("--tensor-parallel-size", "2", "--data-parallel-size", "2", "--enable-dp-attention"),
        DEVICE,
        "default",
        2,
        states=("tp0-dp0", "tp1-dp1"),
        in_step=False,
    ),
}


@contextmanager
def running(names: list[str], gpus: int, model: Model, adapter: Path,
            folder: Path) -> Iterator[dict[str, Server | StartError]]:  # fmt: skip
    """Servers of these names, or the reason why one did not start, for a `with` block."""
    everything = {**REFERENCES, **VARIANTS}
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = given.split(",")[:gpus] if given else [str(index) for index in range(gpus)]
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as threads:

        def start(at: int, name: str) -> Server | StartError:
            variant = everything[name]
            shown = ",".join(visible if variant.ranks > 1 else [visible[at % gpus]])
            try:
                return _start(name, variant, shown, model, adapter, folder, stack)
            except StartError as error:
                return error

        yield dict(zip(names, threads.map(start, range(len(names)), names), strict=True))


def _start(
    name: str, variant: Variant, gpus: str, model: Model, adapter: Path, folder: Path,
    stack: ExitStack,
) -> Server:  # fmt: skip
    flags = [*COMMON, *variant.flags]
    if variant.lora:
        flags += ["--lora-paths", f"{ADAPTER}={adapter}", "--max-loras-per-batch", "2"]
    state = folder / name / "state"
    command = server_command(
        model.path, free_port(), backend=variant.backend, host_arguments=flags, gpu=True,
        environment={
            "CUDA_VISIBLE_DEVICES": gpus, "DEFT_STATE_DIR": str(state), **variant.settings,
        },
    )  # fmt: skip
    process = ServerProcess(command, folder / name / "server.log", timeout=START_SECONDS)
    stack.enter_context(process)
    return Server(process, state)
