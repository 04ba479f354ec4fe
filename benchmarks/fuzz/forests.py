"""Random forests as page tables, each from one seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

KINDS = ("neighbours", "one tree", "unshared", "equal", "chain", "deep", "copies", "mixed")
"""How requests share:

- ``neighbours``: each shares a random length with the one before it.
- ``one tree``: all share a first prefix.
- ``equal``: groups of requests with the same full pages.
- ``chain``: each goes on where the one before it ends.
- ``copies``: each page of a prefix is one of two copies of it, so equality is not monotone.
- ``deep``: each level is a page or two.
- ``mixed``: several of these side by side.
"""

BEYOND = (1 << 30, -1, -(1 << 31), 0x7FFFFFFF)
"""Page ids in the entries that no request uses."""


@dataclass(frozen=True)
class Limits:
    """The largest batch, the longest request in tokens, and the pages to choose from."""

    requests: int
    tokens: int
    pages: int


@dataclass(frozen=True, eq=False)
class RandomBatch:
    """A batch as a host holds it.

    - `page_table`: [rows, P] int32. Page ids. A row's entries beyond its request's last page are
      not valid page ids.
    - `rows`: [B] int32. Row of each request.
    - `seq_lens`: [B] int32. Tokens of each request, after its growth.
    - `growth`: tokens by which every request has grown since the batch was planned.
    - `twins`: [2, N] int32. Pages in two copies: both of a column hold the same tokens. If there
      are any, rows that agree at a position may differ before it. vLLM makes such batches.
    """

    page_table: Int32Array
    rows: Int32Array
    seq_lens: Int32Array
    growth: int
    page_size: int
    twins: Int32Array

    @property
    def planned_lens(self) -> Int32Array:
        """Tokens of each request when the batch was planned."""
        return np.maximum(self.seq_lens - self.growth, 0).astype(np.int32)

    @property
    def monotone(self) -> bool:
        """Whether rows that agree at a position also agree before it."""
        return bool(self.twins.shape[1] == 0)

    @property
    def contents(self) -> Int32Array:
        """The page table with the first copy in place of the second."""
        if self.monotone:
            return self.page_table
        table = self.page_table.copy()
        order = np.argsort(self.twins[1])
        second = self.twins[1][order]
        at = np.minimum(np.searchsorted(second, table), len(second) - 1)
        return np.where(second[at] == table, self.twins[0][order][at], table).astype(np.int32)

    @property
    def requests(self) -> int:
        return len(self.seq_lens)


def draw_batch(
    random: np.random.Generator,
    page_size: int,
    limits: Limits,
    *,
    grown: bool = False,
    twins: bool = False,
    drafted: int = 0,
) -> RandomBatch:
    """A batch of random kind, size and lengths.

    - `grown`: whether requests may have grown since the plan. The device planner plans in every
      step, so its batches have not.
    - `twins`: whether pages may come in two copies.
    - `drafted`: tokens that every request has at its end, on pages of its own: drafted tokens are
      nobody else's.
    """
    while True:
        pages = _Pages(random, limits.pages)
        found = _draw(random, page_size, limits, pages, grown, twins, drafted)
        if pages.unique:
            return found


def _draw(
    random: np.random.Generator,
    page_size: int,
    limits: Limits,
    pages: _Pages,
    grown: bool,
    twins: bool,
    drafted: int,
) -> RandomBatch:
    kind = str(random.choice(KINDS if twins else [name for name in KINDS if name != "copies"]))
    most = int(2 ** random.uniform(0, np.log2(limits.requests)))
    parts: list[tuple[str, int]] = [(kind, max(1, most))]
    if kind == "mixed":
        others = [str(name) for name in random.choice(KINDS[: -1 if twins else -2], size=3)]
        parts = [(name, max(1, most // 3)) for name in others]
    growth = int(random.choice([0, 0, 1, page_size, 33])) if grown else 0
    copied = [np.zeros((2, 0), dtype=np.int32)]
    held: list[Int32Array] = []
    lens: list[int] = []
    for name, count in parts:
        for row, tail in _requests(random, name, count, page_size, limits, pages, copied):
            used = min(len(row) * page_size + tail, limits.tokens - growth - drafted)
            lens.append(used)
            held.append(row[: used // page_size])
    table, rows, now = _laid_out(random, held, lens, drafted + growth, page_size, pages)
    return RandomBatch(table, rows, now, growth, page_size, np.concatenate(copied, axis=1))


def _requests(
    random: np.random.Generator,
    kind: str,
    count: int,
    page_size: int,
    limits: Limits,
    pages: _Pages,
    copied: list[Int32Array],
) -> list[tuple[Int32Array, int]]:
    """Shared and own full pages of each request, and the tokens that it holds beyond them."""
    most_pages = max(1, limits.tokens // page_size)
    lengths = [n for n in (1, 2, 5, 17, 60, 250, 1000, 8000) if n <= most_pages] or [1]
    if kind in {"deep", "chain"}:
        lengths = lengths[:2]
    row: Int32Array = np.zeros(0, dtype=np.int32)
    found: list[tuple[Int32Array, int]] = []
    most = int(random.choice(lengths)) if kind == "copies" else 0
    twins = np.stack((pages.take(most), pages.take(most)))
    copied.append(twins)
    for number in range(count):
        own = int(random.integers(0, int(random.choice(lengths)) + 1))
        if kind == "unshared":
            shared = 0
        elif kind == "one tree":
            shared = int(random.choice(lengths)) if number == 0 else len(found[0][0]) // 2
            row = found[0][0] if number else pages.take(shared * 2)
        elif kind == "chain":
            shared = len(row) if random.random() < 0.95 else 0
        elif kind == "deep":
            shared = max(0, len(row) - int(random.integers(0, 3)))
        elif kind == "equal":
            shared, own = (len(row), 0) if number and random.random() < 0.7 else (0, own)
        elif kind == "copies":
            shared, own = 0, 0
        else:
            shared = min(len(row), int(random.choice([0, *lengths])))
        if kind == "copies":
            length = int(random.integers(0, most + 1))
            row = np.where(random.random(length) < 0.5, twins[0, :length], twins[1, :length])
        else:
            row = np.concatenate((row[:shared], pages.take(own)))[:most_pages]
        tail = int(
            random.choice([0, 1, page_size - 1, int(random.integers(0, 2 * page_size + 30))])
        )
        found.append((row.astype(np.int32), tail))
    return found


class _Pages:
    """Page ids in scattered order. When all are taken, they come again, and `unique` is false.

    - `count`: Pages; a power of two, so that every odd step visits each page once.
    """

    def __init__(self, random: np.random.Generator, count: int) -> None:
        self._count = count
        self._step = 2 * int(random.integers(0, count)) + 1
        self._next = int(random.integers(0, count))
        self.taken = 0

    @property
    def unique(self) -> bool:
        """Whether no page was taken twice."""
        return self.taken <= self._count

    def take(self, count: int) -> Int32Array:
        at = self._next + np.arange(count, dtype=np.int64)
        self._next += count
        self.taken += count
        return (at * self._step % self._count).astype(np.int32)


def _laid_out(
    random: np.random.Generator,
    held: list[Int32Array],
    lens: list[int],
    added: int,
    page_size: int,
    pages: _Pages,
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Rows in random places of a page table whose other entries are no page ids."""
    batch = len(held)
    now = np.array(lens, dtype=np.int32)
    now = np.where(now > 0, now + added, 0).astype(np.int32)
    needed = -(-now.astype(np.int64) // page_size)
    width = int(needed.max(initial=0)) + int(random.integers(1, 4))
    rows = random.permutation(batch + int(random.integers(0, 4)))[:batch].astype(np.int32)
    table = random.choice(np.array(BEYOND), size=(int(rows.max(initial=0)) + 1, width))
    table = table.astype(np.int32)
    for row, full, pages_needed in zip(rows, held, needed, strict=True):
        table[row, : len(full)] = full
        table[row, len(full) : pages_needed] = pages.take(int(pages_needed) - len(full))
    return table, rows, now
