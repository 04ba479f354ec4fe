"""The rule ``measured`` of `auto`: the least time of a cut by measured costs.

The cost of a candidate in nanoseconds is the sum of these terms:

- ``slower(max(busy, alone), stored * transfer_ns)``. The items take ``busy``: they run in rounds,
  one item on each program. One item takes at least ``alone``. The GPU's memory takes
  ``transfer_ns`` for one token of all KV heads.
- For large tiles that need at most half of their programs: minus the share :data:`HIDDEN` of the
  first round of small tiles, which run at the same time. Later rounds wait: items that merge hold
  their programs until the large tiles are done. Each such large tile also has half an SM to
  itself, and takes only :data:`ALONE` of its time per token.
- Or for large tiles the share `even` of their time, if that is less. Long small items keep few
  programs busy, and large tiles run in the others.
- ``partial_ns`` for each partial result that chunks add. A large tile's range leaves one for each
  query even if it stays whole.
- For small tiles: the share :data:`EXPOSED` of the items' own cost, and the share :data:`UNEVEN` of
  the transfer if one round does not spread evenly over the SMs. Also the share :data:`TAIL` of a
  chunk's time, because programs do not end at the same time, and the share :data:`RAGGED` of what
  the longest item takes longer than the mean item.
- The merges. Small tiles merge up to :data:`~deft_backend.shapes.MAX_MERGED`
  results of large tiles, one after another. Stage 2 merges more than that, and the results of
  small tiles. Chunks of small tiles pay for its launch only if no small tile's range has several
  queries: such a range leaves results for stage 2 even if it stays whole.
"""

from typing import NamedTuple

import numpy as np

from deft_backend.costs.cost_model import FloatArray
from deft_backend.policies.grouping import Int64Array
from deft_backend.shapes import MAX_MERGED

# These shares come from sweeps of chunks on an H100 and an H200 (docs/kernel-log.md).

ALONE = 0.87
"""Time per token of a large tile with half an SM to itself, over its time next to another one."""

HIDDEN = 0.65
"""Share of the small tiles' first round in which large tiles run at no cost. It is less than 1:
while the memory is busy, the loads of a long item take about twice as long."""

EXPOSED = 0.35
"""Share of a small tile's ``item_ns`` that other items of the small tile do not hide."""

TAIL = 0.035
"""Share of the time of a small tile's longest chunk in which too few programs use the memory."""

RAGGED = 0.15
"""Share in which a small tile's longest item, as far as it is longer than the mean, keeps too few
programs busy."""

UNEVEN = 0.05
"""Weight of an uneven round of small tiles. Such a round loses this share of the transfer's time,
multiplied by the share by which the fullest SM holds more items than the average SM."""

ROUNDING = 1e-3
"""Subtracted before items per SM are rounded up, so that a whole number stays one in float32. Items
per SM are a multiple of 1 / SMs of the GPU, which is larger."""


class Cut(NamedTuple):
    """Ranges of one tile shape, cut into chunks of one length, for each of ``C`` lengths."""

    chunk: Int64Array  # [C]: most tokens of a chunk
    longest: int  # tokens of the longest range
    items: Int64Array  # [C]: a query tile and a chunk each
    read: int  # tokens that the items load
    stored: int  # tokens of the ranges
    results: Int64Array  # [C]: one for each query and chunk of the ranges that are cut
    cut_queries: Int64Array  # [C]: queries of those ranges
    most: Int64Array  # [C]: chunks of the range with most chunks


class ShapeCosts(NamedTuple):
    """Costs of one tile shape in nanoseconds, as in :class:`~deft_backend.costs.TileCosts`."""

    is_large: bool
    programs: int  # that run at once for each KV head
    sms: float  # SMs of the GPU for each KV head
    item_ns: float
    token_ns: float
    partial_ns: float
    reduce_ns: float
    transfer_ns: float  # in which the GPU's memory delivers one token of all KV heads
    beside: float  # about the time of the first round of small tiles
    even: float  # mean over longest range of the small tile, without empty ones; else 1
    is_reduced: bool  # whether stage 2 merges results of small tiles in any case


def exposed_share(busy: int, programs: int) -> float:
    """Share of a small tile's ``item_ns`` that others do not hide: :data:`EXPOSED` if all programs
    are busy, more if only `busy` of them are."""
    return 1.0 - (1.0 - EXPOSED) * busy / programs


def _slower(one: FloatArray, other: float) -> FloatArray:
    """About the larger of two times: 9 % more if they are equal, 0.05 % more at a ratio of two.

    If the work is hardly faster than the memory, the sum does not reach the memory's speed.
    """
    larger = np.maximum(one, other)
    share = np.minimum(one, other) / larger
    found: FloatArray = larger * (1.0 + share**8) ** 0.125
    return found


def cut_cost(cut: Cut, costs: ShapeCosts) -> FloatArray:
    """[C] expected nanoseconds of each cut; the module's docstring states the rule."""
    rounds = -(-cut.items // costs.programs)
    longest = np.minimum(cut.chunk, cut.longest)
    leaves_room = 2 * cut.items <= costs.programs
    token = costs.token_ns * np.where(costs.is_large & leaves_room, ALONE, 1.0)
    busy = rounds * (costs.item_ns + cut.read / cut.items * token)
    alone = costs.item_ns + longest * token
    transfer = cut.stored * costs.transfer_ns
    expected = _slower(np.maximum(busy, alone), transfer)
    if costs.is_large:
        hidden = np.minimum(expected, np.where(leaves_room, HIDDEN * costs.beside, 0.0))
        expected = np.minimum(expected * costs.even, expected - hidden)
        expected += (cut.results - cut.cut_queries) * costs.partial_ns
        merges = (cut.most - 1) * costs.reduce_ns / (2 * MAX_MERGED)
        merges = np.where(cut.most > MAX_MERGED, _reduced(cut, costs), merges)
    else:
        expected += cut.results * costs.partial_ns
        expected += EXPOSED * cut.items * costs.item_ns / costs.programs
        expected += TAIL * longest * costs.token_ns
        expected += RAGGED * np.maximum(0.0, longest - cut.read / cut.items) * costs.token_ns
        fullest = np.ceil(cut.items / costs.sms - ROUNDING) * costs.sms
        one_round = (costs.sms < cut.items) & (cut.items <= costs.programs)
        expected += np.where(one_round, UNEVEN * transfer * (fullest / cut.items - 1.0), 0.0)
        launch = costs.reduce_ns if costs.is_reduced else 0.0
        merges = np.where(cut.most > 1, _reduced(cut, costs) - launch, 0.0)
    found: FloatArray = expected + merges
    return found


def _reduced(cut: Cut, costs: ShapeCosts) -> FloatArray:
    found: FloatArray = costs.reduce_ns + cut.most * costs.reduce_ns / (16 * MAX_MERGED)
    return found


def cut_into(queries: Int64Array, tokens: Int64Array, tiles: Int64Array, chunk: Int64Array) -> Cut:
    """Cut ranges [R] of these queries, tokens and query tiles into chunks of `chunk` [C] tokens."""
    parts = np.maximum(1, -(-tokens // chunk[..., None]))  # [C, R]
    is_cut = parts > 1
    return Cut(
        chunk,
        longest=int(tokens.max(initial=0)),
        items=parts @ tiles,
        read=int(tiles @ tokens),
        stored=int(tokens.sum()),
        results=(is_cut * parts) @ queries,
        cut_queries=is_cut @ queries,
        most=parts.max(axis=-1, initial=1),
    )
