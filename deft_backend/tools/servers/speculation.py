"""How many tokens a server's verifications give, by the host's own counts."""

import json
import re
from contextlib import suppress

from deft_backend.tools.servers.get_page import get_page

_SERIES = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)_total(?:\{.*\})? (\S+)", re.M)


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
