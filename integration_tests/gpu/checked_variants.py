"""What the tests of both hosts' servers on GPUs share, and where their comparisons are written."""

import json
import os
from pathlib import Path

from benchmarks.e2e.answers import TOLERANCE, check
from benchmarks.e2e.run import client_of as connected
from deft_backend.files.provenance import provenance
from integration_tests.gpu.forest_traffic import answered, requests
from integration_tests.gpu.variants import FLEET


def reported_states(name, variant, ours):
    """The states of a server's ranks; ranks that decode the same batches took the same steps."""
    states = [ours.state(each) for each in variant.states]
    counts = "steps_tree steps_host plans kv_bytes_read kv_bytes_query_guided verified_tokens"
    late = ours.log.count(" at its first launch, in ")
    report(
        name, "steps", {**{each: states[0][each] for each in counts.split()}, "compiled_late": late}
    )
    if variant.in_step:
        assert len({state["steps_tree"] for state in states}) == 1
    return states


def tolerance(variant):
    """Largest difference of log-probability at which another token is a tie."""
    return TOLERANCE["float16" if variant == "float16" else "bfloat16"]


def client_of(server, adapter=None):
    field = {"sglang": "lora_path", "vllm": "model"}[FLEET.host]
    return connected(server.process.url, fields={field: adapter} if adapter else {})


async def answers(ours, model, adapter=None, *, alone=False):
    """Prompts and answers of two rounds of a forest; `alone`: prompts are computed one by one."""
    samples = []
    async with client_of(ours, adapter) as client:
        for seed in range(2):
            asked = requests(model.ids, seed)
            for each in asked if alone else ():
                await client.batch([each.prompt], 1)
            samples += await answered(client, asked)
    return samples


async def compared(samples, theirs, tolerance, adapter=None, *, alone=False):
    """What the host's server says about the answers."""
    async with client_of(theirs, adapter) as client:
        for prompt, _ in samples if alone else ():
            await client.batch([prompt], 1)
        found = await check(samples, client, tolerance, at_once=1 if alone else 64)
    return found.to_dict(tolerance)


def report(variant, what, found):
    """Add to the variant's file in the folder that the environment names, if any."""
    if folder := os.environ.get("GPU_REPORT"):
        file = Path(folder) / f"{variant}.json"
        known = json.loads(file.read_text()) if file.is_file() else {"header": provenance()}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**known, what: found}, indent=1))
