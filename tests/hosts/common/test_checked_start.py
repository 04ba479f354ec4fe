"""A server on a machine without recorded results checks its kernels, or uses the host's."""

import logging

import pytest
import torch

from attention_checks import tree_attention as heads_of_four
from deft_backend.attention import tree_attention
from deft_backend.hosts.common import warm_up
from deft_backend.hosts.common.warm_up import Drafts, LayerKind, StepTensors, failed_self_check


@pytest.fixture
def attention():
    return heads_of_four(dtype=torch.float16, page_size=16, max_batch=4, query_tokens=3)


def tensors_of(drafts=None):
    k_cache, v_cache = torch.zeros(3, 2, 16, 2, 64, dtype=torch.float16).unbind(1)
    return StepTensors(k_cache, v_cache, [64], drafts=drafts, layers=[LayerKind(soft_cap=True)])


def ran(monkeypatch, fault=False):
    """The rows, the soft cap and whether there is a token tree, of each run that follows."""
    found = []
    run_plan = tree_attention.run_plan

    def spy(config, plan, step, *rest, **named):
        found.append((len(step.q), step.logit_cap, step.ancestors is not None))
        run_plan(config, plan, step, *rest, **named)
        if fault:
            step.out[0] = -step.out[0]

    monkeypatch.setattr(tree_attention, "run_plan", spy)
    return found


@pytest.mark.parametrize(
    ("drafts", "kinds"),
    [
        (None, [(4, False)]),
        (Drafts(3, ragged=True), [(4, False), (12, False)]),
        (Drafts(3, trees=True, always=True), [(12, True)]),
    ],
)
def test_an_unknown_gpu_checks_each_kind_of_step(drafts, kinds, attention, monkeypatch, caplog):
    monkeypatch.setattr(warm_up, "gpu_name", lambda device: "NVIDIA L40S")
    monkeypatch.setattr(warm_up, "CHECK_SECONDS", 600.0)
    runs = ran(monkeypatch)
    with caplog.at_level(logging.INFO, "deft_backend"):
        assert failed_self_check(attention, tensors_of(drafts)) is None
    assert runs == [(rows, 20.0, trees) for rows, trees in kinds]
    # A server of an earlier test may still report from its thread.
    (line,) = [said for said in caplog.messages if "recorded results" in said]
    assert "NVIDIA L40S has no recorded results; its kernels passed a check" in line


def test_a_wrong_row_keeps_the_kernels_from_decoding(attention, monkeypatch):
    monkeypatch.setattr(warm_up, "gpu_name", lambda device: "NVIDIA A100-SXM4-80GB")
    ran(monkeypatch, fault=True)
    reason = failed_self_check(attention, tensors_of())
    assert reason is not None
    assert "NVIDIA A100-SXM4-80GB has no recorded results" in reason
    assert "decode, soft cap, planned on the device: row 0 is off by 2 " in reason


@pytest.mark.parametrize("gpu", [None, "NVIDIA H100 80GB HBM3"])
def test_the_cpu_and_recorded_gpus_check_nothing(gpu, attention, monkeypatch):
    monkeypatch.setattr(warm_up, "gpu_name", lambda device: gpu)
    monkeypatch.setattr(warm_up, "unrecorded", lambda name: None)
    runs = ran(monkeypatch, fault=True)
    assert failed_self_check(attention, tensors_of()) is None
    assert runs == []
