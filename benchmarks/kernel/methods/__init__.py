"""The measured methods: our policies and the kernels of others, one module each."""

from benchmarks.kernel.methods.base import Method, Prepared, Refused
from benchmarks.kernel.methods.flash_attention3 import FlashAttention2, FlashAttention3
from benchmarks.kernel.methods.flashinfer_cascade import FlashInferCascade
from benchmarks.kernel.methods.flashinfer_decode import FlashInferDecode
from benchmarks.kernel.methods.flashinfer_prefill import FlashInferPrefill
from benchmarks.kernel.methods.ours import Ours

OURS = "deft"
"""Name of our method."""

PEERS = (
    "flashinfer", "cascade", "fa3", "flash-decoding", "flashinfer-prefill", "flashinfer-fa2", "fa2",
)  # fmt: skip
"""Methods that :data:`OURS` is compared with, by name."""


def make_method(name: str) -> Method:
    """One of :data:`PEERS`.

    Raises
    ------
    KeyError
        If the peer is unknown.
    """
    match name:
        case "flash-decoding":
            return Ours(name, name)
        case "flashinfer":
            return FlashInferDecode()
        case "flashinfer-fa2":
            return FlashInferDecode(name, "fa2")
        case "fa2":
            return FlashAttention2()
        case "flashinfer-prefill":
            return FlashInferPrefill()
        case "cascade":
            return FlashInferCascade()
        case "fa3":
            return FlashAttention3()
        case _:
            raise KeyError(name)


__all__ = ["OURS", "PEERS", "Method", "Prepared", "Refused", "make_method"]
