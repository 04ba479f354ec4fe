"""The host's class of runners that capture and replay decode CUDA graphs."""

from collections.abc import Mapping, Sequence
from typing import Any

from deft_patches.wrapping import lacking


def checked_graph_runner(model_runner: Any, expected: Mapping[str, Sequence[str]]) -> type:
    """The class of a model runner's graph runner.

    Raises RuntimeError if the host has no such class, or it lacks methods with these first
    parameters.
    """
    try:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    except ImportError:
        raise RuntimeError("there is no DecodeCudaGraphRunner") from None
    # Model runners of other packages choose their own class in this method.
    choose = getattr(model_runner, "_decode_cuda_graph_runner_cls", None)
    owner: type = DecodeCudaGraphRunner if choose is None else choose()
    reason = lacking(owner, expected)
    if reason is not None:
        raise RuntimeError(reason)
    return owner
