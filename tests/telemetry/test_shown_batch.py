"""The last batch, copied while the server may be capturing graphs."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from deft_backend.telemetry.shown_batch import Batch, forest_of


def test_a_copy_does_not_disturb_a_capture(monkeypatch):
    """The thread chooses the mode "relaxed" before its first call of CUDA."""
    calls = []

    def exchange(mode):
        calls.append(mode._obj.value)
        return 0

    library = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: calls.append("stream"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    lens = SimpleNamespace(device=torch.device("cuda"), cpu=lambda: torch.tensor([2, 3]))
    found = forest_of(Batch(torch.tensor([[1, 2, 0], [1, 3, 4]]), lens, 1))
    assert calls == [2, "stream"]
    assert (found.tokens_attended, found.tokens_stored) == (5, 4)
