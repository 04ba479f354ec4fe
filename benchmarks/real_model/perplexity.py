"""Perplexity of a text, token by token through decode attention: tree attention's and PyTorch's.

Continuations of one text share its beginning. Each decode step feeds every continuation its next
token of the text and adds up the log-probability of the token behind it. So every token's
attention is a decode step over a shared prefix, as in a server.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from deft_backend import TreeAttention
from examples.page_table_engine.cache import PagedCache
from examples.page_table_engine.model import Llama
from examples.page_table_engine.torch_attention import attend

PAGE_SIZE = 16
HOST = "pytorch"
"""PyTorch's own attention, query by query: what the example host decodes with."""


@dataclass(frozen=True)
class Text:
    """Token ids: a shared beginning, and continuations of equal length."""

    shared: list[int]
    continuations: list[list[int]]

    @property
    def tokens(self) -> int:
        """Tokens whose probability counts."""
        return sum(len(each) for each in self.continuations)


def python_manual() -> str:
    """The language reference that comes with every Python: about 700,000 characters of prose."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def cut(ids: Sequence[int], shared: int, continuations: int, length: int) -> Text:
    """A shared beginning of `ids`, and the next pieces of `length` tokens behind it.

    Raises
    ------
    ValueError
        If the text is too short.
    """
    needed = shared + continuations * length
    if len(ids) < needed:
        raise ValueError(f"the text has {len(ids)} tokens; expected at least {needed}")
    starts = range(shared, needed, length)
    return Text(list(ids[:shared]), [list(ids[at : at + length]) for at in starts])


class Decoder:
    """Feeds the continuations of a text through a model, one token of each in a step."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, text: Text) -> None:
        self._model, self._text = Llama(folder, dtype, device), text
        config = self._model.config
        batch, length = len(text.continuations), len(text.continuations[0])
        full = len(text.shared) // PAGE_SIZE  # only full pages are shared
        own = -(-(len(text.shared) + length) // PAGE_SIZE) - full
        shared_pages = torch.arange(full, dtype=torch.int32)
        own_pages = full + torch.arange(batch * own, dtype=torch.int32).view(batch, own)
        self._table = torch.cat([shared_pages.expand(batch, full), own_pages], 1).to(device)
        self._cache = PagedCache(
            config.num_layers,
            full + batch * own,
            PAGE_SIZE,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            device,
        )
        self._rows = torch.arange(batch, device=device)
        self._targets = torch.tensor(text.continuations, device=device)
        self._prefill()

    def _prefill(self) -> None:
        """Keys and values of the shared beginning, in the pages of every continuation."""
        device, length = self._model.device, len(self._text.shared)
        positions = torch.arange(length, device=device)
        valid = positions >= 0

        def run(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for row in range(len(self._rows)):
                slots = self._cache.slots(
                    self._table, torch.full_like(positions, row), positions, valid
                )
                self._cache.write(layer, slots, k, v)
            return attend(q, k, v)

        hidden = self._model(torch.tensor(self._text.shared, device=device), positions, run)
        self._first = hidden[-1:].expand(len(self._rows), -1)

    def perplexity(self, attention: TreeAttention | None) -> float:
        """Of all continuations' tokens; None: PyTorch's attention."""
        total = self._log_probs(self._first, 0)
        for step in range(self._targets.shape[1] - 1):
            length = len(self._text.shared) + step + 1
            lens = torch.full_like(self._rows, length, dtype=torch.int32)
            positions = torch.full_like(self._rows, length - 1)
            slots = self._cache.slots(self._table, self._rows, positions, positions >= 0)
            if attention is not None:
                attention.plan_on_device(self._table, lens)

            def run(
                layer: int,
                q: torch.Tensor,
                k: torch.Tensor,
                v: torch.Tensor,
                lens: torch.Tensor = lens,
                slots: torch.Tensor = slots,
                length: int = length,
            ) -> torch.Tensor:
                self._cache.write(layer, slots, k, v)
                if attention is None:
                    return self._torch(layer, q, length)
                keys, values = self._cache.k[layer], self._cache.v[layer]
                return attention.run(q, keys, values, self._table, lens)

            hidden = self._model(self._targets[:, step], positions, run)
            total += self._log_probs(hidden, step + 1)
        return math.exp(-total / self._text.tokens)

    def _torch(self, layer: int, q: torch.Tensor, length: int) -> torch.Tensor:
        """PyTorch's attention over each continuation's own copy of its context."""
        pages = self._table[:, : -(-length // PAGE_SIZE)].long()
        keys, values = (
            cache[layer][pages].flatten(1, 2)[:, :length].transpose(1, 2)
            for cache in (self._cache.k, self._cache.v)
        )
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    def _log_probs(self, hidden: torch.Tensor, step: int) -> float:
        """Sum of the log-probabilities of every continuation's token number `step`."""
        scores = F.linear(hidden, self._model.output_weight).float().log_softmax(-1)
        return float(scores.gather(1, self._targets[:, step, None]).sum())

    def attention(self, policy: str) -> TreeAttention:
        """Tree attention of the model's shape."""
        config = self._model.config
        return TreeAttention(
            num_query_heads=config.num_query_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._model.dtype,
            device=self._model.device,
            page_size=PAGE_SIZE,
            max_batch=len(self._rows),
            policy=policy,
        )
