"""PrefixForest from page tables: equal page id at equal position means equal prefix."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deft_backend.forest.prefix_forest import (
    ForestError,
    Int32Array,
    PrefixForest,
    build_forest,
    int32,
)
from deft_backend.forest.prefix_tree import insert_rows, order_of_tree


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
    every position before it. So a prefix tree compares two rows by one or two page ids for each
    level, without reading whole rows (see ``forest/prefix_tree.py``). A page that a request fills
    only partly is never shared.

    Parameters
    ----------
    page_tables : [B, P] integer array
        Page ids. Row ``b`` uses its first ``ceil(seq_lens[b] / page_size)`` entries; the rest may
        hold anything.
    seq_lens : [B] int
        Tokens of each request.
    page_size : int
        Tokens a page.
    num_pages : int, optional
        Pages in the KV cache; with it, `check` also refuses page ids beyond the cache.
    check : bool
        Refuse impossible tables; this reads every used entry. Pass False for tables that you trust.

    Returns
    -------
    PrefixForest
        Subtrees are ordered by their first request in the batch.
        :func:`~deft_backend.forest.radix_tree.forest_from_paths` uses the same order, so both give
        equal arrays.

    Raises
    ------
    ForestError
        If shapes do not match, a length is no integer of 32 bits or negative, or a row is shorter
        than its full pages need.
        With `check`, also in these cases: a row is shorter than its last page needs; a used page id
        is negative or not below `num_pages`; two rows agree at a position but not before it.
    """
    tables = np.asarray(page_tables)
    lens = int32(seq_lens, "seq_lens")
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
    if full.size and full.max() > tables.shape[1]:
        raise _too_short(tables, lens, page_size, int(full.argmax()))
    order, shared = order_of_tree(insert_rows(tables, full))
    if check:
        _check_monotone(tables, order, shared, full)
    return build_forest(order, shared * page_size, lens, page_size)


def _check_tables(
    tables: npt.NDArray[np.integer], lens: Int32Array, page_size: int, num_pages: int | None
) -> None:
    if lens.size and lens.min() < 0:
        row = int(lens.argmin())
        raise ForestError(f"seq_lens[{row}] is {lens[row]}; expected a length of 0 or more")
    used = -(-lens.astype(np.int64) // page_size)
    if used.size and used.max() > tables.shape[1]:
        raise _too_short(tables, lens, page_size, int(used.argmax()))
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


def _too_short(
    tables: npt.NDArray[np.integer], lens: Int32Array, page_size: int, row: int
) -> ForestError:
    used = -(-int(lens[row]) // page_size)
    return ForestError(
        f"request {row} holds {lens[row]} tokens, {used} pages of {page_size}, but its "
        f"page table has {tables.shape[1]} entries; pass a table of at least {used}"
    )


def _check_monotone(
    tables: npt.NDArray[np.integer], order: Int32Array, shared: Int32Array, full: Int32Array
) -> None:
    """Refuse neighbours whose tables differ within their shared pages or agree beyond them."""
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
