"""The paged KV cache and the users of its pages: equal prefixes lie in the same pages."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch

PADDING_PAGE = 0
"""The pool never hands out this page: padding requests write their keys and values here."""


class PagePool:
    """Pages with reference counts; the pool finds full pages again by their content.

    A page that no request uses keeps its content until the pool hands it out again. The pool hands
    out the page that was released first.
    """

    def __init__(self, num_pages: int) -> None:
        self._users = [0] * num_pages
        self._unused = dict.fromkeys(page for page in range(num_pages) if page != PADDING_PAGE)
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages that hold the longest known beginning of a chain of keys."""
        pages: list[int] = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def acquire(self, matched: Sequence[int], new: int) -> list[int] | None:
        """Add a user to the `matched` pages, and append `new` pages; None if there are too few."""
        if new > len(self._unused) - sum(page in self._unused for page in matched):
            return None
        for page in matched:
            self._unused.pop(page, None)
        fresh = [self._forget(page) for page in list(self._unused)[:new]]
        for page in (*matched, *fresh):
            self._users[page] += 1
        return [*matched, *fresh]

    def release(self, pages: Sequence[int]) -> None:
        """Remove a user; of a prefix, the pool hands out the end before the beginning."""
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} is released but not used"
            self._users[page] -= 1
            if self._users[page] == 0:
                self._unused[page] = None

    def publish(self, page: int, key: bytes) -> None:
        """Let other requests find a page that is now full and will not change while it is used."""
        if key not in self._page_of:  # computed twice: keep both pages, and find the first
            self._page_of[key] = page
            self._key_of[page] = key

    def _forget(self, page: int) -> int:
        del self._unused[page]
        if page in self._key_of:
            del self._page_of[self._key_of.pop(page)]
        return page


def page_keys(
    tokens: Sequence[int], page_size: int, num_pages: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of a text's first `num_pages` pages; each covers all tokens up to the page's end.

    `known` holds the first keys. A collision would give a wrong answer, so the keys are SHA-256.
    """
    keys = list(known)
    for index in range(len(keys), num_pages):
        content = array("q", tokens[index * page_size : (index + 1) * page_size]).tobytes()
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + content).digest())
    return keys


class PagedCache:
    """Keys and values of all layers: ``k[layer]`` is [pages, page_size, Hkv, D], as is ``v``."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_layers, num_pages, page_size, num_kv_heads, head_dim)
        self.k, self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size

    def slots(
        self, table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Slot [T] of the token at `positions` [T] of each row; in the padding page if not
        `valid`."""
        page = table[rows, positions // self.page_size].long()
        slot = page * self.page_size + positions % self.page_size
        return torch.where(valid, slot, PADDING_PAGE * self.page_size)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put `k`, `v` [T, Hkv, D] into `slots` [T] int64."""
        self.k[layer].flatten(0, 1)[slots] = k
        self.v[layer].flatten(0, 1)[slots] = v

    def read(self, layer: int, pages: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
        """Keys and values [length, Hkv, D] of the first tokens in `pages` [P] int."""
        used = pages[: -(-length // self.page_size)].long()
        return tuple(cache[layer][used].flatten(0, 1)[:length] for cache in (self.k, self.v))
