"""Speculative decoding in the hosts' own words: their options, and how many tokens they accept."""

import json
import re
from contextlib import suppress

from deft_backend.tools.servers.get_page import get_page

NGRAM = "ngram"  # drafts from n-grams of the context; any other name is a draft model

_SERIES = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)_total(?:\{.*\})? (\S+)", re.M)


def speculative_arguments(host: str, draft: str, tokens: int) -> list[str]:
    """Options with which a server drafts chains.

    - `host`: "sglang" or "vllm".
    - `draft`: :data:`NGRAM`, or a draft model: its folder, or its name on the hub.
    - `tokens`: Draft tokens of a verification, besides the token before them.

    >>> speculative_arguments("vllm", "ngram", 4)[1]
    '{"num_speculative_tokens": 4, "method": "ngram", "prompt_lookup_max": 4}'
    """
    if host == "vllm":
        kind = {"method": NGRAM, "prompt_lookup_max": 4} if draft == NGRAM else {"model": draft}
        return ["--speculative-config", json.dumps({"num_speculative_tokens": tokens, **kind})]
    verified = ["--speculative-num-draft-tokens", str(tokens + 1)]
    if draft == NGRAM:
        return ["--speculative-algorithm", "NGRAM", *verified]
    return [
        "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft,
        "--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1", *verified,
    ]  # fmt: skip


def acceptance_length(url: str) -> float | None:
    """Tokens that a server's verifications gave on average since it started; None if none ran.

    A verification gives the accepted draft tokens and one token of the target. The server counts
    them itself: vLLM in ``/metrics``, SGLang in ``/server_info``.
    """
    length = _of_metrics(get_page(f"{url}/metrics") or "")
    if length is not None:
        return length
    with suppress(ValueError, KeyError, TypeError):
        states = json.loads(get_page(f"{url}/server_info") or "")["internal_states"]
        lengths = [s["avg_spec_accept_length"] for s in states if "avg_spec_accept_length" in s]
        return sum(map(float, lengths)) / len(lengths) if lengths else None
    return None


def _of_metrics(page: str) -> float | None:
    """From vLLM's counters, over all its engines."""
    totals = {"drafts": 0.0, "accepted_tokens": 0.0}
    for name, value in _SERIES.findall(page):
        totals[name] += float(value)
    return 1.0 + totals["accepted_tokens"] / totals["drafts"] if totals["drafts"] else None
