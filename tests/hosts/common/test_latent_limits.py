"""Why MLA is the host's: its GPU, its ranks of latent vectors, its policy, or a failed set-up."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from deft_backend.attention import AttentionError
from deft_backend.hosts.common import latent
from deft_backend.hosts.common.limits import Unsupported
from deft_backend.kernels.latent import plain_latent_attention
from deft_backend.settings.config import Settings
from failure_lines import raising

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
    with pytest.raises(Unsupported, match=said):
        latent_attention(monkeypatch, device, **changes)


def test_mla_that_cannot_be_made_or_that_fails_its_check_is_the_hosts(monkeypatch):
    monkeypatch.setattr(latent, "failed_latent_check", lambda attention: "row 3 is off")
    with pytest.raises(Unsupported, match="row 3 is off"):
        latent_attention(monkeypatch, CPU)
    monkeypatch.setattr(latent, "LatentAttention", raising(AttentionError("no room")))
    with pytest.raises(Unsupported, match="no room"):
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


@pytest.mark.parametrize(
    ("attended", "device", "gains", "reason"),
    [
        (9, CUDA, True, "shares nothing"),
        (10, CUDA, True, None),
        (10, CUDA, False, "shares too little to be faster"),
        (10, CPU, False, None),
    ],
)
def test_what_a_plan_gains(attended, device, gains, reason):
    """On the CPU, where no costs are known, all that is shared."""
    attention = SimpleNamespace(device=device, gains=lambda forest, layers: gains)
    forest = SimpleNamespace(tokens_attended=attended, tokens_stored=9)
    assert latent.gains_too_little(attention, forest, 2) == reason
