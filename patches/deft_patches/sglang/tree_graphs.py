"""A second set of decode CUDA graphs, with tree attention instead of the host's kernel.

Changes, on ``DecodeCudaGraphRunner`` (SGLang 0.5.17 to 0.5.23) or the class that a model runner
    has instead, for runners that have a controller:
    ``capture_one_shape``: captures the host's graph of a batch size, then the same forward once
    more, under a label of its own. The controller learns when the second capture begins and ends;
    ``_resolve_lora_variant``: gives that label to batches that the controller takes, so that the
    host replays the second graph. All other batches replay the host's graph.
Why: the CPU knows before every step of MLA whether it shares enough; a graph cannot choose.
    The host's own graph variants (0.5.20 on) do not serve: it makes them from the model's
    configuration alone, and asks which one a batch takes after it has asked ``shared_read_ends``.
Serves the graph backend "full" alone (one graph for a whole forward).
Harmless to runners without a controller: the wrappers only call the host's methods.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from deft_patches.wrapping import graph_runner, wrap

LABEL = "deft"

_controllers: dict[int, Any] = {}  # by the id of the model runner


def install(model_runner: Any, controller: Any) -> Callable[[], object]:
    """Give `model_runner` a second set of graphs; before its graphs are captured.

    Batches for which ``controller.takes(forward_batch)`` is true replay the second set.
    ``controller.capture_tree(capturing)`` hears when its captures begin and end. The returned
    function leaves the runner the host's graphs alone.
    """
    owner = graph_runner(model_runner)
    wrap(owner, "capture_one_shape", _capture_one_shape)
    wrap(owner, "_resolve_lora_variant", _resolve_variant)
    _controllers[id(model_runner)] = controller
    return partial(_controllers.pop, id(model_runner), None)


def _capture_one_shape(
    original: Any,
    runner: Any,
    size: int,
    forward: Any,
    stream_idx: int | None = None,
    variant_label: str | None = None,
    *others: Any,
    **named: Any,
) -> None:
    original(runner, size, forward, stream_idx, variant_label, *others, **named)
    controller = _controllers.get(id(runner.model_runner))
    if controller is None:
        return
    controller.capture_tree(True)
    try:
        original(runner, size, forward, stream_idx, _labelled(variant_label), *others, **named)
    finally:
        controller.capture_tree(False)


def _resolve_variant(original: Any, runner: Any, forward_batch: Any) -> str | None:
    label: str | None = original(runner, forward_batch)
    controller = _controllers.get(id(runner.model_runner))
    mode = forward_batch.forward_mode
    if controller is None or not (mode.is_decode() or mode.is_target_verify()):
        return label
    return _labelled(label) if controller.takes(forward_batch) else label


def _labelled(label: str | None) -> str:
    return LABEL if label is None else f"{label}+{LABEL}"
