"""What a batch contains, and how a step that decodes and prefills is divided."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from deft_backend.telemetry.counters import DECODE, MIXED, VERIFICATION, Decoded

DOCUMENTS = "tokens of documents that attend to later tokens"


class Content(NamedTuple):
    kind: str  # of step: DECODE, VERIFICATION or MIXED
    # Requests of tree attention, and their query tokens. In a graph these include padding requests
    # and padding tokens. In a mixed step they come first, if none is scattered.
    requests: int
    tokens: int
    decoded: Decoded  # for the counters
    scattered: bool = False  # whether requests that decode stand behind others
    decoding: Any = None  # [rows] int64 array: the requests that decode, in a mixed step

    @property
    def verifies(self) -> bool:
        return self.kind == VERIFICATION or (self.kind == MIXED and self.tokens > self.requests)


def content_of(common: Any, query_tokens: int, *, equal_bits: bool = False) -> Content | None:
    """The content of a batch; None if it does not decode.

    Tree attention also computes the last tokens of a prompt, if they are few. With `equal_bits` the
    host computes them, so that their bits are the same in every batch.
    """
    batch, longest = int(common.num_reqs), int(common.max_query_len)
    if longest < 1:
        return None
    starts = common.query_start_loc_cpu.numpy()[: batch + 1]
    lens, context, prefilling = np.diff(starts), _context(common), _prefilling(common)
    if longest <= query_tokens and not (equal_bits and prefilling.any()):
        kind = DECODE if longest == 1 else VERIFICATION
        tokens, rows = int(starts[batch]), int(np.count_nonzero(lens))
        verified = tokens if kind == VERIFICATION else 0
        decoded = Decoded(kind, rows, int(context[:batch].sum()), verified)
        return Content(kind, batch, int(common.num_actual_tokens), decoded)
    short = lens <= query_tokens
    decodes = short & ~prefilling
    decoding = np.flatnonzero(decodes)
    if not len(decoding):
        return None
    front = int((decodes if equal_bits else short).argmin())
    scattered = bool(decodes[front:].any())
    requests = len(decoding) if equal_bits else front
    tokens = requests if equal_bits else int(starts[front])
    verified = tokens if tokens > requests else 0
    decoded = Decoded(MIXED, len(decoding), int(context[decoding].sum()), verified)
    return Content(MIXED, requests, tokens, decoded, scattered, decoding)


def leading_rows(common: Any) -> tuple[int, Decoded | None]:
    """Requests of one query token that stand before all others, and what decodes among them.

    None if nothing does. Requests of padding stand behind the others and have no query tokens.
    """
    starts = common.query_start_loc_cpu.numpy()[: int(common.num_reqs) + 1]
    single = np.diff(starts) == 1
    rows = len(single) if single.all() else int(single.argmin())
    decodes = single.copy()
    if common.is_prefilling is not None:
        prefilling = _prefilling(common)  # it may lack the requests of padding
        decodes[: len(prefilling)] &= ~prefilling
    decoding = int(np.count_nonzero(decodes))
    if not decoding:
        return rows, None
    kind = DECODE if starts[rows] == starts[-1] else MIXED
    context = _context(common)[: len(single)]
    return rows, Decoded(kind, decoding, int(context[decodes[: len(context)]].sum()), 0)


class GraphBatches:
    """Which rows of a batch tree attention computes, and which the host, in tensors that stay: one
    graph of a size serves every division of its batches.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._starts = torch.zeros(most + 1, dtype=torch.int32, device=device)
        self.sizes: set[tuple[int, int]] = set()  # requests and tokens of batches in graphs
        self.left = False  # whether this step runs without the graph of its size

    def divide(self, common: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What each attention gets, so that tree attention computes the first `rows` requests.

        Returns lengths for tree attention, in which all other requests have length 0. And the first
        query token of each request for the host, where the first `rows` requests have none.
        """
        requests = int(common.num_reqs)
        lens, starts = self._lens[:requests], self._starts[: requests + 1]
        lens[:rows] = common.seq_lens[:rows]
        if rows < requests:
            lens[rows:] = 0
        torch.clamp(common.query_start_loc[: requests + 1], min=rows, out=starts)
        return lens, starts


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


def build_rest(builder: Any, first: Any, content: Content, common: Any, **options: Any) -> Any:
    """The host's metadata of the requests behind a step's decode rows. A builder of its own makes
    it: graphs read the buffers that `first`, the builder of whole batches, keeps.
    """
    from vllm.v1.worker.ubatch_utils import UBatchSlice, _make_metadata_with_slice

    requests = slice(content.requests, int(common.num_reqs))
    tokens = slice(content.tokens, int(common.num_actual_tokens))
    rest = _make_metadata_with_slice(UBatchSlice(requests, tokens), common)
    if common.is_prefilling is not None:
        rest.is_prefilling = common.is_prefilling[requests]
    # One workspace of FlashInfer serves all builders: their kernels run one after the other.
    if hasattr(builder, "set_workspace_buffer"):
        builder.set_workspace_buffer(first._get_workspace_buffer())
    return builder.build(0, rest, **options)


def unsplit(content: Content, common: Any) -> str | None:
    """Why the host's code cannot slice what follows the decode rows of a mixed step, or None."""
    if content.scattered:
        return "decode rows behind prefills"
    if sees_later_tokens(common):
        return DOCUMENTS
    padded = common.query_start_loc_cpu[common.num_reqs] != common.num_actual_tokens
    if padded or common.seq_lens_cpu_upper_bound is None:
        return "prefills of unknown lengths"
    return None
