"""vLLM's own tests of its batch-invariant mode, with tree attention in place of its backends.

The variable VLLM_TESTS names the folder ``tests/v1/determinism`` of vLLM's sources.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deft_backend.tools.servers.driver_stub import num_gpus

pytest.importorskip("vllm")
TESTS = os.environ.get("VLLM_TESTS")
pytestmark = pytest.mark.skipif(
    not num_gpus() or TESTS is None, reason="the mode runs on a GPU, and VLLM_TESTS names its tests"
)

CHOSEN = "(needle and default) or (bs1_vs_bsN and 16-16) or ragged_chunked"
PLUGINS_FIRST = """
import vllm.config
from vllm.plugins import load_general_plugins

load_general_plugins()  # attention_config names the backend, and is read before vLLM loads plugins
"""
SHORTER = {  # the tokenizer has a token for each character
    "gpu_memory_utilization=0.9": "gpu_memory_utilization=0.2",
    "_random_prompt(300, 450) for _ in range(4)": "_random_prompt(100, 200) for _ in range(4)",
    "_random_prompt(800, 1200)": "_random_prompt(300, 450)",
}


def test_no_answer_depends_on_its_batch(byte_model, tmp_path):
    """A needle in batches, log-probabilities alone and in a batch, prompts in chunks."""
    files = {path.name: path.read_text() for path in Path(TESTS).glob("*.py")}
    files["conftest.py"] = PLUGINS_FIRST + files["conftest.py"]
    files["utils.py"] += '\nBACKENDS = ["DEFT"]\n'
    for text, other in SHORTER.items():
        assert text in files["test_batch_invariance.py"]
        files["test_batch_invariance.py"] = files["test_batch_invariance.py"].replace(text, other)
    for name in ("conftest.py", "utils.py", "test_batch_invariance.py"):
        (tmp_path / name).write_text(files[name])
    environment = {"VLLM_BATCH_INVARIANT": "1", "VLLM_TEST_MODEL": str(byte_model)}
    environment |= {"VLLM_MIN_PROMPT": "50", "VLLM_MAX_PROMPT": "300"}
    environment |= {"VLLM_GPU_MEMORY_UTILIZATION": "0.2", "VLLM_NEEDLE_TRIALS": "4"}
    command = [sys.executable, "-m", "pytest", "-q", "test_batch_invariance.py", "-k", CHOSEN]
    log = tmp_path / "log.txt"  # also of a run that somebody ends
    with log.open("w") as written:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=written,
            stderr=subprocess.STDOUT,
            timeout=800,
            check=False,
        )
    print(log.read_text()[-8000:])
    assert done.returncode == 0
    assert "3 passed" in log.read_text()
