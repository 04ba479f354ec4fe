"""The last batch, copied while the server may be capturing graphs."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from deft_backend.telemetry import shown_batch


def made(lens):
    """Requests that share nothing, in pages of two tokens."""
    table = torch.arange(10 * len(lens)).view(len(lens), 10)
    return shown_batch.Batch(table, torch.tensor(lens), 2)


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
    found = shown_batch.forest_of(shown_batch.Batch(torch.tensor([[1, 2, 0], [1, 3, 4]]), lens, 1))
    assert calls == [2, "stream"]
    assert (found.tokens_attended, found.tokens_stored) == (5, 4)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (None, "no batch has been planned on the device yet"),
        ("its layers differ", "its layers differ"),
        (made([1, 0]), "the last batch had no requests"),
        (made([2, 9]), "2 requests of up to 5 pages are too many to copy; expected at most 9 page"),
    ],
)
def test_batches_that_are_not_shown(batch, said, monkeypatch):
    monkeypatch.setattr(shown_batch, "LIMIT", 9)
    assert shown_batch.answer(batch)["error"].startswith(f"ShownBatchError: {said}")


def test_the_most_page_ids_take_256_mib():
    lens = torch.tensor([(256 << 20) // 4 + 1])
    said = shown_batch.answer(shown_batch.Batch(torch.zeros(1, 1), lens, 1))["error"]
    assert "too many to copy; expected at most 67108864 page ids" in said


def test_padding_is_left_out_and_the_limit_may_be_reached(monkeypatch):
    monkeypatch.setattr(shown_batch, "LIMIT", 10)
    assert shown_batch.forest_of(made([2, 9])).batch_size == 2
    assert shown_batch.forest_of(made([1, 9, 2])).tokens_attended == 11
