"""A second set of full CUDA graphs, with tree attention instead of the host's decode.

Changes, on ``ModelCudaGraphManager`` of model runner V2 (vLLM 0.26 to 0.33), for configurations
    that have a controller:
    ``capture``: captures the host's graphs, then the full ones once more. The controller learns
    when the second capture begins and ends, and the manager keeps its graphs apart. The host's
    memory profile, which captures its largest graphs, gets the bytes of both sets;
    ``run_fullgraph``: replays the second graph of a batch's size if the controller takes the step.
Why: the CPU knows before every step whether the batch shares enough; a graph cannot choose.
Harmless to managers without a controller: the wrappers only call the host's methods. Drafters have
    managers of another class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from deft_patches.wrapping import wrap

logger = logging.getLogger(__name__)

_GRAPHS = "deft_graphs"  # the attribute of a manager that holds its second set

_controllers: dict[int, Any] = {}  # by the id of the server's configuration


def install(vllm_config: Any, controller: Any) -> None:
    """Give the server of a configuration a second set of graphs; before graphs are captured.

    Steps for which ``controller.takes_step()`` is true replay the second set.
    ``controller.capture_tree(capturing)`` hears when its captures begin and end.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    wrap(ModelCudaGraphManager, "capture", _capture)
    wrap(ModelCudaGraphManager, "run_fullgraph", _run_fullgraph)
    _controllers.clear()  # a process serves one configuration
    _controllers[id(vllm_config)] = controller


def _capture(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.config import CUDAGraphMode

    result = original(manager, *args, **kwargs)
    controller = _controllers.get(id(manager.vllm_config))
    if controller is None:
        return result
    held = {name: vars(manager).get(name) for name in ("graphs", "_capture_descs")}
    if not all(isinstance(each, dict) for each in held.values()):
        logger.warning("deft: no second set of graphs can be captured; the host's graphs decode")
        return result
    profiled = getattr(manager, "_capture_mem_samples", None)
    first = [*(profiled or ())]
    full = held["_capture_descs"].get(CUDAGraphMode.FULL)
    manager.graphs, manager._capture_descs = {}, {CUDAGraphMode.FULL: full} if full else {}
    controller.capture_tree(True)
    try:
        original(manager, *args, **kwargs)
        setattr(manager, _GRAPHS, manager.graphs)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        alone = manager.vllm_config.parallel_config.tensor_parallel_size == 1
        logger.warning(
            "deft: a second set of graphs does not fit into memory; %s. Lower "
            "--gpu-memory-utilization, capture fewer sizes, or set DEFT_MLA=0",
            "the host's graphs decode" if alone else "this rank stops, as others may wait for it",
        )
        if not alone:
            raise
    finally:
        controller.capture_tree(False)
        vars(manager).update(held)
    if profiled is not None:
        # The host profiles memory: of its largest graphs, it extrapolates these bytes to all.
        second = profiled[len(first) :]
        profiled[:] = [sum(both) for both in zip_longest(first, second, fillvalue=0)]
    return result


def _run_fullgraph(original: Callable[..., Any], manager: Any, desc: Any) -> Any:
    controller = _controllers.get(id(manager.vllm_config))
    graphs = getattr(manager, _GRAPHS, {})
    if controller is None or desc not in graphs or not controller.takes_step():
        return original(manager, desc)
    held, manager.graphs = manager.graphs, graphs
    try:
        return original(manager, desc)
    finally:
        manager.graphs = held
