"""Query blocks, kernel configuration and target for each number of query tokens of a request."""

from __future__ import annotations

from typing import NamedTuple

from deft_backend.attention.device_target import target_of
from deft_backend.kernels import Gpu, KernelConfiguration, kernel_configuration
from deft_backend.policies import Target
from deft_backend.shapes.attention_shape import AttentionShape
from deft_backend.shapes.query_blocks import QueryBlocks


class QueryShape(NamedTuple):
    """How requests of so many query tokens are planned and run."""

    blocks: QueryBlocks
    config: KernelConfiguration
    target: Target


class QueryShapes(dict[int, QueryShape]):
    """The :class:`QueryShape` of each number of query tokens, made when it is first used."""

    def __init__(self, shape: AttentionShape, gpu: Gpu | None) -> None:
        super().__init__()
        self._shape = shape
        self._gpu = gpu

    def __missing__(self, query_tokens: int) -> QueryShape:
        shape = self._shape
        blocks = QueryBlocks.of(query_tokens, shape.gqa_group)
        config = kernel_configuration(
            shape.head_dim, shape.dtype, shape.device, shape.gqa_group, self._gpu,
            query_tokens=blocks.tokens, kv_dtype=shape.kv_dtype,
        )  # fmt: skip
        self[query_tokens] = QueryShape(blocks, config, target_of(config, shape, blocks))
        return self[query_tokens]
