"""The decode step: static buffers, and on a GPU one captured CUDA graph for each batch size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deft_backend.telemetry.counters import DECODE, Decoded
from deft_backend.telemetry.state import ServerState
from examples.page_table_engine import torch_attention
from examples.page_table_engine.adapter import TreeDecode
from examples.page_table_engine.cache import PagedCache
from examples.page_table_engine.model import Llama
from examples.page_table_engine.torch_attention import DecodeBatch


class DecodeStep:
    """Decodes one token for each request of a batch.

    Everything here runs on one stream. So a write to a row of `page_table` for a new request waits
    for the step that still reads the row. That is this engine's fence.

    Parameters
    ----------
    model : Llama
    cache : PagedCache
    page_table : [max_batch, P] int32
        On the device; the engine writes it when a request joins.
    tree : TreeDecode, optional
        Tree attention; without it, torch attends query by query.
    state : ServerState
        Counts the steps of torch's attention.
    """

    def __init__(
        self,
        model: Llama,
        cache: PagedCache,
        page_table: torch.Tensor,
        tree: TreeDecode | None,
        state: ServerState,
    ) -> None:
        self._model, self._cache, self._tree, self._state = model, cache, tree, state
        self._page_table = page_table
        max_batch = len(page_table)
        # Tokens, table rows and lengths in one tensor, so that a step makes one copy to the device.
        self._inputs = torch.zeros((3, max_batch), dtype=torch.int64, device=model.device)
        self.sizes = [1 << n for n in range((max_batch - 1).bit_length())] + [max_batch]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        if tree is not None:
            if model.device.type == "cuda" and tree.capturable:
                self._capture(tree)
            tree.start_counting()

    def run(self, tokens: Sequence[int], rows: Sequence[int], lens: Sequence[int]) -> list[int]:
        """The next token of each request.

        Parameters
        ----------
        tokens, rows, lens : [n] int
            Last tokens, page-table rows, and lengths including the last token.
        """
        size = next(size for size in self.sizes if size >= len(tokens))
        padding = [0] * (size - len(tokens))  # length 0 marks padding
        inputs = [[*given, *padding] for given in (tokens, rows, lens)]
        self._inputs[:, :size].copy_(torch.tensor(inputs))
        tree = self._tree
        reason = "no tree attention" if tree is None else tree.refuses(size)
        self._state.count(Decoded(DECODE, len(lens), sum(lens)), reason)
        if size in self._graphs:
            graph, out = self._graphs[size]
            graph.replay()
        else:
            out = self._forward(size)
        return out[: len(tokens)].tolist()

    def _batch(self, size: int) -> DecodeBatch:
        _, rows, lens = self._inputs[:, :size]
        return DecodeBatch(self._page_table, rows, lens)

    def _forward(self, size: int) -> torch.Tensor:
        batch = self._batch(size)
        positions = (batch.seq_lens - 1).clamp(min=0)
        slots = self._cache.slots(batch.page_table, batch.table_rows, positions, batch.seq_lens > 0)
        tree = self._tree
        if tree is not None and tree.refuses(size) is not None:
            tree = None
        if tree is not None:
            tree.plan(batch)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # Write before attention: a query attends to its own token.
            self._cache.write(layer, slots, k, v)
            if tree is not None:
                return tree.run(layer, q, batch)
            return torch_attention.decode(q, self._cache, layer, batch)

        hidden = self._model(self._inputs[0, :size], positions, attend)
        return self._model.greedy(hidden)

    def _capture(self, tree: TreeDecode) -> None:
        """Capture one graph for each batch size of tree attention, with a batch of padding only."""
        pool = torch.cuda.graph_pool_handle()
        for size in [s for s in reversed(self.sizes) if tree.refuses(s) is None]:
            self._forward(size)  # libraries initialise themselves in their first call
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                out = self._forward(size)
            self._graphs[size] = (graph, out)
