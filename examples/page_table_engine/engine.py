"""Continuous batching: requests join, decode together and leave; prefixes are computed once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from examples.page_table_engine import torch_attention
from examples.page_table_engine.adapter import engine_state, tree_decode
from examples.page_table_engine.cache import PagedCache, PagePool, page_keys
from examples.page_table_engine.decode_step import DecodeStep
from examples.page_table_engine.model import Llama

ATTENTIONS = ("tree", "torch")


@dataclass
class Request:
    """A text that grows by one token a step; `keys` are the keys of its full pages."""

    tokens: list[int]
    max_tokens: int
    row: int = -1
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class Engine:
    """Serves a Llama from a paged KV cache, greedily.

    Parameters
    ----------
    model : Llama
    num_pages, page_size : int
        Pages of the KV cache; one page is reserved for padding.
    max_batch : int
        Most requests that decode together.
    attention : str
        Attention of decode steps: ``tree``, or ``torch`` for plain PyTorch, query by query.

    Attributes
    ----------
    page_table : [max_batch, P] int32
        On the device; the row of each running request holds its pages by position.
    running : dict
        Decoding requests by id, in the order in which they joined.
    state : ServerState
        Counters of decode steps and of the KV that they read.
    """

    def __init__(
        self,
        model: Llama,
        *,
        num_pages: int = 512,
        page_size: int = 16,
        max_batch: int = 16,
        attention: str = "tree",
    ) -> None:
        if attention not in ATTENTIONS:
            raise ValueError(f"attention is {attention!r}; expected one of {', '.join(ATTENTIONS)}")
        if num_pages < 2 or page_size < 1 or max_batch < 1:
            raise ValueError(
                f"num_pages={num_pages}, page_size={page_size}, max_batch={max_batch}; expected "
                "at least 2, 1 and 1"
            )
        config = model.config
        self.model, self.pool = model, PagePool(num_pages)
        self._largest = min(config.max_tokens, (num_pages - 1) * page_size)
        self._cache = PagedCache(
            config.num_layers,
            num_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            model.dtype,
            model.device,
        )
        self.page_table = torch.zeros(
            (max_batch, -(-self._largest // page_size)), dtype=torch.int32, device=model.device
        )
        self.state = engine_state(model, attention)
        tree = None
        if attention == "tree":
            tree = tree_decode(config, self._cache, max_batch, self.page_table.shape[1], self.state)
        self._decode = DecodeStep(model, self._cache, self.page_table, tree, self.state)
        self._ids = count()
        self._rows = list(reversed(range(max_batch)))
        self._waiting: deque[tuple[int, Request]] = deque()
        self.running: dict[int, Request] = {}

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self.running

    def add(self, tokens: Sequence[int], max_new_tokens: int) -> int:
        """Queue a prompt; the returned id names its tokens in :meth:`step`.

        Raises
        ------
        ValueError
            If the prompt is empty, holds an invalid token, or could never run.
        """
        if not tokens or max_new_tokens < 1:
            raise ValueError(
                f"{len(tokens)} prompt tokens and {max_new_tokens} new ones; expected 1 or more"
            )
        vocab_size = self.model.config.vocab_size
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"token {token} in the prompt; expected 0 to {vocab_size - 1}")
        length = len(tokens) + max_new_tokens
        if length > self._largest:
            raise ValueError(
                f"{len(tokens)} prompt tokens and {max_new_tokens} new ones; model and KV cache "
                f"hold {self._largest}: ask for fewer, or raise num_pages"
            )
        request_id = next(self._ids)
        self._waiting.append((request_id, Request(list(tokens), length)))
        return request_id

    def abort(self, request_id: int) -> None:
        """Stop a waiting or running request; a request that has ended is ignored."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)
        if request_id in self.running:
            self._leave(request_id)

    def step(self) -> list[tuple[int, int]]:
        """Let waiting requests join, then decode a token for all; returns (id, new token) pairs."""
        new = []
        while self._waiting and self._join(*self._waiting[0]):
            request_id, request = self._waiting.popleft()
            new.append((request_id, self._prefill(request)))
            self._took(*new[-1])
        if self.running:
            batch = list(self.running.values())
            tokens = self._decode.run(
                [request.tokens[-1] for request in batch],
                [request.row for request in batch],
                [len(request.tokens) for request in batch],
            )
            for request_id, token in zip(list(self.running), tokens, strict=True):
                new.append((request_id, token))
                self._took(request_id, token)
        return new

    def _join(self, request_id: int, request: Request) -> bool:
        """Give a request a row, and pages for its longest context; False if there are too few."""
        size = self._cache.page_size
        # Always compute the last prompt token: its hidden state gives the first new token.
        request.keys = page_keys(request.tokens, size, (len(request.tokens) - 1) // size)
        matched = self.pool.match(request.keys)
        needed = -(-request.max_tokens // size) - len(matched)
        pages = self.pool.acquire(matched, needed) if self._rows else None
        if pages is None:
            return False
        request.pages, request.row = pages, self._rows.pop()
        request.keys = request.keys[: len(matched)]
        self.page_table[request.row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.running[request_id] = request
        return True

    def _prefill(self, request: Request) -> int:
        """Compute the prompt after its cached prefix; returns the first new token."""
        device, length = self.model.device, len(request.tokens)
        first = len(request.keys) * self._cache.page_size
        positions = torch.arange(first, length, device=device)
        table = self.page_table[request.row]
        slots = self._cache.slots(
            self.page_table, torch.full_like(positions, request.row), positions, positions >= 0
        )

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._cache.write(layer, slots, k, v)
            return torch_attention.attend(q, *self._cache.read(layer, table, length))

        tokens = torch.tensor(request.tokens[first:], device=device)
        hidden = self.model(tokens, positions, attend)
        return int(self.model.greedy(hidden[-1:]))

    def _took(self, request_id: int, token: int) -> None:
        """Append a token, publish pages that became full, and end the request if it is finished."""
        request = self.running[request_id]
        full = len(request.tokens) // self._cache.page_size  # the new token's KV is not written yet
        known = len(request.keys)
        request.keys = page_keys(request.tokens, self._cache.page_size, full, request.keys)
        for page, key in zip(request.pages[known:full], request.keys[known:], strict=True):
            self.pool.publish(page, key)
        request.tokens.append(token)
        if token == self.model.config.eos or len(request.tokens) == request.max_tokens:
            self._leave(request_id)

    def _leave(self, request_id: int) -> None:
        request = self.running.pop(request_id)
        self._rows.append(request.row)
        self.pool.release(request.pages)
