"""What an adapter decides without its host: batches, failures that last, lines, ranks, MLA."""

import os
import subprocess
import sys
from ast import literal_eval
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deft_backend.attention import AttentionError
from deft_backend.hosts.common import latent, limits
from deft_backend.hosts.common.eager_steps import Repeats, has_one_way, shares_too_little
from deft_backend.hosts.common.latches import FailureLatch, OnceLog, differ
from deft_backend.kernels.latent import plain_latent_attention
from deft_backend.planner.on_device import largest_batch
from deft_backend.settings.config import Settings
from drawings import check_asked
from failure_lines import raising


def test_the_log_says_if_the_device_planner_holds_fewer_requests(caplog):
    assert limits.planned_on_device(largest_batch(), 1) == largest_batch()
    assert not caplog.records
    assert limits.planned_on_device(4096, 1) == largest_batch()
    assert "DEFT_MAX_BATCH asks for batches of up to 4096 requests, but the device" in caplog.text


def test_the_batches_that_tree_attention_decodes():
    """Of 2 to 4 requests; in eager steps those whose saved reads pay for the launches, on a GPU
    whose memory moves each byte of a layer in 1 ms.
    """
    sizes = Settings(min_batch=2, max_batch=4)
    moves = SimpleNamespace(transfer_ms=lambda ms: ms)

    def answer(what, first, second, *where):
        if what == "requests":
            yield str(limits.refused(int(first), sizes, planned=int(second)))
            return
        costs, prefills = moves if "gpu" in where else None, "prefills" in where
        yield str(shares_too_little(literal_eval(first), int(second), costs, prefills=prefills))

    check_asked(Path(__file__).with_name("batches.txt"), answer)


@pytest.mark.parametrize("policy", ["auto", "invariant", "fasttree"])
def test_modes_whose_results_must_not_depend_on_the_batch(policy):
    settings = Settings(policy=policy, min_batch=3)
    equal = limits.for_any_batch(settings, equal_bits=True)
    assert equal == replace(settings, policy="invariant", min_batch=1)
    own = limits.for_any_batch(settings, equal_bits=False)
    assert own == (equal if policy == "invariant" else settings)
    said = "the mode takes policy invariant, and DEFT_POLICY is fasttree: unset it"
    assert limits.other_policy(settings, "the mode") == (said if policy == "fasttree" else None)
    assert has_one_way(settings) == (policy == "invariant")
    assert has_one_way(replace(settings, verify=True))


PROGRAM = """
import sys
from types import SimpleNamespace
import torch
from torch import distributed
from deft_backend.hosts.common.limits import same_on_all_ranks

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = SimpleNamespace(world_size=2, cpu_group=None)
decisions = ("auto", torch.bfloat16, (128, 8), None)
for mine in (decisions, (*decisions, rank), None if rank else decisions, None):
    print(same_on_all_ranks(group, mine))
"""


def test_ranks_agree_whatever_their_hash_seeds(tmp_path):
    """Equal decisions, different ones, one rank without tree attention, and none with it."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        printed, _ = process.communicate(timeout=120)
        assert printed.split() == ["True", "False", "None", "None"]
    for alone in (None, SimpleNamespace(world_size=1)):
        found = [limits.same_on_all_ranks(alone, decisions) for decisions in ((), None)]
        assert found == [True, None]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("name", "given", "reason", "what"),
    [
        ("kernel_failed", (KeyError(1),), "kernel failed", "a kernel failed (KeyError(1))"),
        ("planning_failed", (KeyError(2),), "planning failed", "planning failed (KeyError(2))"),
        (
            "results_differ",
            (0.25, 0.004),
            "kernel failed",
            "DEFT_VERIFY: the results of tree attention and of the host's kernel differ by 0.25 "
            "(tolerance 0.004)",
        ),
    ],
)
def test_the_first_failure_is_logged_and_kept(graphs, name, given, reason, what, caplog):
    latch = FailureLatch()
    assert latch.reason is None
    if graphs:
        latch.keeps_graphs = lambda: True
    getattr(latch, name)(*given)
    latch.planning_failed(ValueError("later"))
    latch.kernel_failed(ValueError("later"))
    assert latch.reason == reason
    rest = "The host's kernel decodes from now on"
    if graphs:
        rest = "CUDA graphs that hold tree attention stay in use; the host's kernel decodes every "
        rest += "other step from now on"
    assert caplog.messages == [
        f"deft: {what}. {rest}; restart the server to use tree attention again."
    ]


def test_each_warning_is_logged_once(caplog):
    """Batches that cannot be planned: once for each type of error."""
    log = OnceLog()
    for _ in range(2):
        log.warn("so")
        log.layers_left("a window")
        for error in (KeyError(1), KeyError(2), ValueError(3)):
            log.batch_left(error)
    assert caplog.messages == [
        "deft: so",
        "deft: layers with a window decode through the host's kernel; the others use tree "
        "attention",
        "deft: planning failed (KeyError(1)). The host's kernel decodes such batches.",
        "deft: planning failed (ValueError(3)). The host's kernel decodes such batches.",
    ]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("largest", [0.0, 4.0])
def test_results_may_differ_by_a_share_of_the_largest_value(dtype, tolerance, eight_bits, largest):
    """Three times as much over a cache of 8 bits; results of zero by a millionth."""
    allowed = tolerance * (3 if eight_bits else 1) * (largest or 1e-6)
    host = torch.tensor([0.0, -largest], dtype=dtype)
    for sign in (-1, 1):
        ours = host.float() + torch.tensor([0.99 * sign * allowed, 0.0])
        assert differ(ours, host, eight_bits=eight_bits) is None
        found = differ(host + (ours - host) / 0.9, host, eight_bits=eight_bits)
        assert found == pytest.approx((1.1 * allowed, allowed), rel=1e-3)
    assert differ(host, host, eight_bits=eight_bits) is None
    assert differ(host * float("nan"), host, eight_bits=eight_bits) is not None


def test_a_repeat_with_other_bits_ends_all_repeats():
    answers, warned = [], []

    def repeat(layer, q, out):
        out.fill_(answers[-1])
        return True

    attention = SimpleNamespace(device=torch.device("cuda"), repeat=repeat)
    repeats = Repeats(attention, SimpleNamespace(warn=warned.append), verify=False)
    out = torch.zeros(2, dtype=torch.bfloat16)
    layer = (None, None, out)
    answers.append(1.0)
    assert not repeats.repeat(*layer, (1, 1))  # not before a trial
    repeats.run(lambda: out.fill_(1.0), *layer, (1, 1))
    assert repeats.repeat(*layer, (1, 1))
    assert not repeats.repeat(*layer, (2, 1))
    answers.append(2.0)
    repeats.run(lambda: out.fill_(1.0), *layer, (2, 1))
    assert out.tolist() == [1.0, 1.0]
    assert not repeats.repeat(*layer, (1, 1))
    assert (repeats.on, len(warned)) == (False, 1)
    assert not Repeats(attention, repeats._log, verify=True).on
    assert not Repeats(SimpleNamespace(device=torch.device("cpu")), repeats._log, verify=False).on


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def latent_attention(monkeypatch, device, dims=(512, 64), capability=(9, 0), **settings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(latent, "LatentAttention", lambda **given: SimpleNamespace(**given))
    own = (torch.int32, torch.int64)
    return latent.checked_latent_attention(
        8, dims, torch.bfloat16, device, "kernel", Settings(**settings), integers=own, max_batch=3
    )


@pytest.mark.parametrize(
    ("device", "changes", "said"),
    [
        (CUDA, {"capability": (8, 9)}, "needs a GPU of compute capability 9.0"),
        (CUDA, {"capability": (10, 0)}, "needs a GPU of compute capability 9.0"),
        (CUDA, {"dims": (256, 64)}, r"rank 256 \+ 64 is not supported \(512 \+ 64 is\)"),
        (CUDA, {"dims": (512, 32)}, r"rank 512 \+ 32 is not supported"),
        (CPU, {"policy": "fasttree"}, "follows the policy auto alone"),
    ],
)
def test_mla_that_is_the_hosts(device, changes, said, monkeypatch):
    with pytest.raises(limits.Unsupported, match=said):
        latent_attention(monkeypatch, device, **changes)


def test_mla_that_cannot_be_made_or_that_fails_its_check_is_the_hosts(monkeypatch):
    monkeypatch.setattr(latent, "failed_latent_check", lambda attention: "row 3 is off")
    with pytest.raises(limits.Unsupported, match="row 3 is off"):
        latent_attention(monkeypatch, CPU)
    monkeypatch.setattr(latent, "LatentAttention", raising(AttentionError("no room")))
    with pytest.raises(limits.Unsupported, match="no room"):
        latent.checked_latent_attention(
            8, (512, 64), torch.float32, CPU, "kernel", Settings(), integers=()
        )


@pytest.mark.parametrize("device", [CUDA, CPU])
def test_the_hosts_kernel_is_checked_once_it_is_compiled(device, monkeypatch):
    calls = []
    monkeypatch.setattr(latent, "failed_latent_check", lambda made: calls.append("check"))
    monkeypatch.setattr(latent, "latent_variants", lambda made, integers: integers)
    monkeypatch.setattr(latent, "ranks_cache", lambda *given: nullcontext("shared"))
    monkeypatch.setattr(latent, "compile_for_server", lambda *given: calls.append(given))
    made = vars(latent_attention(monkeypatch, device))
    kernel = "kernel" if device is CUDA else plain_latent_attention
    assert made == {
        **{"num_query_heads": 8, "dtype": torch.bfloat16, "device": device, "kernel": kernel},
        **{"value_dim": 512, "rope_dim": 64, "max_batch": 3},
    }
    compiled = [((torch.int32, torch.int64), CUDA, "shared")] if device is CUDA else []
    assert calls == [*compiled, "check"]
