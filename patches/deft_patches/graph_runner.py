"""The host's class of runners that capture and replay decode CUDA graphs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any


def decode_graph_runner(model_runner: Any = None) -> type | None:
    """The class of a model runner's graph runner; SGLang's default class without a model runner.

    None if this host has no such class.
    """
    try:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    except ImportError:
        return None
    # Model runners of other packages choose their own class in this method.
    choose = getattr(model_runner, "_decode_cuda_graph_runner_cls", None)
    chosen: type = DecodeCudaGraphRunner if choose is None else choose()
    return chosen


def other_parameters(owner: type | None, expected: Mapping[str, Sequence[str]]) -> str | None:
    """In one line, which method with these first parameters the class lacks; or None."""
    if owner is None:
        return "there is no DecodeCudaGraphRunner"
    for name, parameters in expected.items():
        method = getattr(owner, name, None)
        if method is None:
            return f"{owner.__name__} has no {name}"
        found = list(inspect.signature(inspect.unwrap(method)).parameters)
        if found[: len(parameters)] != list(parameters):
            return f"{name} of {owner.__name__} takes {found}, not {list(parameters)} first"
    return None


def checked_graph_runner(model_runner: Any, expected: Mapping[str, Sequence[str]]) -> type:
    """The class of a model runner's own runner.

    Raises RuntimeError if it lacks methods with these parameters.
    """
    owner = decode_graph_runner(model_runner)
    lacks = other_parameters(owner, expected)
    if owner is None or lacks is not None:
        raise RuntimeError(lacks)
    return owner
