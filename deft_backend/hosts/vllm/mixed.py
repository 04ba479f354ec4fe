"""Steps in which some requests decode, by tree attention, and others prefill, by the host."""

from __future__ import annotations

from typing import Any

from deft_backend.hosts.vllm.content import Content, sees_later_tokens

DOCUMENTS = "tokens of documents that attend to later tokens"

UNSPLIT = ("logits_indices_padded", "encoder_seq_lens", "dcp_local_seq_lens")
"""Fields of the host's metadata that a part of a batch would lack."""


class RestBuilder:
    """Makes the host's metadata of the requests behind a step's decode rows. A builder of its own:
    graphs read the buffers that `first`, the builder of whole batches, keeps.
    """

    def __init__(self, host: Any, first: Any, arguments: tuple[Any, ...]) -> None:
        self._first = first
        self.builder = host.get_builder_cls()(*arguments)

    def build(self, content: Content, common: Any, **options: Any) -> Any:
        from vllm.v1.worker.ubatch_utils import UBatchSlice, _make_metadata_with_slice

        requests = slice(content.requests, int(common.num_reqs))
        tokens = slice(content.tokens, int(common.num_actual_tokens))
        rest = _make_metadata_with_slice(UBatchSlice(requests, tokens), common)
        if common.is_prefilling is not None:
            rest.is_prefilling = common.is_prefilling[requests]
        # One workspace of FlashInfer serves all builders: their kernels run one after the other.
        if hasattr(self.builder, "set_workspace_buffer"):
            self.builder.set_workspace_buffer(self._first._get_workspace_buffer())
        return self.builder.build(0, rest, **options)


def unsplit(content: Content, common: Any) -> str | None:
    if content.scattered:
        return "decode rows behind prefills"
    if sees_later_tokens(common):
        return DOCUMENTS
    for name in UNSPLIT:
        if getattr(common, name, None) is not None:
            return f"a step with prefills and {name}"
    padded = common.query_start_loc_cpu[common.num_reqs] != common.num_actual_tokens
    if padded or common.seq_lens_cpu_upper_bound is None:
        return "prefills of unknown lengths"
    return None
