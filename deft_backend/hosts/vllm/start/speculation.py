"""Speculative decoding: how many query tokens a verification has, and which layers draft.

vLLM verifies chains of draft tokens, from n-gram lookup, a draft model, EAGLE or MTP. The draft
model's own layers run through the host's backend.
"""

from __future__ import annotations

import re
from typing import Any

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFT = re.compile(r"^draft_model\.|(?:^|\.)(?:mtp|eagle)\w*\.")


def query_tokens_of(vllm_config: Any) -> int:
    """Most query tokens of a request: the draft tokens and the token before them; 1 in decode."""
    speculative = vllm_config.speculative_config
    return 1 if speculative is None else 1 + int(speculative.num_speculative_tokens)


def unsupported_speculation(vllm_config: Any) -> str | None:
    """Why this server's kind of speculation rules out tree attention, in one line; or None."""
    speculative = vllm_config.speculative_config
    if getattr(speculative, "enable_adaptive_verification", False):
        return "adaptive verification is not supported: only the device knows a request's tokens"
    return None


def drafts(layer_name: str, vllm_config: Any) -> bool:
    """Whether a layer belongs to the draft model.

    Newer versions mark such a layer. In others its name decides: a draft model's layers have a
    prefix, and layers of EAGLE and MTP count on from the target's last layer.
    """
    if vllm_config.speculative_config is None:
        return False
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    if getattr(layer, "is_draft_layer", False) or _DRAFT.search(layer_name):
        return True
    found = _LAYER.search(layer_name)
    layers = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
    return found is not None and layers is not None and int(found.group(1)) >= layers


def prefills(common: Any) -> bool:
    """Whether some request of a batch still computes its prompt, as the CPU knows.

    If the runner does not say, causal attention is also right for prompts, unless they have
    documents within which tokens attend to later tokens.
    """
    prefilling = common.is_prefilling
    return bool(common.mm_req_doc_ranges if prefilling is None else prefilling.any())


def is_step(common: Any, query_tokens: int) -> bool:
    """Whether a batch is a decode or a verification of at most `query_tokens` tokens a request."""
    longest = int(common.max_query_len)
    return longest == 1 or (1 < longest <= query_tokens and not prefills(common))
