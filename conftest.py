"""Collect the modules of a host's adapter only if that host is installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [
    f"deft_backend/hosts/{host}/*" for host in ("sglang", "vllm") if find_spec(host) is None
]
