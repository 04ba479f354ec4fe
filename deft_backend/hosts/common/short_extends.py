"""Short extends: batches whose requests compute a few new tokens behind a cached prefix.

Beams in vLLM, second turns of chats and tool calls of agents arrive so, as prefill. Tree attention
computes such a batch like a verification of drafts: each request's new tokens are a chain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deft_backend.attention import Gpu, TreeAttention
from deft_backend.hosts.common.limits import refuse_if
from deft_backend.hosts.common.self_check import failed_self_check
from deft_backend.hosts.common.warm_up import Drafts, StepTensors, warm_up_attention
from deft_backend.planner import PlanCapacity
from deft_backend.policies.grouping import partial_result_bytes
from deft_backend.settings.config import Settings
from deft_backend.shapes import TILE_HEIGHTS

MOST_REQUESTS = 256  # of the largest batch, which plans and workspace are sized for
SMALLEST_SIZE = 4  # plans are made for few numbers of tokens: each compiles kernels of its own
MIN_SAVED_TOKENS, MIN_SAVED_MS = 64, 0.5  # of a step
LESS_MEMORY = 4  # the workspace may take this part of what a verification's may take


@dataclass(frozen=True, eq=False)
class ShortExtends:
    """Tree attention for short extends, and the rule that decides which batches it computes."""

    attention: TreeAttention  # with arrays of its own: the decoding requests' plan stays as it is
    sizes: tuple[int, ...]  # query tokens that plans are made for, ascending
    settings: Settings
    token_bytes: int  # of a token's KV in all layers that go through tree attention

    @classmethod
    def beside(
        cls, decode: TreeAttention, settings: Settings, num_layers: int
    ) -> ShortExtends | None:
        """Short extends of `num_layers` layers with this attention; None if it computes none."""
        attention = extend_attention(decode, settings)
        if attention is None:
            return None
        token_bytes = 2 * decode.num_kv_heads * decode.head_dim * decode.kv_dtype.itemsize
        return cls(attention, sizes_of(attention, settings), settings, token_bytes * num_layers)

    def size_for(self, longest: int) -> int | None:
        """Query tokens of the plan for requests of up to `longest` new tokens; None: too long."""
        return next((size for size in self.sizes if longest <= size), None)

    def saves_enough(self, size: int, attended: int, stored: float) -> bool:
        """Whether a plan for `size` query tokens reads so much less KV that it pays.

        The host's kernel reads the context of every request. A tile reads a shared token once for
        the requests that it holds.

        - `attended`: tokens of context of all requests.
        - `stored`: the same, with each shared token counted once.
        """
        read = max(stored, attended / requests_in_tile(self.attention, size))
        saved = attended - read
        if saved < MIN_SAVED_TOKENS or self.attention.device.type != "cuda":
            return saved >= MIN_SAVED_TOKENS
        milliseconds = self.attention.target.costs.transfer_ms(saved * self.token_bytes)
        return milliseconds >= MIN_SAVED_MS

    def warm_up(self, tensors: StepTensors) -> None:
        """Compile the kernels of every size; raises Unsupported if their check fails here."""
        for size in self.sizes:
            mine = tensors_of(tensors, size)
            smallest = self.settings.min_batch
            warm_up_attention(self.attention, mine, smallest=smallest)
            refuse_if(failed_self_check(self.attention, mine))


def extend_attention(
    decode: TreeAttention, settings: Settings, compiled_for: Gpu | None = None
) -> TreeAttention | None:
    """Attention for short extends of the same layers; None if a server computes none.

    `compiled_for` is the GPU that `decode` was made for, if that GPU is not at hand.
    """
    tokens = max(sizes_of(decode, settings), default=0)
    if not tokens or decode.policy.rules is None:  # the device planner plans them
        return None
    most = min(decode.max_batch, MOST_REQUESTS)
    result = tokens * partial_result_bytes(
        decode.num_query_heads, decode.head_dim, decode.dtype.itemsize
    )
    return TreeAttention(
        num_query_heads=decode.num_query_heads, num_kv_heads=decode.num_kv_heads,
        head_dim=decode.head_dim, dtype=decode.dtype, kv_dtype=decode.kv_dtype,
        device=decode.device, page_size=decode.page_size, max_batch=most, query_tokens=tokens,
        policy=decode.policy.name, compiled_for=compiled_for,
        capacity=PlanCapacity.for_batch(
            most, max(decode.target.tile_programs), LESS_MEMORY * result
        ),
    )  # fmt: skip


def sizes_of(attention: TreeAttention, settings: Settings) -> tuple[int, ...]:
    """Query tokens that plans of short extends are made for, ascending; none if they do not pay.

    A tile must hold the new tokens of two requests: only then do both read their KV together.
    """
    rows = attention.num_query_heads // attention.num_kv_heads
    size = min(settings.short_extends, max(TILE_HEIGHTS) // (2 * rows))
    sizes = [size] if size > 1 else []
    while sizes and sizes[0] // 2 >= SMALLEST_SIZE:
        sizes.insert(0, sizes[0] // 2)
    return tuple(sizes)


def requests_in_tile(attention: TreeAttention, size: int) -> int:
    """Requests of `size` query tokens that a tile holds."""
    rows = size * attention.num_query_heads // attention.num_kv_heads
    return max(1, max(TILE_HEIGHTS) // rows)


def tensors_of(tensors: StepTensors, size: int) -> StepTensors:
    """The tensors of short extends of one size, in a server whose steps pass `tensors`."""
    return replace(tensors, drafts=Drafts(size, ragged=True, always=True))
