"""The MLA benchmark: peers compute what the host's kernel does, and a wrong result ends it."""

import torch

from benchmarks.latent import measure_latent
from benchmarks.latent.latent_case import LatentCase
from deft_backend.kernels.latent import plain_latent_attention

CASES = [
    LatentCase(3, 32, 20, 8, 1, 16),
    LatentCase(2, 16, 5, 4, 3, 1),
    LatentCase(2, 16, 8, 64, 1, 8),
]


def test_every_case_has_a_row(monkeypatch):
    """Clocks, graphs and kernels are stand-ins; plans and outputs are real."""

    def captured(launch):
        out = launch()
        return lambda: out.copy_(launch()), out

    kernels = "sglang", plain_latent_attention, lambda call: plain_latent_attention(call)[0]
    monkeypatch.setattr(measure_latent, "hosts_kernel", lambda: kernels)
    monkeypatch.setattr(measure_latent, "captured", captured)
    monkeypatch.setattr(measure_latent, "launch_us", lambda replay, rep_ms: 3.0)
    rows = list(measure_latent.measure(CASES, torch.device("cpu"), 5, {}))
    for row in rows[:2]:
        assert set(row["us"]) == {"host", "plan", "lay_out", "deft"}
        assert set(row["error"]) == {"host", "deft"}
        assert 0 < max(row["error"].values()) < measure_latent.TOLERANCE
    assert set(rows[2]["us"]) == {"host"}
    assert "64" in rows[2]["refused"]
