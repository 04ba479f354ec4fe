"""On GPUs: every token of every variant equals the host's own, or is a tie that rounding decides.

Servers run with the overlap scheduler and CUDA graphs. If the environment names a folder in
``GPU_REPORT``, the comparisons are written there.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.e2e.checked_answers import TOLERANCE, Sample, check
from benchmarks.e2e.kept_answers import ask, compare
from benchmarks.e2e.served_model import Model
from deft_backend.harness.client import Client
from deft_backend.harness.provenance import provenance
from deft_backend.servers.driver_stub import num_gpus
from integration_tests.common.control import ask_to, changed_weights
from integration_tests.common.server import Server
from integration_tests.gpu.forest_traffic import answered, requests
from integration_tests.gpu.sglang_variants import ADAPTER, VARIANTS

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")

on_each = pytest.mark.parametrize("variant", VARIANTS, indirect=True)

TOO_FEW = "batch smaller than DEFT_MIN_BATCH=2"
LITTLE_SHARED = "shares less than DEFT_MIN_SHARE=1.1"

MOSTLY = 0.9
"""Least share of equal tokens, not just ties, in a correct run."""


@on_each
def test_every_token_is_the_hosts(variant: str, pair: tuple[Server, Server], model: Model) -> None:
    """Two rounds of a forest whose requests join, end and hang up."""
    ours, theirs = pair
    adapters = (None, ADAPTER) if VARIANTS[variant].lora else (None,)
    found = {}
    for adapter in adapters:
        found[adapter or "base"] = asyncio.run(
            _checked(ours, theirs, model, adapter, tolerance(variant))
        )
    _report(variant, "forest", found)
    for checked in found.values():
        assert not checked["wrong"], checked["first_wrong"]
        assert checked["tokens"] > 2000
        assert checked["ties"] < (1 - MOSTLY) * checked["tokens"]
    assert not ours.trouble()


@pytest.mark.parametrize("variant", ["lora"], indirect=True)
def test_an_adapter_beside_its_base(
    variant: str, pair: tuple[Server, Server], model: Model
) -> None:
    """Requests with and without the adapter decode together, and give the same answers as alone."""
    ours, theirs = pair

    async def both() -> list[Any]:
        adapters = (None, ADAPTER)
        answers = await asyncio.gather(*(_answers(ours, model, adapter) for adapter in adapters))
        return [
            await _compared(samples, theirs, adapter, tolerance(variant))
            for samples, adapter in zip(answers, adapters, strict=True)
        ]

    found = dict(zip(("base", "adapter"), asyncio.run(both()), strict=True))
    _report(variant, "together", found)
    assert not any(checked["wrong"] for checked in found.values()), found


@pytest.mark.parametrize("variant", ["memory-saver"], indirect=True)
def test_memory_is_released_and_weights_change(
    variant: str, pair: tuple[Server, Server], model: Model, tmp_path: Path
) -> None:
    """As an RL trainer does after each step: release, resume, new weights, samples."""
    other = changed_weights(Path(model.path), tmp_path)
    ours, theirs = pair
    found = {}
    for name, path in (("new weights", other), ("old weights", Path(model.path))):
        assert ask_to(ours, "release_memory_occupation") == 200
        assert ask_to(ours, "resume_memory_occupation") == 200
        for server in pair:
            assert ask_to(server, "update_weights_from_disk", {"model_path": str(path)}) == 200
        found[name] = asyncio.run(_checked(ours, theirs, model, None, tolerance(variant)))
    _report(variant, "released", found)
    assert not any(checked["wrong"] for checked in found.values()), found


@on_each
def test_several_answers_to_one_prompt(
    variant: str, pair: tuple[Server, Server], model: Model
) -> None:
    """``n`` = 4: four answers that fork from one prompt."""
    ours, theirs = pair
    prompts = [asked.prompt for asked in requests(model.ids, 11)[:3]]

    settings = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "n": 4}
    body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": settings}
    answers = ours.post("generate", body)
    assert len(answers) == 4 * len(prompts)
    samples = [(prompts[at // 4], answer["output_ids"]) for at, answer in enumerate(answers)]
    assert all(len(ids) == 24 for _, ids in samples)

    async def forked() -> dict[str, Any]:
        async with _client(theirs) as client:
            return (await check(samples, client, tolerance(variant))).to_dict(tolerance(variant))

    found = asyncio.run(forked())
    _report(variant, "n=4", {"base": found})
    assert not found["wrong"], found["first_wrong"]


@on_each
def test_logprobs(variant: str, pair: tuple[Server, Server], model: Model) -> None:
    """All log-probabilities before the first tie are close."""
    prompts = [asked.prompt for asked in requests(model.ids, 12)]

    async def asked_both() -> dict[str, Any]:
        found = []
        for server in pair:
            async with _client(server) as client:
                found.append(await ask(client, prompts, 32))
        return compare(found[1], found[0])

    found = asyncio.run(asked_both())
    _report(variant, "log-probabilities", found)
    assert found["compared_tokens"] > 100
    assert found["logprob_difference_p99"] < tolerance(variant)
    assert not found["parted_outside_top"]


@on_each
def test_trees_were_decoded(variant: str, pair: tuple[Server, Server]) -> None:
    """Every step that shares KV went through tree attention, on every rank, and read less KV.

    A server that checks others' answers decodes many requests alone.
    """
    ours, _ = pair
    states = [ours.state(name) for name in VARIANTS[variant].states]
    _report(variant, "steps", {
        name: states[0][name]
        for name in ("steps_tree", "steps_host", "plans", "kv_bytes_read", "kv_bytes_query_guided")
    })  # fmt: skip
    for state in states:
        assert state["steps_tree"] > 100
        assert state["kv_bytes_read"] < 0.6 * state["kv_bytes_query_guided"]
        assert set(state["steps_host"]) <= {TOO_FEW, LITTLE_SHARED}
        if variant not in {other.against for other in VARIANTS.values()}:
            assert state["steps_host"].get(TOO_FEW, 0) < 0.2 * state["steps_tree"]
        if VARIANTS[variant].in_step:
            assert state["steps_tree"] == states[0]["steps_tree"]


def tolerance(variant: str) -> float:
    """Largest difference of log-probability at which another token is a tie."""
    return TOLERANCE["float16" if variant == "float16" else "bfloat16"]


def _client(server: Server, adapter: str | None = None) -> Client:
    fields = {"lora_path": adapter} if adapter else {}
    return Client(server.process.url, "sglang", fields)


async def _checked(
    ours: Server, theirs: Server, model: Model, adapter: str | None, tolerance: float
) -> dict[str, Any]:
    return await _compared(await _answers(ours, model, adapter), theirs, adapter, tolerance)


async def _answers(ours: Server, model: Model, adapter: str | None) -> list[Sample]:
    samples = []
    async with _client(ours, adapter) as client:
        for seed in range(2):
            samples += await answered(client, requests(model.ids, seed))
    return samples


async def _compared(
    samples: list[Sample], theirs: Server, adapter: str | None, tolerance: float
) -> dict[str, Any]:
    async with _client(theirs, adapter) as client:
        return (await check(samples, client, tolerance, at_once=64)).to_dict(tolerance)


def _report(variant: str, what: str, found: Mapping[str, Any]) -> None:
    """Add to the variant's file in the folder that the environment names, if any."""
    if folder := os.environ.get("GPU_REPORT"):
        file = Path(folder) / f"{variant}.json"
        known = json.loads(file.read_text()) if file.is_file() else {"header": provenance()}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**known, what: found}, indent=1))
