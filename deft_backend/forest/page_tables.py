"""PrefixForest from page tables: equal page id at equal position means equal prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deft_backend.forest.prefix_forest import ForestError, Int32Array, PrefixForest, build_forest


def forest_from_page_tables(
    page_tables: npt.ArrayLike,
    seq_lens: Sequence[int] | npt.NDArray[np.integer],
    page_size: int = 1,
    *,
    num_pages: int | None = None,
    check: bool = True,
) -> PrefixForest:
    """Group requests by the pages at the head of their page tables.

    Equality is monotone: two rows that hold the same page at some position hold the same pages at
    every position before it. Hence the common prefix of two rows is found by binary search, and
    no row is ever read whole. A page that a request fills only partly is never shared.

    Parameters
    ----------
    page_tables : [B, P] integer array
        Page ids; row ``b`` uses its first ``ceil(seq_lens[b] / page_size)`` entries, the rest may
        hold anything.
    seq_lens : [B] int
        Tokens of each request.
    page_size : int
        Tokens a page.
    num_pages : int, optional
        Pages in the KV cache; with it, `check` also refuses page ids beyond the cache.
    check : bool
        Refuse impossible tables. It reads every used entry; hosts whose tables are trusted pass
        False.

    Returns
    -------
    PrefixForest
        Subtrees are ordered by their first row in the batch, as in
        :func:`~deft_backend.forest.radix_tree.forest_from_paths`, so both agree array by array.

    Raises
    ------
    ForestError
        If shapes do not match, a row is shorter than its length needs, a used page id is negative
        or not below `num_pages`, or two rows agree at a position but not before it.
    """
    tables = np.asarray(page_tables)
    lens = np.asarray(seq_lens, dtype=np.int32)
    if lens.ndim != 1:
        raise ForestError(f"seq_lens has shape {lens.shape}; expected [batch]")
    if tables.size == 0 and not lens.size:
        tables = tables.reshape(0, 0)
    if tables.ndim != 2 or len(tables) != len(lens):
        raise ForestError(
            f"page_tables has shape {tables.shape}; expected [{len(lens)}, pages], a row a request"
        )
    if tables.dtype.kind not in "iu":
        raise ForestError(f"page_tables has dtype {tables.dtype}; expected an integer dtype")
    if page_size < 1:
        raise ForestError(f"page_size is {page_size}; expected at least 1 token a page")
    if check:
        _check_tables(tables, lens, page_size, num_pages)

    full = np.maximum(lens, 0) // page_size
    order, shared = _sort_rows(tables, full.astype(np.int32))
    if check:
        _check_monotone(tables, order, shared, full)
    return build_forest(order, shared * page_size, lens, page_size)


def _sort_rows(tables: npt.NDArray[np.integer], full: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Permutation that puts sharers side by side and the full pages that neighbours share."""
    batch = len(full)
    order: list[int] = []
    shared = np.zeros(max(0, batch - 1), dtype=np.int32)
    # A group is a set of rows (ascending) that agree on the first `pages` pages. Groups are taken
    # from a stack in depth-first order; neighbours of different groups share the pages of the
    # group that was split, recorded at the seam.
    stack: list[tuple[Int32Array, int, int]] = []  # rows, agreed pages, shared with predecessor
    if batch:
        stack.append((np.arange(batch, dtype=np.int32), 0, 0))
    while stack:
        rows, pages, seam = stack.pop()
        if order:
            shared[len(order) - 1] = seam
        if len(rows) == 1:
            order.append(int(rows[0]))
            continue
        parts = _split(tables, rows, pages, full)
        for part, agreed in reversed(parts[1:]):
            stack.append((part, agreed, pages))
        first, agreed = parts[0]
        if len(parts) == 1 and agreed == pages:
            raise AssertionError("a group that cannot be split must have ended")  # pragma: no cover
        stack.append((first, agreed, seam))
    return np.array(order, dtype=np.int32), shared


def _split(
    tables: npt.NDArray[np.integer], rows: Int32Array, pages: int, full: Int32Array
) -> list[tuple[Int32Array, int]]:
    """Split rows that agree on `pages` pages by their next page; rows that end stand alone.

    Each part comes with the number of pages on which all of it agrees.
    """
    going_on = full[rows] > pages
    parts: list[tuple[Int32Array, int]] = [
        (rows[i : i + 1], int(pages)) for i in np.flatnonzero(~going_on)
    ]
    rest = rows[going_on]
    if len(rest):
        _, label = np.unique(tables[rest, pages], return_inverse=True)
        by_label = np.argsort(label, kind="stable")
        cuts = np.flatnonzero(np.diff(label[by_label])) + 1
        for members in np.split(rest[by_label], cuts):
            agreed = _agreement(tables, members, pages + 1, full) if len(members) > 1 else pages
            parts.append((members, agreed))
    parts.sort(key=lambda part: int(part[0][0]))  # subtrees by their first row in the batch
    return parts


def _agreement(
    tables: npt.NDArray[np.integer], rows: Int32Array, known: int, full: Int32Array
) -> int:
    """Pages on which all `rows` agree, given that they agree on the first `known`."""
    low, high = known, int(full[rows].min())
    while low < high:  # invariant: agree on the first `low`; not known beyond
        middle = (low + high + 1) // 2
        column = tables[rows, middle - 1]
        if (column == column[0]).all():
            low = middle
        else:
            high = middle - 1
    return low


def _check_tables(
    tables: npt.NDArray[np.integer],
    lens: Int32Array,
    page_size: int,
    num_pages: int | None,
) -> None:
    if lens.size and lens.min() < 0:
        row = int(lens.argmin())
        raise ForestError(f"seq_lens[{row}] is {lens[row]}; expected a length of 0 or more")
    used = -(-lens.astype(np.int64) // page_size)
    if used.size and used.max() > tables.shape[1]:
        row = int(used.argmax())
        raise ForestError(
            f"request {row} holds {lens[row]} tokens, {used[row]} pages of {page_size}, but its "
            f"page table has {tables.shape[1]} entries; pass a table of at least {used[row]}"
        )
    in_use = np.arange(tables.shape[1])[None, :] < used[:, None]
    bad = in_use & (tables < 0)
    limit = ""
    if num_pages is not None:
        bad |= in_use & (tables >= num_pages)
        limit = f" and below {num_pages}, the pages in the cache"
    if bad.any():
        row, at = (int(x) for x in np.argwhere(bad)[0])
        raise ForestError(
            f"page_tables[{row}, {at}] is {tables[row, at]}; expected a page id of 0 or more{limit}"
        )


def _check_monotone(
    tables: npt.NDArray[np.integer],
    order: Int32Array,
    shared: Int32Array,
    full: npt.NDArray[np.integer],
) -> None:
    """Refuse neighbours whose tables agree somewhere beyond, or differ within, what they share."""
    rows = order.tolist()
    for left, right, pages in zip(rows[:-1], rows[1:], shared.tolist(), strict=True):
        head = tables[left, :pages] != tables[right, :pages]
        stop = int(min(full[left], full[right]))
        tail = tables[left, pages:stop] == tables[right, pages:stop]
        at = int(head.argmax()) if head.any() else pages + int(tail.argmax()) if tail.any() else -1
        if at >= 0:
            raise ForestError(
                f"requests {left} and {right} hold the same page at one position and different "
                f"pages before it (around position {at}); a page belongs to one prefix only"
            )
