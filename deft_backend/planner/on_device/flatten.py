"""Device planner for `deft-flatten`: the flattened forest in even chunks, by tensor operations.

The policy (``policies/deft_flatten.py``) and its items (``planner/reference.py``). The
first three kernels find the nodes; scans and sorts do the rest. Their sizes are the plan's
capacities, so the CPU needs no count, and a CUDA graph can hold them.

No walk is needed. In depth-first order, the request at a place adds those tokens of its context to
the flattened forest that it does not share with the request before it. So a sum over the places
before gives where a node or a leaf begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from deft_backend.planner.device_plan import DevicePlan
from deft_backend.planner.encoding import DIRECT, ITEM_ORDER, MERGES, OPEN_END, SPAN_SHIFT
from deft_backend.planner.on_device.arrays import Nodes, Scratch
from deft_backend.planner.plan import PlanCapacity
from deft_backend.policies import DeftFlatten, Target
from deft_backend.shapes import MAX_ITEM_TOKENS, MAX_MERGED

SMALL, LARGE, MASKED = range(3)
_LAST = 1 << 62


class Lists(NamedTuple):
    """Lists of children, one behind the other, in arrays of a fixed size."""

    parent: torch.Tensor
    at: torch.Tensor  # the child's number among its parent's children
    there: torch.Tensor  # whether the array holds a child here
    before: torch.Tensor  # [parents]: children of the parents before


class Elements(NamedTuple):
    """Nodes and leaves in the order of the flattened forest; requests alone behind them."""

    there: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    first: torch.Tensor  # place of the first query
    queries: torch.Tensor
    is_leaf: torch.Tensor
    flat: torch.Tensor  # tokens of the flattened forest before it


def _lists(counts: torch.Tensor, size: int) -> Lists:
    ends = counts.cumsum(0)
    child = torch.arange(size, device=counts.device)
    parent = torch.searchsorted(ends, child, right=True).clamp(max=len(counts) - 1)
    before = ends - counts
    return Lists(parent, child - before[parent], child < ends[-1], before)


def _blocks(
    elements: Elements, chunk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First and last chunk of each element, and the number of chunks: ``[1]`` or ``[C, 1]``.

    A rest of less than half a chunk joins the last chunk.
    """
    stop = elements.flat + elements.end - elements.begin
    tokens = (stop * elements.there).amax()
    count = ((2 * tokens + chunk) // (2 * chunk)).clamp(min=1)
    last = torch.minimum((stop - 1).clamp(min=0) // chunk, count - 1)
    return torch.minimum(elements.flat // chunk, last), last, count


def _sums(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """[size]: the sums of the values that have each index."""
    return torch.zeros(size, dtype=torch.int64, device=index.device).scatter_add_(0, index, values)


def _before(values: torch.Tensor) -> torch.Tensor:
    return values.cumsum(0) - values


@dataclass(frozen=True)
class Flattener:
    """Plans `deft-flatten` behind the first three kernels of the device planner."""

    plan: DevicePlan  # where plans go
    scratch: Scratch  # what the kernels found
    policy: DeftFlatten
    room: PlanCapacity  # what the plan may take of its arrays

    def write(
        self, target: Target, batch: int, table_rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the plan of a batch of so many queries; returns tokens of context and loads."""
        order = self.scratch.order[:batch].long()
        request = order // target.query_blocks
        length = seq_lens.long()[request]
        elements, chunk, alone = self._elements(target, batch, length)
        # Slices: what each chunk holds of each element. Without room, each request is a chunk.
        begin, last, _ = _blocks(elements, chunk)
        number = elements.there.long().cumsum(0) - 1
        last = torch.where(alone, number, last)
        begin = torch.minimum(torch.where(alone, number, begin), last)
        capacity = self.plan.capacity
        chunks = max(capacity.max_items, batch)
        slices = _lists((last - begin + 1) * elements.there, 2 * batch + capacity.max_items)
        element = slices.parent
        of_chunk = begin[element] + slices.at
        shift = elements.begin[element] - elements.flat[element]
        start = torch.maximum(of_chunk * chunk + shift, elements.begin[element])
        end = elements.end[element]
        end = torch.where(of_chunk < last[element], (of_chunk + 1) * chunk + shift, end)
        start = torch.where(alone, elements.begin[element], torch.minimum(start, end))
        end = torch.where(alone, elements.end[element], end)
        is_open = elements.is_leaf[element] & (of_chunk == last[element])
        of_chunk = of_chunk.masked_fill(~slices.there, chunks)
        first, stop = elements.first[element], (elements.first + elements.queries)[element]

        # Chunks, and the tiles that their queries fill.
        held = _sums(slices.there.long(), of_chunk, chunks + 1)
        from_query = first[_before(held).clamp(max=len(first) - 1)]
        to_query = torch.zeros_like(held).scatter_reduce_(0, of_chunk, stop, "amax")
        queries = (to_query - from_query) * (held > 0)
        queries[-1:].zero_()
        several = held > 1
        fits = torch.full_like(held, target.largest_tile)
        fits.masked_fill_(several, target.tile_queries[MASKED])
        num_tiles = (queries + fits - 1) // fits
        tiles = _lists(num_tiles, capacity.max_items)
        c = tiles.parent
        tile_from = from_query[c] + tiles.at * queries[c] // num_tiles[c].clamp(min=1)
        tile_to = from_query[c] + (tiles.at + 1) * queries[c] // num_tiles[c].clamp(min=1)
        size = (tile_to - tile_from) * tiles.there
        shape = (size > target.tile_queries[SMALL]).long().masked_fill(several[c], MASKED)

        # Segments: a slice, for each tile with a query that attends to it.
        c = of_chunk
        many = num_tiles[c]
        low = ((first - from_query[c] + 1) * many - 1) // queries[c].clamp(min=1)
        high = ((stop - from_query[c]) * many - 1) // queries[c].clamp(min=1)
        segments = _lists((high - low + 1) * slices.there, capacity.max_segments)
        s = segments.parent
        tile = (tiles.before[c] + low)[s] + segments.at
        tile = tile.masked_fill(~segments.there, capacity.max_items)
        tokens = (end - start)[s] * segments.there

        # Items in a plan's order: by tile shape, then the longest first.
        in_tile = _sums(segments.there.long(), tile, capacity.max_items + 1)[:-1]
        length_of = _sums(tokens, tile, capacity.max_items + 1)[:-1]
        place = (LARGE - shape).masked_fill(shape == MASKED, MASKED)  # as ITEM_ORDER says
        key = ((place << 40) - length_of).masked_fill(~tiles.there, _LAST)
        ordered = key.sort(stable=True).indices
        number = torch.arange(len(key), device=key.device)
        rank = torch.zeros_like(ordered).scatter_(0, ordered, number)
        most = target.tile_segments[-1]
        parts_of_tile = (in_tile + most - 1) // most * tiles.there
        items = _lists(parts_of_tile[ordered], capacity.max_items)
        t = ordered[items.parent]
        item_size = size[t] * items.there
        item_shape = shape[t].masked_fill(~items.there, len(ITEM_ORDER))
        item_held = (in_tile[t] - most * items.at).clamp(max=most) * items.there

        entries = _lists(item_size, capacity.max_entries)
        query = tile_from[t[entries.parent]] + entries.at
        query = query.masked_fill(~entries.there, batch)
        of_shape, alone_in = item_shape[entries.parent], item_size[entries.parent] == 1
        slot, merged = self._slots(query, entries.there, of_shape, alone_in, order)

        rank = torch.cat((rank, rank.new_full((1,), len(rank))))
        by_item = (rank[tile] * len(start) + s).sort(stable=True).indices
        s, tile, there = s[by_item], tile[by_item], segments.there[by_item]
        t = tile.clamp(max=capacity.max_items - 1)
        span = torch.maximum(first[s], tile_from[t]) - tile_from[t]
        span += (torch.minimum(stop[s], tile_to[t]) - tile_from[t]) << SPAN_SHIFT
        merges = merged[tile_from[t].clamp(max=batch - 1)] * (size[t] == 1)
        span = torch.where(shape[t] == SMALL, merges, span)
        of = request[first[s].clamp(max=batch - 1)]
        self._fill("segment_request", of, there)
        self._fill("segment_table", table_rows.long()[of], there)
        self._fill("segment_start", start[s], there)
        self._fill("segment_end", end[s].masked_fill(is_open[s], OPEN_END), there)
        self._fill("segment_span", span, there)
        self._fill("entry_query", order[query.clamp(max=batch - 1)], entries.there)
        self._fill("entry_slot", slot, entries.there)
        for name, counts in (("item_segment_ptr", item_held), ("item_query_ptr", item_size)):
            self.plan[name][:1].zero_()
            self.plan[name][1 : len(counts) + 1].copy_(counts.cumsum(0))
        of_each = torch.stack([(item_shape == n).sum() for n in ITEM_ORDER])
        self.plan["tile_ptr"][1:].copy_(of_each.cumsum(0))
        self.plan["arrivals"].zero_()
        return length.sum() // target.query_blocks, tokens.sum()

    def _fill(self, name: str, values: torch.Tensor, there: torch.Tensor) -> None:
        """Write the first numbers of an array of the plan; those behind them stay."""
        array = self.plan[name][: len(values)]
        array.copy_(torch.where(there, values.to(array.dtype), array))

    def _elements(
        self, target: Target, batch: int, length: torch.Tensor
    ) -> tuple[Elements, torch.Tensor, torch.Tensor]:
        """The elements, tokens of a chunk, and whether every request must read all by itself."""
        nodes = Nodes(*self.scratch.nodes)
        cut = nodes.cut[: batch + 1].long()
        first = self.scratch.first[:batch].long()
        queries, parent = nodes.queries[:batch].long(), nodes.parent[:batch].long()
        flat = _before((length - cut[:-1]).clamp(min=0)) - cut[:-1]
        place = torch.arange(batch, device=cut.device)
        own = torch.maximum(cut[:-1], cut[1:])
        above = cut[parent] * (parent > 0)
        found = Elements(
            torch.cat((queries > 0, queries >= 0)),
            torch.cat((above, own)),
            torch.cat((cut[:-1], torch.maximum(own, length))),
            torch.cat((first, place)),
            torch.cat((queries, torch.ones_like(queries))),
            torch.cat((queries < 0, queries >= 0)),
            torch.cat((flat[first] + above, flat + own)),
        )
        key = (found.flat * batch + found.first).masked_fill(~found.there, _LAST)
        ordered = key.sort(stable=True).indices
        found = Elements(*(values[ordered] for values in found))
        chunk, fits = self._chunk(target, found)
        alone = ~fits
        lone = Elements(
            found.is_leaf,
            torch.zeros_like(found.begin),
            *found[2:4],
            torch.ones_like(found.queries),
            *found[5:],
        )
        chosen = (torch.where(alone, b, a) for a, b in zip(found, lone, strict=True))
        return Elements(*chosen), chunk, alone

    def _chunk(self, target: Target, found: Elements) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of a chunk, and whether the plan may hold the chunks, by the policy's bounds."""
        room, most = self.room, target.tile_segments[-1]
        shortest = self.policy.chunk_tokens
        doublings = max(1, (2 * MAX_ITEM_TOKENS // 3 // shortest).bit_length())
        doubled = torch.arange(doublings, device=found.flat.device)
        chunks = shortest << doubled
        begin, last, count = _blocks(found, chunks[:, None])
        slices = (last - begin + 1) * found.there
        groups = (last * found.there).amax(1) + 1
        held = max(1, min(target.tile_queries[-1], target.largest_tile))
        pairs = (slices * found.queries).sum(1)
        met = (found.queries - 1) // max(1, held // 2) + 2
        met.masked_fill_(found.queries == 1, 1)
        segments = (slices * met).sum(1)
        entries = pairs + segments // most * max(target.tile_queries[-1], 1)
        items = torch.maximum(2 * groups, pairs // held + groups + segments // most)
        # The programs hold all chunks at once, or chunks are as long as they may be for that.
        few = (count[:, 0] <= target.tile_programs[MASKED]) | (doubled == doublings - 1)
        few |= chunks >= self.policy.longer * shortest
        fits = (
            few
            & (items <= room.max_items)
            & (entries <= room.max_entries)
            & (segments <= room.max_segments)
        )
        # Not chunks[…]: the CPU would wait for the number.
        return chunks.gather(0, fits.long().argmax(0, keepdim=True)), fits.any()

    def _slots(
        self,
        query: torch.Tensor,
        there: torch.Tensor,
        shape: torch.Tensor,
        alone: torch.Tensor,
        order: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`entry_slot`, and the results that the item of each query merges; writes stage 2's part.

        As ``planner/reference.py``, with queries by place; `query` is the batch where no entry is.
        """
        batch = len(order)
        parts = _sums(there.long(), query, batch + 1)
        is_small = there & (shape == SMALL)
        small = _sums(is_small.long(), query, batch + 1)
        lone = _sums((is_small & alone).long(), query, batch + 1)
        merges = (small == 1) & (lone == 1) & (parts > 1) & (parts <= MAX_MERGED + 1)
        reduced = (parts > 1) & ~merges
        reduced[-1:].zero_()
        slots = parts * reduced
        behind = (parts - 1) * merges
        first = torch.where(merges, slots.sum() + _before(behind), _before(slots))
        merging = is_small & alone & merges[query]
        partial = there & (parts[query] > 1) & ~merging
        by_query = query.sort(stable=True).indices
        count = partial[by_query].long()
        among = _before(count)
        earlier = _before(slots + behind)
        rank = torch.zeros_like(query).scatter_(0, by_query, among - earlier[query[by_query]])
        slot = (first[query] + rank).masked_fill(~partial, DIRECT)
        slot = torch.where(merging, MERGES - first[query], slot)

        merged_later = _lists(reduced[:-1].long(), batch)
        place, there = merged_later.parent, merged_later.there
        self._fill("reduce_query", order[place], there)
        ends = self.plan["reduce_ptr"][1 : batch + 1]
        ends.copy_(torch.where(there, slots.cumsum(0)[place].to(ends.dtype), ends))
        self.plan["reduce_ptr"][:1].zero_()
        self.plan["num_reduce"].copy_(reduced.sum())
        return slot, behind
