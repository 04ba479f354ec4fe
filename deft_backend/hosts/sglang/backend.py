"""The attention backend: the host's own object with some methods replaced, so that models that ask
for its class, or set attributes, meet the host's backend. All that is ours is in ``deft``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import new_class
from typing import Any

from deft_backend.hosts.sglang.steps import TreeSteps
from deft_backend.hosts.sglang.tree_layers import LayerCall
from deft_backend.hosts.sglang.versions import read_end

OWN_STATE = "deft"  # the attribute of the host's backend that holds everything of ours


def _computing(name: str) -> Callable[..., Any]:
    """A method that runs a layer: by the host's method of this name unless the step is planned."""

    def method(
        self: DeftAttentionBackend,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        layer: Any = None,
        forward_batch: Any = None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        layers = self.deft.layers
        call = LayerCall(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        if layers.has_planned(forward_batch):
            return layers.run(call)
        layers.leave_split()
        return call.by(getattr(layers.host, name))

    return method


class DeftAttentionBackend:
    """Methods that replace those of the host's class; :func:`surround` makes the instances."""

    deft: TreeSteps

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.deft.begin(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        begin = self.deft.begin_capture if in_capture else self.deft.begin_replay
        begin(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.deft.launch_planning(forward_batch)
        self.deft.layers.host.init_forward_metadata_in_graph(forward_batch)

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        self.deft.load_drafts(spec_info, cuda_graph_bs)
        host = self.deft.layers.host
        host.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    forward = _computing("forward")
    forward_decode = _computing("forward_decode")
    forward_extend = _computing("forward_extend")

    def shared_read_ends(self, mode: Any) -> Any:
        """When a replay has read the page tables: ours reads them until the forward ends."""
        if self.deft.reads_during_forward(mode):
            return read_end()
        return self.deft.layers.host.shared_read_ends(mode)

    def resolve_prefill_shared_read_ends(self, forward_batch: Any, **kwargs: Any) -> Any:
        """The same for a prefill, whose host metadata is made (SGLang asks from 0.5.22 on)."""
        if self.deft.layers.splits:
            return read_end()
        host = self.deft.layers.host
        return host.resolve_prefill_shared_read_ends(forward_batch, **kwargs)


def surround(host: Any, steps: TreeSteps) -> Any:
    """The host's backend with tree attention: a subclass of its class, with its attributes. Raises
    RuntimeError if the host's object has an own method where ours would replace one.
    """
    hidden = sorted(
        name for name in vars(host) if callable(getattr(DeftAttentionBackend, name, None))
    )
    if hidden:
        raise RuntimeError(
            f"{type(host).__name__} sets {hidden[0]} on its instances, which would hide the "
            "plugin's method"
        )
    backend: Any = object.__new__(_subclass_of(host.__class__))
    backend.__dict__ = vars(host)
    setattr(backend, OWN_STATE, steps)
    return backend


@functools.cache
def _subclass_of(host: type) -> type:
    # The host decides by names of classes, too: whether a graph of verifications reads a mask.
    return new_class(host.__name__, (DeftAttentionBackend, host))
