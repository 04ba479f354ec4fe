"""A replayed decode step of SGLang for timing, in which only the plugin does work.

The plugin's real device-planned backend and its real fence for page tables run around a host
backend and a CUDA graph that take no time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.division import Division, LayerShape
from deft_backend.hosts.sglang.step.backend import surround
from deft_backend.hosts.sglang.step.device_planned import DevicePlannedSteps
from deft_backend.hosts.sglang.step.tree_layers import TreeLayers
from deft_backend.settings.config import Settings
from deft_backend.telemetry.state import ServerState
from deft_patches.sglang import page_table_fence


def server_state() -> ServerState:
    """The state of a server that does not exist."""
    return ServerState(
        port=0, rank=0, host="sglang", host_version="", backend="deft", policy="auto",
        device="cpu", dtype="float32", num_layers=32, num_query_heads=32, num_kv_heads=8,
        head_dim=128, dtype_bytes=4,
    )  # fmt: skip


class Replay:
    """The host's replay of a CUDA graph, without work."""

    def execute(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> None:
        pass


def fenced_replay(model_runner: Any, reads: Callable[[Any], bool]) -> Callable[..., None]:
    """The replay with the plugin's fence for page tables around it.

    Raises
    ------
    RuntimeError
        If the fence was not installed.
    """
    if not hasattr(DecodeCudaGraphRunner.execute, "__wrapped__"):
        # The wrapper stays, because a process wraps the method only once.
        DecodeCudaGraphRunner.execute = Replay.execute
    page_table_fence.install(model_runner, reads)
    fenced: Callable[..., None] = DecodeCudaGraphRunner.execute
    if fenced is Replay.execute or inspect.unwrap(fenced) is not Replay.execute:
        raise RuntimeError(f"the fence is not around DecodeCudaGraphRunner.execute: {fenced}")
    return fenced


def replayed_step(requests: int, context: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of a captured CUDA graph with the plugin's hooks, and one without them.

    Parameters
    ----------
    requests, context : int
        Requests of the batch, and tokens of each context.
    """

    class Idle(AttentionBackend):  # type: ignore[misc]
        """A host backend that prepares nothing."""

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
    division = Division({0: LayerShape(32, 8, 128)}, {})
    steps = DevicePlannedSteps(TreeLayers(host, attention, server_state(), division), Settings())
    ours = surround(host, steps)
    runner = SimpleNamespace(model_runner=SimpleNamespace())
    fenced = fenced_replay(runner.model_runner, steps.replayed_tree)

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
        not steps.replayed_tree(batch)
        or runner.model_runner.war_fastpath_read_done_event is not None
    ):
        raise RuntimeError("the step did not go through tree attention")
    return with_hooks, without
