"""The adapter: what stands between this engine and ``deft_backend``, and nothing else does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

import deft_backend
from deft_backend.attention import TreeAttention
from deft_backend.config import LOG_LEVELS, Settings, warn_unknown
from deft_backend.explain.loads import count_plan_loads
from deft_backend.forest import forest_from_page_tables
from deft_backend.hosts.common.warm_up import StepTensors, warm_up_attention
from deft_backend.planner.on_device import largest_batch
from deft_backend.reference_attention import relative_error
from deft_backend.telemetry.state import ServerState
from examples.page_table_engine import torch_attention
from examples.page_table_engine.cache import PagedCache
from examples.page_table_engine.model import Llama, LlamaConfig
from examples.page_table_engine.torch_attention import DecodeBatch

logger = logging.getLogger("deft_backend")

LIMIT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of ``DEFT_VERIFY``: the largest relative error allowed."""


def engine_state(model: Llama, attention: str) -> ServerState:
    """Counters at zero. A server has a port and hands its state to a ``StateWriter``."""
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
    """Tree attention for this engine, ready for the first request; None with a log line if not.

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
    """Why tree attention cannot decode for this engine, in one line, or None.

    A host with layers of other kinds (sliding windows, sinks, MLA, a quantised cache) asks this of
    each layer; here all are alike, and ``LlamaConfig.read`` has refused what is not a plain Llama.
    """
    if settings.policy == "auto" and max_batch > largest_batch():
        return f"batches of {max_batch} requests; plans made on the device hold {largest_batch()}"
    return TreeAttention.unsupported(
        config.num_query_heads, config.num_kv_heads, config.head_dim, cache.k.dtype, cache.k.device
    )


class TreeDecode:
    """Decode steps through :class:`TreeAttention`: prepared on the host, planned, run by layer.

    With the policy ``auto`` a plan is launches alone, part of every step and of its graph; the
    host never learns it. Other policies plan on the host, when the batch's composition changes.
    """

    def __init__(
        self, config: LlamaConfig, cache: PagedCache, max_batch: int, table_columns: int,
        state: ServerState, settings: Settings,
    ) -> None:  # fmt: skip
        self._cache, self._state, self._settings = cache, state, settings
        self._on_device = settings.policy == "auto"
        self._planned: tuple[int, ...] = ()
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
        warm_up_attention(self._attention, tensors, on_device=self._on_device)
        self._attention.clear_plan()  # graphs are captured for batches that no plan was made for
        self.capturable = not settings.verify
        logger.info("deft: decode goes through tree attention (policy %s)", settings.policy)

    def refuses(self, size: int) -> str | None:
        """Why steps padded to `size` skip the tree, or None; a graph holds one answer."""
        least = self._settings.min_batch
        return None if size >= least else f"batch smaller than DEFT_MIN_BATCH={least}"

    def start_counting(self) -> None:
        """From now on, so that what was planned to warm up and to capture is not counted."""
        if self._on_device:
            counters = self._attention.device_planner.counters
            self._state.attach_device_counters(counters.numpy())

    def prepare(self, requests: Sequence[int], lens: Sequence[int], batch: DecodeBatch) -> None:
        """Before each step, outside its graph: the host planner's turn, if it is the planner.

        Parameters
        ----------
        requests, lens : [n] int
            Ids of the step's requests, never given out twice, and their tokens.
        batch : DecodeBatch
            The step; its rows from n on are padding.
        """
        if self._on_device:
            return
        if self._planned != tuple(requests):
            self._planned = ()
            table = batch.page_table[batch.table_rows[: len(lens)]].cpu().numpy()
            self._attention.plan(
                forest_from_page_tables(table, lens, self._cache.page_size, check=False)
            )
            self._planned = tuple(requests)
            self._state.plans += 1
        plan, attention = self._attention.last_plan, self._attention
        assert plan is not None
        loads = count_plan_loads(
            plan, lens, num_query_heads=attention.num_query_heads,
            num_kv_heads=attention.num_kv_heads, head_dim=attention.head_dim,
        )  # fmt: skip
        self._state.count_tree(sum(lens), loads.kv_tokens, self._state.num_layers)

    def plan(self, batch: DecodeBatch) -> None:
        """First launches of a step, recorded into its graph: the device planner's turn."""
        if self._on_device:
            self._attention.plan_on_device(
                batch.page_table, batch.seq_lens, table_rows=batch.table_rows
            )

    def run(self, layer: int, q: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One layer's attention [B, Hq, D] of `q` [B, Hq, D]; its keys and values are written.

        Raises
        ------
        RuntimeError
            Under ``DEFT_VERIFY``, if torch's attention gives something else.
        """
        out = self._attention.run(
            q, self._cache.k[layer], self._cache.v[layer], batch.page_table, batch.seq_lens,
            table_rows=batch.table_rows, static_launch=True,
        )  # fmt: skip
        if self._settings.verify:
            expected = torch_attention.decode(q, self._cache, layer, batch)
            error = relative_error(out, expected)
            if not error <= LIMIT[out.dtype]:
                raise RuntimeError(f"layer {layer}: tree attention is off by {error:g} of torch's")
        return out
