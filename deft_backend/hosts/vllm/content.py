"""What a batch contains: requests that decode, that verify drafts, or that compute their prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from deft_backend.telemetry.counters import DECODE, MIXED, VERIFICATION, Decoded


class Content(NamedTuple):
    kind: str  # of step: DECODE, VERIFICATION or MIXED
    # Leading requests with at most the query tokens of a verification, and their query tokens. In
    # a graph these include padding requests and padding tokens.
    requests: int
    tokens: int
    decoded: Decoded  # for the counters
    scattered: bool = False  # whether others of them stand behind requests with longer prompts

    @property
    def verifies(self) -> bool:
        return self.kind == VERIFICATION or (self.kind == MIXED and self.tokens > self.requests)


def content_of(common: Any, query_tokens: int) -> Content | None:
    batch, longest = int(common.num_reqs), int(common.max_query_len)
    if longest < 1:
        return None
    starts = common.query_start_loc_cpu.numpy()[: batch + 1]
    context = _context(common)
    if longest <= query_tokens:
        kind = DECODE if longest == 1 else VERIFICATION
        tokens, rows = int(starts[batch]), int(np.count_nonzero(np.diff(starts)))
        verified = tokens if kind == VERIFICATION else 0
        decoded = Decoded(kind, rows, int(context[:batch].sum()), verified)
        return Content(kind, batch, int(common.num_actual_tokens), decoded)
    short = np.diff(starts) <= query_tokens
    decodes = short & ~_prefilling(common)
    rows = int(np.count_nonzero(decodes))
    if rows == 0:
        return None
    front = int(short.argmin())
    tokens = int(starts[front])
    verified = tokens if tokens > front else 0
    decoded = Decoded(MIXED, rows, int(context[:batch][decodes].sum()), verified)
    return Content(MIXED, front, tokens, decoded, bool(decodes[front:].any()))


def sees_later_tokens(common: Any) -> bool:
    return any((common.mm_req_doc_ranges or {}).values())


def prefills(common: Any) -> bool:
    return common.is_prefilling is None or bool(_prefilling(common).any())


def _prefilling(common: Any) -> Any:
    prefilling = common.is_prefilling
    return np.bool_(False) if prefilling is None else prefilling.numpy()[: common.num_reqs]


def _context(common: Any) -> Any:
    """Tokens of context of each request; zeros if the CPU does not know them."""
    lens = common.seq_lens_cpu_upper_bound
    if lens is None and common.seq_lens.device.type == "cpu":
        lens = common.seq_lens
    return np.zeros(common.num_reqs, np.int64) if lens is None else lens.numpy()
