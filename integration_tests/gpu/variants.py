"""Servers on GPUs with different dtypes, pages, ranks and modes, all started at once."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from deft_backend.files.folders import state_directory
from deft_backend.settings.config import Settings
from deft_backend.settings.policy_names import (
    DEFT_FLATTEN,
    DEFT_NODE,
    DEFT_NODE_CHUNK,
    FASTTREE,
    FLASHFORGE,
)
from deft_backend.tools.servers.command import StartError, free_port, server_command
from deft_backend.tools.servers.process import ServerProcess
from integration_tests.common.server import START_SECONDS, Server

LATENT_SERVERS = (("latent-16", 1), ("latent-8", 1), ("latent-16", 2))
"""Shapes and ranks of servers with MLA: the heads of DeepSeek-V2-Lite or of a rank of V3, and
twice those of a rank of Kimi K2."""

PAPERS = (DEFT_NODE, DEFT_NODE_CHUNK, DEFT_FLATTEN, FASTTREE, FLASHFORGE)
"""The papers' policies, each in a server of its own."""

ADAPTERS = ("adapted", "adapted-2")
"""Names of the adapters on servers with LoRA, and of their folders."""


_LORA = {
    "sglang": ("--max-loras-per-batch", "3", "--lora-paths"),  # the base counts
    "vllm": ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"),
}


@dataclass(frozen=True)
class Variant:
    """A server."""

    backend: str  # ``deft``, or the host's own backend for the reference answers
    flags: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    against: str = "host"  # the variant that checks its answers
    ranks: int = 1  # one GPU each
    lora: bool = False  # also serves the adapters
    states: tuple[str, ...] = ("tp0",)  # names of its ranks' state files, behind the port
    in_step: bool = True  # its ranks decode the same batches


@dataclass(frozen=True)
class Fleet:
    """A host's servers."""

    host: str
    common: tuple[str, ...]  # flags of every server
    references: Mapping[str, Variant]  # with the host's own backend, by name
    variants: Mapping[str, Variant]  # with tree attention, by name

    @property
    def servers(self):
        return {**self.references, **self.variants}


@contextmanager
def running(fleet, names, gpus, model, adapters, folder):
    """Servers of these names, or the reason why one did not start, for a `with` block.

    They share this number of GPUs; each rank of a server gets one of its own.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = given.split(",")[:gpus] if given else [str(index) for index in range(gpus)]
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as threads:

        def start(at, name):
            variant = fleet.servers[name]
            places = range(at * variant.ranks, (at + 1) * variant.ranks)
            shown = ",".join(visible[place % gpus] for place in places)
            try:
                return _start(fleet, name, shown, model, adapters, folder, stack)
            except StartError as error:
                return error

        yield dict(zip(names, threads.map(start, range(len(names)), names), strict=True))


def _start(fleet, name, gpus, model, adapters, folder, stack):
    variant = fleet.servers[name]
    flags = [*fleet.common, *variant.flags]
    if variant.lora:
        flags += [*_LORA[fleet.host], *(f"{name}={adapters / name}" for name in ADAPTERS)]
    command = server_command(
        model.path, free_port(), host=fleet.host, backend=variant.backend, host_arguments=flags,
        gpu=True,
        environment={
            "CUDA_VISIBLE_DEVICES": gpus, **variant.settings,
        },
    )  # fmt: skip
    process = ServerProcess(command, folder / name / "server.log", timeout=START_SECONDS)
    stack.enter_context(process)
    return Server(process, state_directory(Settings.from_env()))
