"""Every host's window: the versions that get tree attention, by the host's name."""

from deft_backend.hosts.sglang.versions import SGLANG
from deft_backend.hosts.vllm.versions import VLLM

TESTED = {"sglang": SGLANG, "vllm": VLLM}
"""By the names of commands and state files; ``TESTED[host].name`` is the host's own."""
