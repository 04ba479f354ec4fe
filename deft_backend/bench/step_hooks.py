"""CPU time that the plugin adds to a decode step that SGLang replays from a graph, on one core.

``python -m deft_backend.bench.step_hooks --out FILE``

SGLang must be installed. The real backend that plans on the device and the real fence for page
tables, around a host that does nothing: no GPU is needed, and what is left is the plugin's own. A
replayed step calls nothing else of it; the host's own metadata, which it spares, is not subtracted,
and what the fence holds up on a GPU does not show. ``look_us`` is what the thread beside
takes of the processor whenever it writes the server's state, `looks_a_second` times.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
import typer

from deft_backend.attention import TreeAttention
from deft_backend.bench.planning import processor, use_one_core
from deft_backend.bench.provenance import provenance
from deft_backend.config import Settings
from deft_backend.hosts.driver_stub import SONAME, ensure_driver_stub, has_nvidia_driver
from deft_backend.hosts.state import INTERVAL, ServerState, StateWriter

REQUESTS = (2, 32, 256, 1024)
CONTEXTS = (2048, 65536)
STEPS = 1000
"""Calls that are timed together: reading the clock would be part of one."""


def server_state() -> ServerState:
    """Counters of a server that nobody asks."""
    return ServerState(
        port=0, rank=0, host="sglang", host_version="", backend="deft", policy="auto",
        device="cpu", dtype="float32", num_layers=32, num_query_heads=32, num_kv_heads=8,
        head_dim=128, dtype_bytes=4,
    )  # fmt: skip


class Replay:
    """A graph's replay that takes no time, as the host's runner has it."""

    def execute(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> None:
        pass


def fenced_replay(model_runner: Any, reads: Callable[[Any], bool]) -> Callable[..., None]:
    """The same with the plugin's fence for page tables around it.

    Raises
    ------
    RuntimeError
        If SGLang does not put it there.
    """
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    from deft_backend.patches import sglang_page_table_fence

    if not hasattr(DecodeCudaGraphRunner.execute, "__wrapped__"):
        DecodeCudaGraphRunner.execute = Replay.execute  # for good: hooks are applied once a process
    sglang_page_table_fence.install(model_runner, reads)
    fenced: Callable[..., None] = DecodeCudaGraphRunner.execute
    if fenced is Replay.execute or inspect.unwrap(fenced) is not Replay.execute:
        raise RuntimeError(f"the fence is not around DecodeCudaGraphRunner.execute: {fenced}")
    return fenced


def replayed_step(requests: int, context: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of a captured graph with the plugin's hooks, and the same host without them.

    Parameters
    ----------
    requests, context : int
        Requests of the batch, and tokens of each.
    """
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from deft_backend.hosts.sglang.device_planned import DevicePlannedBackend

    class Idle(AttentionBackend):  # type: ignore[misc]
        """A host's backend that prepares nothing."""

        token_to_kv_pool = None
        req_to_token_pool = SimpleNamespace(
            req_to_token=torch.zeros((requests, context), dtype=torch.int32)
        )

        def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
            pass

        def init_forward_metadata_in_graph(self, batch: Any) -> None:
            pass

    attention = TreeAttention(
        num_query_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.float32, device="cpu",
        max_batch=requests,
    )  # fmt: skip
    host = Idle()
    ours = DevicePlannedBackend(host, attention, server_state(), Settings())
    runner = SimpleNamespace(model_runner=SimpleNamespace())
    fenced = fenced_replay(runner.model_runner, ours.replayed_tree)

    mode = SimpleNamespace(is_decode=lambda: True)
    batch = SimpleNamespace(
        forward_mode=mode, batch_size=requests, seq_lens_sum=requests * context, seq_lens_cpu=None,
        seq_lens=torch.full((requests,), context), req_pool_indices=torch.arange(requests),
    )  # fmt: skip
    ours.init_forward_metadata_out_graph(batch, in_capture=True)

    def with_hooks() -> None:
        ours.init_forward_metadata_out_graph(batch)
        fenced(runner, batch)

    def without() -> None:
        host.init_forward_metadata_out_graph(batch)
        Replay.execute(runner, batch)  # type: ignore[arg-type]

    with_hooks()
    if (
        not ours.replayed_tree(batch)
        or runner.model_runner.war_fastpath_read_done_event is not None
    ):
        raise RuntimeError("the step did not go through tree attention")
    return with_hooks, without


def microseconds(step: Callable[[], None], repeats: int) -> float:
    """Median time of a step."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        times.append((time.perf_counter() - began) / STEPS)
    return round(float(np.median(times)) * 1e6, 3)


def look_microseconds(directory: Path, repeats: int) -> float:
    """Median processor time of one look at changed counters, their file included."""
    state = server_state()
    counters = np.zeros(4, dtype=np.int64)
    state.attach_device_counters(counters)
    writer = StateWriter(state, directory)
    times = []
    for _ in range(max(repeats, 9)):
        counters += 1
        began = time.thread_time()
        writer.look()
        times.append(time.thread_time() - began)
    return round(float(np.median(times)) * 1e6, 1)


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    repeats: Annotated[int, typer.Option(help=f"{STEPS} steps each.", min=1)] = 25,
) -> None:
    """Measure the hooks and write one row a batch."""
    if not has_nvidia_driver():  # SGLang's kernels link it
        ctypes.CDLL(str(ensure_driver_stub() / SONAME), mode=ctypes.RTLD_GLOBAL)
    core = use_one_core()
    with tempfile.TemporaryDirectory() as directory:
        look = look_microseconds(Path(directory), repeats)
    rows = []
    for requests in REQUESTS:
        for context in CONTEXTS:
            with_hooks, without = replayed_step(requests, context)
            ours, host = microseconds(with_hooks, repeats), microseconds(without, repeats)
            row = {
                "requests": requests, "context": context, "with_hooks_us": ours,
                "without_us": host, "added_us": round(ours - host, 3),
            }  # fmt: skip
            rows.append(row)
            typer.echo(json.dumps(row))
    header = {
        **provenance(), "processor": processor(), "core": core, "repeats": repeats,
        "look_us": look, "looks_a_second": 1 / INTERVAL,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    out.write_text(f'{{"header": {json.dumps(header)},\n "rows": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    typer.run(main)
