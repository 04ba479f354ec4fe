"""Call functions of the tests in every process of a server, as a plugin of its host."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUPS = ("sglang.srt.plugins", "vllm.general_plugins")
QUICK_INTERPRETER = "quick_interpreter:install"
HOST_CALLS = "host_calls:install"  # notes how the host calls the adapter
CPU_BACKEND = "vllm_cpu_backend:install"  # for vLLM's servers with tree attention on the CPU

ANY_SHARING = f"{__name__}:take_whatever_is_shared"


def take_whatever_is_shared():
    """Let servers of MLA models, and mixed steps, take every batch that shares something.

    The tests' prompts are too short, and their models too shallow, for a gain.
    """
    from deft_backend.attention import LatentAttention

    LatentAttention.gains = lambda attention, forest, num_layers: True
    from deft_backend.hosts.common import eager_steps

    eager_steps.PLAN_MS = eager_steps.LAYER_MS = 0.0


def plugin_settings(folder, *targets):
    """Write entry points of `targets`, each ``module:function``; returns settings of servers."""
    described = folder / "deft_tests-0.0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: deft-tests\nVersion: 0\n")
    lines = [f"deft_tests_{i} = {target}" for i, target in enumerate(targets)]
    sections = ["\n".join([f"[{group}]", *lines]) for group in GROUPS]
    (described / "entry_points.txt").write_text("\n".join(sections))
    paths = [str(folder), str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
