"""Why MLA is the host's: its GPU, its ranks of latent vectors, its policy, or a failed set-up."""

from types import SimpleNamespace

import pytest
import torch

from deft_backend.attention import AttentionError
from deft_backend.hosts.common import latent
from deft_backend.hosts.common.limits import Unsupported
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
