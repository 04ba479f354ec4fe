"""What happens on a GPU alone, with stand-ins: in which order, and why MLA is the host's there."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from deft_backend.attention import AttentionError, plain_latent_attention
from deft_backend.hosts.common import latent, warm_up
from deft_backend.hosts.common.limits import Unsupported
from deft_backend.settings.config import Settings
from failure_lines import raising

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def calls(monkeypatch):
    """What was called, in order."""
    found = []

    def note(module, name, result=None):
        def noted(*given, **named):
            found.append(name)
            return result

        monkeypatch.setattr(module, name, noted)

    for name, result in (("step_variants", ["v"]), ("compile_all", "done"), ("_run_steps", None)):
        note(warm_up, name, result)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append(device))
    note(latent, "latent_variants")
    note(latent, "compile_for_server")
    note(latent, "failed_latent_check")
    monkeypatch.setattr(latent, "ranks_cache", lambda settings, device: nullcontext())
    return found


@pytest.mark.parametrize(
    ("device", "interpreted", "done", "expected"),
    [
        (CUDA, False, "done", ["step_variants", "compile_all", "_run_steps", CUDA]),
        (CPU, False, None, ["_run_steps"]),
        (CPU, True, None, []),
    ],
)
def test_kernels_are_compiled_before_they_run_and_end_before_requests(
    device, interpreted, done, expected, calls
):
    attention = SimpleNamespace(device=device, interpreted=interpreted)
    assert warm_up.warm_up_attention(attention, None) == done
    assert calls == expected


def latent_attention(monkeypatch, device, dims=(512, 64), capability=(9, 0), **settings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(latent, "LatentAttention", lambda **given: SimpleNamespace(**given))
    own = (torch.int32, torch.int64)
    return latent.checked_latent_attention(
        8, dims, torch.bfloat16, device, "kernel", Settings(**settings), integers=own, max_batch=3
    )


@pytest.mark.parametrize(
    ("device", "kernel", "compiled"),
    [
        (CUDA, "kernel", ["latent_variants", "compile_for_server"]),
        (CPU, plain_latent_attention, []),
    ],
)
def test_mla_is_checked_after_its_kernels_are_compiled(
    device, kernel, compiled, calls, monkeypatch
):
    made = latent_attention(monkeypatch, device)
    assert (made.kernel, made.value_dim, made.rope_dim, made.max_batch) == (kernel, 512, 64, 3)
    assert calls == [*compiled, "failed_latent_check"]


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
def test_mla_that_is_the_hosts(device, changes, said, calls, monkeypatch):
    with pytest.raises(Unsupported, match=said):
        latent_attention(monkeypatch, device, **changes)
    assert calls == []


def test_mla_that_cannot_be_made_or_that_fails_its_check_is_the_hosts(calls, monkeypatch):
    monkeypatch.setattr(latent, "failed_latent_check", lambda attention: "row 3 is off")
    with pytest.raises(Unsupported, match="row 3 is off"):
        latent_attention(monkeypatch, CPU)
    monkeypatch.setattr(latent, "LatentAttention", raising(AttentionError("no room")))
    with pytest.raises(Unsupported, match="no room"):
        latent.checked_latent_attention(
            8, (512, 64), torch.float32, CPU, "kernel", Settings(), integers=()
        )


@pytest.mark.parametrize(
    ("stored", "device", "gains", "said"),
    [
        (10, CUDA, True, "shares nothing"),
        (9, CUDA, False, "shares too little to be faster"),
        (9, CUDA, True, None),
        (9, CPU, False, None),
    ],
)
def test_what_gains_too_little(stored, device, gains, said):
    forest = SimpleNamespace(tokens_attended=10, tokens_stored=stored)
    attention = SimpleNamespace(device=device, gains=lambda forest, layers: gains and layers == 4)
    assert latent.gains_too_little(attention, forest, 4) == said
