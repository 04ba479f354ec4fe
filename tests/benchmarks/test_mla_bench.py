"""The MLA benchmark: peers compute what the host's kernel does, and a wrong result ends it."""

import json
from types import SimpleNamespace

import pytest
import torch
import typer

from benchmarks.kernel.methods import flashinfer_package
from benchmarks.latent import command as mla
from benchmarks.latent import flashinfer_latent, measure_latent
from benchmarks.latent.latent_case import LatentCase
from deft_backend.kernels.latent import plain_latent_attention
from deft_backend.tools.tuning.launch_clock import Budget

CPU = torch.device("cpu")
CASES = [
    LatentCase(3, 32, 20, 8, 1, 16), LatentCase(2, 16, 5, 4, 3, 1), LatentCase(2, 16, 8, 64, 1, 8),
]  # fmt: skip


class Wrapper:
    """FlashInfer's wrapper in PyTorch, as far as the benchmark uses it."""

    def __init__(self, workspace, *, use_cuda_graph, backend, **buffers):
        assert use_cuda_graph
        assert backend == "fa3"
        self.buffers = buffers

    def plan(self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, **options):
        given = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices,
                 "kv_len_arr": kv_len_arr}  # fmt: skip
        for name, values in given.items():
            assert values.dtype == torch.int32
            self.buffers[name].copy_(values)
        assert (options["head_dim_ckv"], options["head_dim_kpe"]) == (512, 64)
        assert options["q_data_type"] == options["kv_data_type"] == torch.bfloat16
        self.options = options

    def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache, out):
        assert q_nope.shape[1] == self.options["num_heads"]
        starts, pages, indices, lens = self.buffers.values()
        latents = torch.cat([ckv_cache, kpe_cache], dim=-1).float()
        for r, length in enumerate(lens.tolist()):
            kv = latents[indices[pages[r] : pages[r + 1]].long()]
            assert kv.shape[1] == self.options["page_size"]
            kv = kv.flatten(0, 1)[:length]
            rows = slice(int(starts[r]), int(starts[r + 1]))
            q = torch.cat([q_nope[rows], q_pe[rows]], dim=-1).float()
            scores = torch.einsum("thd,kd->htk", q, kv) * self.options["sm_scale"]
            if self.options["causal"]:
                hidden = torch.ones(scores.shape[1:], dtype=torch.bool)
                scores.masked_fill_(hidden.triu(length - len(q) + 1), float("-inf"))
            out[rows] = torch.einsum("htk,kd->thd", scores.softmax(-1), kv[:, :512]).to(out.dtype)


@pytest.fixture
def on_cpu(monkeypatch):
    """Clocks, graphs and kernels are stand-ins; plans and outputs are real."""

    def captured(launch):
        out = launch()
        return lambda: out.copy_(launch()), out

    package = SimpleNamespace(mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper))
    kernels = "sglang", plain_latent_attention, lambda call: plain_latent_attention(call)[0]
    monkeypatch.setattr(flashinfer_latent, "flashinfer", lambda: package)
    monkeypatch.setattr(measure_latent, "hosts_kernel", lambda: kernels)
    monkeypatch.setattr(measure_latent, "captured", captured)
    monkeypatch.setattr(measure_latent, "launch_us", lambda replay, budget: 3.0)


def test_every_case_has_a_row(on_cpu):
    peers = {"flashinfer": flashinfer_latent.flashinfer_decode}
    rows = list(measure_latent.measure(CASES, CPU, Budget(), peers))
    for row in rows[:2]:
        assert set(row["us"]) == {"host", "flashinfer", "plan", "lay_out", "deft"}
        assert set(row["error"]) == {"host", "flashinfer", "deft"}
        assert 0 < max(row["error"].values()) < measure_latent.TOLERANCE
    assert set(rows[2]["us"]) == {"host", "flashinfer"}
    assert "64" in rows[2]["refused"]


def test_a_wrong_peer_is_not_timed(on_cpu):
    def prepare(inputs):
        launch = flashinfer_latent.flashinfer_decode(inputs)
        return lambda: launch().mul_(1.1)

    with pytest.raises(measure_latent.WrongResult, match="flashinfer differs from float64"):
        list(measure_latent.measure(CASES[:1], CPU, Budget(), {"flashinfer": prepare}))


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Runs the command with ``--peers``, as on a GPU; its file."""

    def measure(cases, device, budget, peers):
        yield {"us": dict.fromkeys(("host", *peers), 3.0)}

    def run(asked):
        mla.mla(tmp_path / "new" / "mla.json", [64], 5, asked)
        return json.loads((tmp_path / "new" / "mla.json").read_text())

    monkeypatch.setattr(mla, "provenance", dict)
    monkeypatch.setattr(mla, "hosts_kernel", lambda: ("sglang",))
    monkeypatch.setattr(mla, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return run


@pytest.mark.parametrize("asked", [None, "flashinfer", "none"])
def test_flashinfer_where_it_is_installed(asked, written, monkeypatch):
    package = SimpleNamespace(__version__="0.6")
    monkeypatch.setattr(flashinfer_package, "flashinfer", lambda: package)
    found = written(asked)
    there = asked != "none"
    assert ("flashinfer" in found["rows"][0]["us"]) == there
    origin = "flashinfer 0.6, BatchMLAPagedAttentionWrapper(fa3)"
    assert found["header"] == {
        "kernel": "sglang", "peers": {"flashinfer": origin} if there else {},
    }  # fmt: skip


def absent():
    raise ImportError("no package")


def test_without_flashinfer_rows_have_no_such_peer(written, monkeypatch, capsys):
    monkeypatch.setattr(flashinfer_package, "flashinfer", absent)
    assert written(None)["rows"] == [{"us": {"host": 3.0}}]
    line = "without flashinfer: flashinfer cannot be imported: no package\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("asked", ["flashinfer", "fa2"])
def test_a_peer_that_is_missing_or_unknown_is_an_error(asked, written, monkeypatch, capsys):
    monkeypatch.setattr(flashinfer_package, "flashinfer", absent)
    with pytest.raises(typer.Exit):
        written(asked)
    assert asked in capsys.readouterr().err
