"""Which of a model's layers run through tree attention, and why the host's kernel runs others."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Name = TypeVar("Name")
Layer = TypeVar("Layer")


class LayerShape(NamedTuple):
    """Heads of a layer's attention on this rank."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def gqa_group(self) -> int:
        return self.num_query_heads // self.num_kv_heads


@dataclass(frozen=True)
class Division(Generic[Name, Layer]):
    # The layers that run through tree attention, each with what the adapter knows of it.
    tree: Mapping[Name, Layer]
    host: Mapping[Name, str]  # for each other layer, the reason why the host's kernel runs it

    def text(self) -> str | None:
        """The division in one line, or None if tree attention runs every layer."""
        if not self.host:
            return None
        reasons = Counter(self.host.values()).most_common()
        parts = [f"{count} with {reason}" for reason, count in reasons]
        return (
            f"{len(self.tree)} of {len(self.tree) + len(self.host)} layers decode through tree "
            f"attention; {', '.join(parts)} through the host's kernels"
        )
