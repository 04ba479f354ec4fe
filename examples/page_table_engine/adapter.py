"""The adapter: it connects this engine with ``deft_backend``."""

from __future__ import annotations

import logging

import torch

import deft_backend
from deft_backend.attention import TreeAttention
from deft_backend.attention.reference_attention import relative_error
from deft_backend.hosts.common.warm_up import StepTensors, warm_up_attention
from deft_backend.planner.on_device import largest_batch
from deft_backend.settings.config import LOG_LEVELS, Settings, warn_unknown
from deft_backend.telemetry.state import ServerState
from examples.page_table_engine import torch_attention
from examples.page_table_engine.cache import PagedCache
from examples.page_table_engine.model import Llama, LlamaConfig
from examples.page_table_engine.torch_attention import DecodeBatch

logger = logging.getLogger("deft_backend")

LIMIT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""For ``DEFT_VERIFY``: the largest relative error allowed."""


def engine_state(model: Llama, attention: str) -> ServerState:
    """Counters at zero. A server also has a port, and passes its state to a ``StateWriter``."""
    config = model.config
    return ServerState(
        port=0,
        rank=0,
        host="page_table_engine",
        host_version=deft_backend.__version__,
        backend=attention,
        policy=Settings.from_env().policy if attention == "tree" else "",
        device=model.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=config.num_layers,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype_bytes=model.dtype.itemsize,
    )


def tree_decode(
    config: LlamaConfig, cache: PagedCache, max_batch: int, table_columns: int, state: ServerState
) -> TreeDecode | None:
    """Tree attention for this engine, ready for the first request; or None, with a log line.

    Raises
    ------
    SettingsError
        If a ``DEFT_*`` variable holds a value that is not allowed.
    """
    settings = Settings.from_env()
    logger.setLevel(LOG_LEVELS[settings.log])
    warn_unknown()
    try:
        reason = unsupported(config, cache, max_batch, settings)
        if reason is None:
            return TreeDecode(config, cache, max_batch, table_columns, state, settings)
    except Exception as error:
        reason = f"it could not be set up ({error!r})"
    logger.warning("deft: decode runs through torch's attention: %s", reason)
    return None


def unsupported(
    config: LlamaConfig, cache: PagedCache, max_batch: int, settings: Settings
) -> str | None:
    """Why tree attention cannot decode for this engine, in one line; or None.

    A host with layers of other kinds (sliding windows, sinks, MLA, a quantised cache) checks each
    layer. Here all layers are equal, and ``LlamaConfig.read`` accepts only a plain Llama.
    """
    if max_batch > largest_batch():
        return f"batches of {max_batch} requests; plans made on the device hold {largest_batch()}"
    return TreeAttention.unsupported(
        config.num_query_heads, config.num_kv_heads, config.head_dim, cache.k.dtype, cache.k.device
    )


class TreeDecode:
    """Decode steps through :class:`TreeAttention`: plan a step, then run each layer.

    On a GPU the device planner plans in every step, as launches inside the step's graph, and the
    CPU never learns the plan. On the CPU the reference plans.
    """

    def __init__(
        self,
        config: LlamaConfig,
        cache: PagedCache,
        max_batch: int,
        table_columns: int,
        state: ServerState,
        settings: Settings,
    ) -> None:
        self._cache, self._state, self._settings = cache, state, settings
        self._attention = TreeAttention(
            num_query_heads=config.num_query_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=cache.k.dtype,
            device=cache.k.device,
            page_size=cache.page_size,
            max_batch=max_batch,
            policy=settings.policy,
        )
        tensors = StepTensors(cache.k[0], cache.v[0], [table_columns])
        warm_up_attention(self._attention, tensors, smallest=1)
        self._attention.clear_plan()  # no plan covers the batch of a capture
        self.capturable = not settings.verify
        logger.info("deft: decode goes through tree attention (policy %s)", settings.policy)

    def refuses(self, size: int) -> str | None:
        """Why steps padded to `size` skip tree attention, or None; fixed for a graph."""
        least = self._settings.min_batch
        return None if size >= least else f"batch smaller than DEFT_MIN_BATCH={least}"

    def start_counting(self) -> None:
        """Count from now on, without the plans of warm-up and capture."""
        counters = self._attention.counters
        self._state.on_device.attach(counters.numpy())

    def plan(self, batch: DecodeBatch) -> None:
        """First launches of a step, recorded into its graph."""
        self._attention.plan_batch(batch.page_table, batch.seq_lens, table_rows=batch.table_rows)

    def run(self, layer: int, q: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One layer's attention [B, Hq, D] of `q` [B, Hq, D]; its keys and values are written.

        Raises
        ------
        RuntimeError
            Under ``DEFT_VERIFY``, if torch's attention gives another result.
        """
        out = self._attention.run(
            q,
            self._cache.k[layer],
            self._cache.v[layer],
            batch.page_table,
            batch.seq_lens,
            table_rows=batch.table_rows,
            static_launch=True,
        )
        if self._settings.verify:
            expected = torch_attention.decode(q, self._cache, layer, batch)
            error = relative_error(out, expected)
            if not error <= LIMIT[out.dtype]:
                raise RuntimeError(f"layer {layer}: tree attention is off by {error:g} of torch's")
        return out
