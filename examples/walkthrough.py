"""One batch, all the way: the numbers of docs/walkthrough.md.

``python -m examples.walkthrough`` prints them; ``--write`` writes them into the page. The device
planner's launches and the kernels run on the CPU, in Triton's interpreter. The reference beside
them makes the same plan in NumPy.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.attention.reference_attention import reference_attention
from deft_backend.forest import VIRTUAL_ROOT, PrefixForest
from deft_backend.planner import DevicePlan, Plan, plan_forest
from deft_backend.planner.encoding import DIRECT, MERGES, OPEN_END
from deft_backend.planner.on_device import DevicePlanner
from deft_backend.planner.on_device.launch_numbers import ProgramWork
from deft_backend.policies import Grouping

PAGE = Path(__file__).parent.parent / "docs" / "walkthrough.md"

PAGE_SIZE = 256
QUERY_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64

SYSTEM_PROMPT = (0, 1, 2, 3, 4, 5, 6, 7)
DOCUMENT = (8, 9, 10, 11)
REQUESTS: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("system prompt, a short question", 2088, (*SYSTEM_PROMPT, 16)),
    ("a prompt of its own", 700, (17, 18, 19)),
    ("system prompt, document, a question", 3162, (*SYSTEM_PROMPT, *DOCUMENT, 12)),
    ("system prompt, a question", 2348, (*SYSTEM_PROMPT, 14, 15)),
    ("system prompt, document, another question", 3272, (*SYSTEM_PROMPT, *DOCUMENT, 13)),
)
"""The topic of each request, its tokens and its pages."""

TABLE_ROWS = (5, 1, 4, 0, 2)
"""Each request's row of the host's page table."""

SMS, PROGRAMS = 2, 2
"""The plan is for a small GPU, because the chunks of a real one would not fit on a page."""

PRICED = 5
"""Lengths of chunks that the page shows."""


class FullPlanner(DevicePlanner):
    """The device planner with the 64 lengths of chunks that a GPU prices.

    Interpreted, it would price four.
    """

    def _work(self, size: int) -> ProgramWork:
        return replace(super()._work(size), candidates=ProgramWork.on_gpu(64).candidates)


@dataclass(frozen=True)
class Tensors:
    """The host's inputs to tree attention in a step."""

    page_table: torch.Tensor
    table_rows: torch.Tensor
    seq_lens: torch.Tensor
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    @classmethod
    def make(cls) -> Tensors:
        pages = 1 + max(page for _, _, held in REQUESTS for page in held)
        page_table = torch.zeros((1 + max(TABLE_ROWS), 16), dtype=torch.int32)
        for (_, _, held), row in zip(REQUESTS, TABLE_ROWS, strict=True):
            page_table[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
        numbers = np.random.default_rng(0)
        cache = numbers.standard_normal((2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM))
        k_cache, v_cache = torch.from_numpy(cache).float()
        q = numbers.standard_normal((len(REQUESTS), QUERY_HEADS, HEAD_DIM))
        return cls(
            page_table=page_table,
            table_rows=torch.tensor(TABLE_ROWS, dtype=torch.int32),
            seq_lens=torch.tensor([tokens for _, tokens, _ in REQUESTS], dtype=torch.int32),
            q=torch.from_numpy(q).float(),
            k_cache=k_cache,
            v_cache=v_cache,
        )


def read_plan(arrays: DevicePlan) -> Plan:
    """The plan that the device planner wrote, cut to its counts."""
    items = int(arrays["tile_ptr"][-1])
    segments = int(arrays["item_segment_ptr"][items])
    entries, merged = int(arrays["item_query_ptr"][items]), int(arrays["num_reduce"][0])
    counts = {
        "tile_ptr": len(arrays["tile_ptr"]),
        "item_segment_ptr": items + 1,
        "item_query_ptr": items + 1,
        "segment_request": segments,
        "segment_start": segments,
        "segment_end": segments,
        "segment_span": segments,
        "entry_query": entries,
        "entry_slot": entries,
        "reduce_query": merged,
        "reduce_ptr": merged + 1,
    }
    return Plan(
        **{name: arrays[name][:count].cpu().numpy().copy() for name, count in counts.items()}
    )


@dataclass(frozen=True)
class Step:
    """The batch at every stage of the data flow, and the steps of the page as text.

    - `planner`: what the device planner's launches left in its arrays.
    - `plan`: the plan that they wrote.
    - `forest`, `grouping`, `reference_plan`: the same by the reference.
    """

    tensors: Tensors
    attention: TreeAttention
    planner: DevicePlanner
    plan: Plan
    forest: PrefixForest
    grouping: Grouping
    reference_plan: Plan
    out: torch.Tensor

    @classmethod
    def run(cls) -> Step:
        """Plan the batch with both planners, and compute its attention by the device's plan."""
        tensors = Tensors.make()
        attention = TreeAttention(
            num_query_heads=QUERY_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device="cpu",
            page_size=PAGE_SIZE,
            max_batch=len(REQUESTS),
            policy="auto",
        )
        target = replace(
            attention.target,
            num_sms=SMS,
            num_programs=PROGRAMS,
            tile_programs=(PROGRAMS,) * len(attention.target.tile_programs),
        )
        arrays = DevicePlan(attention.capacity, attention.device)
        planner = FullPlanner(
            target, attention.policy, arrays, attention.device, PAGE_SIZE, overlapped=False
        )
        planner.plan(tensors.page_table, tensors.table_rows, tensors.seq_lens)
        plan = read_plan(arrays)

        by_request = tensors.page_table[tensors.table_rows.long()]
        forest = forest_from_page_tables(by_request, tensors.seq_lens.numpy(), PAGE_SIZE)
        reference, grouping = plan_forest(forest, attention.policy, target, attention.capacity)

        attention.use(plan, forest)
        attention.poison_workspace()
        out = attention.run(
            tensors.q,
            tensors.k_cache,
            tensors.v_cache,
            tensors.page_table,
            tensors.seq_lens,
            table_rows=tensors.table_rows,
        )
        return cls(tensors, attention, planner, plan, forest, grouping, reference, out)

    @cached_property
    def reference(self) -> torch.Tensor:
        """[B, Hq, D] float64: the reference, request by request in plain PyTorch."""
        t = self.tensors
        by_request = t.page_table[t.table_rows.long()]
        return reference_attention(t.q, t.k_cache, t.v_cache, by_request, t.seq_lens)

    def texts(self) -> dict[str, str]:
        """Each step of the page, by name, in the page's order."""
        steps = {
            "requests": self._requests(),
            "page-table": self._page_table(),
            "order": self._order(),
            "forest": self._forest(),
            "prices": self._prices(),
            "grouping": self._grouping(),
            "items": self._items(),
            "plan": self._plan(),
            "entries": self._entries(),
            "partial-results": self._partial_results(),
            "merge": self._merge(),
            "output": self._output(),
            "kv-read": self._kv_read(),
        }
        return {name: "\n".join(line.rstrip() for line in lines) for name, lines in steps.items()}

    def _requests(self) -> Iterator[str]:
        yield "request  tokens  its context"
        for index, (about, tokens, _) in enumerate(REQUESTS):
            yield f"{index:>7}  {tokens:>6,}  {about}"

    def _page_table(self) -> Iterator[str]:
        owner = {row: index for index, row in enumerate(TABLE_ROWS)}
        yield "row  of request  page ids"
        for row in range(len(self.tensors.page_table)):
            if row not in owner:
                yield f"{row:>3}           -"
                continue
            held = REQUESTS[owner[row]][2]
            yield f"{row:>3}  {owner[row]:>10}  {' '.join(f'{page:>2}' for page in held)}"

    def _order(self) -> Iterator[str]:
        scratch = self.planner._scratch
        cut = scratch.nodes[0]
        yield "place  request  tokens shared with the place before"
        for place in range(len(REQUESTS)):
            shared = f"{int(cut[place]):,}" if place else "-"
            yield f"{place:>5}  {int(scratch.order[place]):>7}  {shared}"

    def _forest(self) -> Iterator[str]:
        forest = self.forest
        yield "node  parent  positions      of request  queries"
        for node in range(forest.num_nodes):
            parent = int(forest.parent[node])
            held = _positions(forest.start[node], forest.end[node])
            shown = "-" if parent == VIRTUAL_ROOT else str(parent)
            leaf = "  (leaf)" if forest.is_leaf[node] else ""
            yield (
                f"{node:>4}  {shown:>6}  {held}  {forest.request[node]:>10}  "
                f"{_numbers(forest.queries(node))}{leaf}"
            )

    def _prices(self) -> Iterator[str]:
        chunks, cost, tokens = self.planner._scratch.candidates
        cost, tokens = cost.view(2, -1), tokens.view(2, -1)
        yield "chunks of the    small tile:        large tile:"
        yield "longest range    tokens     µs      tokens     µs"
        for at in range(PRICED):
            yield f"{int(chunks[at]):>13}  " + "  ".join(
                f"{int(tokens[tile, at]):>8,} {float(cost[tile, at]) / 1000:>6.1f}  "
                for tile in (0, 1)
            )

    def _grouping(self) -> Iterator[str]:
        yield "group  positions      of request  tokens  queries"
        groups = self.grouping  # of one segment each
        for group, (start, end) in enumerate(zip(groups.start, groups.end, strict=True)):
            queries = groups.queries[groups.query_ptr[group] : groups.query_ptr[group + 1]]
            yield (
                f"{group:>5}  {_positions(start, end)}  {groups.request[group]:>10}  "
                f"{end - start:>6,}  {_numbers(queries)}{'  (open)' if groups.open[group] else ''}"
            )

    def _items(self) -> Iterator[str]:
        yield "item  tile   vectors  positions      of request  queries"
        for item, tile in self._tiles():
            segment = int(self.plan.item_segment_ptr[item])
            request = int(self.plan.segment_request[segment])
            end = int(self.plan.segment_end[segment])
            is_open = end == OPEN_END
            end = REQUESTS[request][1] if is_open else end
            queries = self._queries(item)
            yield (
                f"{item:>4}  {tile}  {len(queries) * QUERY_HEADS // KV_HEADS:>7}  "
                f"{_positions(self.plan.segment_start[segment], end)}  {request:>10}  "
                f"{_numbers(queries)}{'  (open)' if is_open else ''}"
            )

    def _plan(self) -> Iterator[str]:
        arrays = self.plan.arrays()
        width = max(map(len, arrays))
        for name, array in arrays.items():
            yield f"{name:<{width}}  {_numbers(array)}"

    def _entries(self) -> Iterator[str]:
        yield "entry  item  query  entry_slot  the result"
        for entry, (item, query) in enumerate(self._entry_owners()):
            slot = int(self.plan.entry_slot[entry])
            if slot == DIRECT:
                meaning = "goes to the output: the item is the query's whole attention"
            elif slot <= MERGES:
                first = MERGES - slot
                merged = int(self.plan.segment_span[self.plan.item_segment_ptr[item]])
                meaning = (
                    f"is merged with slots {first} to {first + merged - 1}, into the output"
                    if merged > 1
                    else f"is merged with slot {first}, into the output"
                )
            else:
                meaning = f"goes to slot {slot}"
            yield f"{entry:>5}  {item:>4}  {query:>5}  {slot:>10}  {meaning}"

    def _partial_results(self) -> Iterator[str]:
        yield "slot  item  query    LSE  output"
        for slot, item, query in self._slots():
            yield f"{slot:>4}  {item:>4}  {query:>5}  {self._lse(slot):>5.2f}  {self._head(slot)}"

    def _merge(self) -> Iterator[str]:
        query = int(self.plan.reduce_query[0])
        begin, end = (int(slot) for slot in self.plan.reduce_ptr[:2])
        lse = np.array([self._lse(slot) for slot in range(begin, end)])
        weights = np.exp2(lse - lse.max())
        weights /= weights.sum()
        merged = sum(
            weight * self._partial(slot)
            for weight, slot in zip(weights, range(begin, end), strict=True)
        )
        yield f"query {query}"
        for slot, weight in zip(range(begin, end), weights, strict=True):
            yield f"  {weight:.3f} of slot {slot}  {self._head(slot)}"
        yield f"  merged           {_elements(merged)}"

    def _output(self) -> Iterator[str]:
        yield "request  tree attention           float64, alone"
        for request in range(len(REQUESTS)):
            yield (
                f"{request:>7}  {_elements(self.out[request, 0])}  "
                f"{_elements(self.reference[request, 0])}"
            )
        difference = float((self.out.double() - self.reference).abs().max())
        yield ""
        yield f"largest difference of all heads and elements: {_bound(difference)}"

    def _kv_read(self) -> Iterator[str]:
        lens = self.tensors.seq_lens.numpy()
        read, alone = self.plan.loaded_tokens(lens), int(lens.sum())
        yield f"tokens read by the plan:       {read:>6,}"
        yield f"tokens read query by query:    {alone:>6,}"
        saved = alone - read
        yield f"tokens saved:                  {saved:>6,} ({100 * saved / alone:.0f} %)"

    def _tiles(self) -> Iterator[tuple[int, str]]:
        """Items in the plan's order, each with its tile."""
        named = sorted(
            (self.plan.items_of(shape), name) for shape, name in ((0, "small"), (1, "large"))
        )
        for (begin, end), name in named:
            for item in range(begin, end):
                yield item, name

    def _queries(self, item: int) -> list[int]:
        begin, end = self.plan.item_query_ptr[item : item + 2]
        found: list[int] = self.plan.entry_query[begin:end].tolist()
        return found

    def _entry_owners(self) -> Iterator[tuple[int, int]]:
        """Item and query of each entry."""
        for item in range(self.plan.num_items):
            for query in self._queries(item):
                yield item, query

    def _slots(self) -> list[tuple[int, int, int]]:
        """Slot, item and query of each partial result, by slot."""
        return sorted(
            (int(slot), item, query)
            for slot, (item, query) in zip(self.plan.entry_slot, self._entry_owners(), strict=True)
            if slot >= 0
        )

    def _lse(self, slot: int) -> float:
        """The result for query head 0."""
        return float(self.attention._workspace.lse[slot, 0])

    def _partial(self, slot: int) -> torch.Tensor:
        """[D] partial output of query head 0."""
        workspace = self.attention._workspace
        partial: torch.Tensor = workspace.out[slot, 0].float() * workspace.scale[slot, 0]
        return partial

    def _head(self, slot: int) -> str:
        return _elements(self._partial(slot))


def _numbers(values: Sequence[int] | np.ndarray) -> str:
    return " ".join(str(int(value)) for value in values)


def _positions(start: int, end: int) -> str:
    return f"{int(start):>5,} – {int(end) - 1:>5,}"


def _elements(vector: torch.Tensor) -> str:
    """The first three elements; zeros have no sign."""
    return " ".join(f"{round(float(x), 3) + 0.0:>6.3f}" for x in vector[:3]) + " …"


def _bound(difference: float) -> str:
    """Round a figure so that it does not depend on the machine."""
    for exponent in (-6, -5, -4):
        if difference < 10.0**exponent:
            return f"below 1e{exponent}"
    return f"{difference:.1e}"


def block_pattern(name: str) -> re.Pattern[str]:
    """The part of the page that holds a step's numbers."""
    return re.compile(
        rf"(?<=<!-- step {re.escape(name)} -->\n```text\n)[^`]*(?=\n```\n<!-- end -->)"
    )


def written(page: str, texts: dict[str, str]) -> str:
    """The page with the numbers of `texts`.

    Raises
    ------
    ValueError
        If the page has no block for a step.
    """
    for name, text in texts.items():
        page, count = block_pattern(name).subn(lambda _, text=text: text, page)  # type: ignore[misc]
        if count != 1:
            raise ValueError(
                f"{PAGE.name} has {count} blocks for the step {name!r}; expected one: "
                f"'<!-- step {name} -->', a text block and '<!-- end -->'"
            )
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.walkthrough", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"bring {PAGE.name} up to date")
    given = parser.parse_args(arguments)
    texts = Step.run().texts()
    if given.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(written(page, texts), encoding="utf-8")
        return
    for name, text in texts.items():
        print(f"--- {name}\n{text}\n")


if __name__ == "__main__":
    main()
