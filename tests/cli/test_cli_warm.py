"""`deft warm`: fills a folder without a GPU, and refuses what no server could use."""

import json
from functools import partial

import torch
from triton import knobs

from commands import run
from deft_backend.compile.kernel_folder import Origin, Taken, take
from deft_backend.compile.variants import compile_all, compiling_for
from deft_backend.hosts.common.described_server import DescribedServer
from deft_backend.kernels import Gpu
from deft_backend.settings.config import Settings

warm = partial(run, "warm", COLUMNS="200")


def test_a_server_finds_its_kernels_in_the_folder(tmp_path):
    """Batches of two need few kernels."""
    folder = tmp_path / "kernels"
    arguments = "--heads 64/8 --tensor-parallel 2 --host sglang --max-batch 2 --target sm_90"
    code, out, err = warm(*arguments.split(), DEFT_KERNEL_CACHE=str(folder))
    assert (code, err) == (0, "")
    assert "for sm_90: DescribedServer(host='sglang', num_query_heads=32, num_kv_heads=4, " in out
    count = len(json.loads((folder / "manifest.json").read_text())["kernels"])
    assert f"{folder} holds {count} kernels" in out.replace("\n", "")
    assert f"{count} compiled on " in out
    server = DescribedServer("sglang", 32, 4, 128, torch.bfloat16, 1, 2)
    wanted = server.variants(Gpu.named("sm_90"), Settings())
    assert count == len(wanted)
    with knobs.cache.scope(), compiling_for(90):
        knobs.cache.dir = str(tmp_path / "triton")
        assert take(folder, Origin.of("sm_90")) == Taken(copied=count, held=0, damaged=0)
        done = compile_all(wanted)
    assert (done.compiled, done.cached) == (0, count)
