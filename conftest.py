"""Modules of a host's adapter are collected where that host is installed: one environment each."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [
    f"deft_backend/hosts/{host}/*" for host in ("sglang", "vllm") if find_spec(host) is None
]
