"""The attention backend: tree attention decodes and verifies; the host's backend does the rest.

The backend is the host's own backend, with some methods replaced. Its class inherits from the
host's class, and it shares the attributes of the host's object. So models that ask for the class,
or read and set attributes, meet the host's backend. All that is ours is in one attribute, ``deft``.
"""

from __future__ import annotations

import functools
from types import new_class
from typing import Any, Protocol

from deft_backend.hosts.sglang.step.extends import ExtendSteps
from deft_backend.hosts.sglang.step.tree_layers import LayerCall, TreeLayers
from deft_backend.hosts.sglang.versions import read_end

OWN_STATE = "deft"  # the attribute of the host's backend that holds everything of ours


class Steps(Protocol):
    """Decides which batches tree attention runs, and has them planned."""

    layers: TreeLayers
    extends: ExtendSteps | None
    needs_cpu_seq_lens: bool  # whether the host must keep sequence lengths in CPU memory

    def begin(self, forward_batch: Any) -> None:
        """An eager step begins."""
        ...

    def begin_capture(self, forward_batch: Any) -> None:
        """The host is about to capture a graph with this batch."""
        ...

    def begin_replay(self, forward_batch: Any) -> None:
        """The host is about to replay a graph for this batch."""
        ...

    def launch_planning(self, forward_batch: Any) -> None:
        """Launch what a graph repeats: recorded during a capture, run in the warm-up before it."""
        ...

    def load_drafts(self, spec_info: Any, graph_size: int | None) -> None:
        """The host has drafted, after it prepared the replay of a graph of this size."""
        ...

    def reads_during_forward(self, mode: Any) -> bool:
        """Whether the current step of this mode reads page tables until it ends."""
        ...


class DeftAttentionBackend:
    """Methods that replace those of the host's class; :func:`surround` makes the instances."""

    deft: Steps

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.deft.begin(forward_batch)
        if self.deft.extends is not None:
            self.deft.extends.begin(forward_batch)

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

    def forward(
        self, q: Any = None, k: Any = None, v: Any = None, layer: Any = None,
        forward_batch: Any = None, save_kv_cache: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        layers = self.deft.layers
        if layers.has_planned(forward_batch):
            return layers.run(LayerCall(q, k, v, layer, save_kv_cache, kwargs))
        return layers.host.forward(
            q=q, k=k, v=v, layer=layer, forward_batch=forward_batch, save_kv_cache=save_kv_cache,
            **kwargs,
        )  # fmt: skip

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        layers = self.deft.layers
        if layers.has_planned(forward_batch):
            return layers.run(LayerCall(q, k, v, layer, save_kv_cache, kwargs))
        host = layers.host
        return host.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        layers = self.deft.layers
        if layers.has_planned(forward_batch):  # a verification, or a short extend
            return layers.run(LayerCall(q, k, v, layer, save_kv_cache, kwargs))
        host = layers.host
        return host.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def shared_read_ends(self, mode: Any) -> Any:
        """When a replay has read what the scheduler writes (SGLang asks from 0.5.18 on).

        Tree attention reads a shared prefix through one request's row, in every layer. So the host
        must not write page tables before the forward ends.
        """
        if self.deft.reads_during_forward(mode) or self.deft.layers.extends():
            return read_end()
        return self.deft.layers.host.shared_read_ends(mode)

    def resolve_prefill_shared_read_ends(self, forward_batch: Any, **kwargs: Any) -> Any:
        """The same for a prefill, whose host metadata is made (SGLang asks from 0.5.22 on)."""
        if self.deft.layers.extends():
            return read_end()
        host = self.deft.layers.host
        return host.resolve_prefill_shared_read_ends(forward_batch, **kwargs)

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether the host must keep sequence lengths in CPU memory."""
        return self.deft.needs_cpu_seq_lens or bool(self.deft.layers.host.needs_cpu_seq_lens)


def surround(host: Any, steps: Steps) -> Any:
    """The host's backend with tree attention: a subclass of its class, with its attributes.

    The host's own object keeps its class. What it calls of itself is not replaced.

    Raises RuntimeError if the host's object has a method of its own in the place of one that ours
    would replace.
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
    return new_class(f"Deft{host.__name__}", (DeftAttentionBackend, host))
