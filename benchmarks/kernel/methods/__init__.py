"""The measured methods: our policies and the kernels of others, one module each."""

from collections.abc import Callable

from benchmarks.kernel.methods.artifact import DeftArtifact, FastTreeArtifact
from benchmarks.kernel.methods.base import Method, Prepared, Refused
from benchmarks.kernel.methods.flash_attention3 import FlashAttention2, FlashAttention3
from benchmarks.kernel.methods.flashinfer_cascade import FlashInferCascade
from benchmarks.kernel.methods.flashinfer_decode import FlashInferDecode
from benchmarks.kernel.methods.flashinfer_prefill import FlashInferPrefill
from benchmarks.kernel.methods.forest_cascade import ForestCascade
from benchmarks.kernel.methods.ours import Ours
from benchmarks.kernel.methods.papers import (
    DenseMask,
    FixedDivision,
    OneTile,
    RadixAttention,
    Tuned,
    WholeContext,
)
from benchmarks.policy_gaps import Oracle
from deft_backend.costs.cost_model import FastTreeCoefficients
from deft_backend.policies import POLICY_NAMES, get_policy
from deft_backend.policies.deft_flatten import DeftFlatten
from deft_backend.policies.fasttree import FastTree
from deft_backend.policies.fixed_edges import DeftNodeChunk

OURS = "deft"
"""Name of our method."""

_OTHERS: dict[str, Callable[[], Method]] = {
    "flashinfer": FlashInferDecode,
    "cascade": FlashInferCascade,
    "fa3": FlashAttention3,
    "fa2": FlashAttention2,
    ForestCascade.name: ForestCascade,
    FastTreeArtifact.name: FastTreeArtifact,
    DeftArtifact.name: DeftArtifact,
    "flashinfer-prefill": FlashInferPrefill,
    "flashinfer-fa2": lambda: FlashInferDecode("flashinfer-fa2", "fa2"),
    DenseMask.name: DenseMask,
    RadixAttention.name: RadixAttention,
    Oracle.name: lambda: Tuned(Oracle.name, Oracle()),
    OneTile.name: lambda: Tuned(OneTile.name, OneTile()),
    WholeContext.name: lambda: Tuned(WholeContext.name, WholeContext()),
}

METHODS = ("none", *_OTHERS, *POLICY_NAMES)
"""Methods that :data:`OURS` is compared with. A policy may have a parameter behind a slash:
``deft-node-chunk/64``, ``deft-flatten/64``, ``fixed-division/4``, ``fasttree/10`` (its gamma)."""


def make_method(name: str, planner: str = "host") -> Method:
    """One of :data:`METHODS`; raises KeyError if it is unknown.

    The `planner` plans for a policy by its name; policies with parameters have the reference alone.
    """
    policy, _, parameter = name.partition("/")
    if name in _OTHERS:
        return _OTHERS[name]()
    if policy == "deft-node-chunk" and parameter:
        return Tuned(name, DeftNodeChunk(int(parameter)))
    if policy == "deft-flatten" and parameter:
        return Tuned(name, DeftFlatten(int(parameter), longer=1))
    if policy == FastTree.name and parameter:  # every edge cut, or none
        return Tuned(name, FastTree(FastTreeCoefficients(0, 0, float(parameter))))
    if policy == FastTreeArtifact.name and parameter:
        return FastTreeArtifact(float(parameter))
    if policy == FixedDivision.name:
        return Tuned(name, FixedDivision(int(parameter)))
    if name not in POLICY_NAMES:
        raise KeyError(name)
    return Ours(name, name, planner) if planner == "device" else Tuned(name, get_policy(name))


__all__ = ["METHODS", "OURS", "Method", "Prepared", "Refused", "make_method"]
