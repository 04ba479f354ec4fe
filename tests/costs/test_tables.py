"""Cost tables: their keys and files, and the table that a GPU without one of its own takes."""

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attention_checks import tree_attention
from cost_keys import KEY
from deft_backend.costs import CostModel, table_lookup, tables
from deft_backend.costs.cost_model import DEFAULT_TABLE, CostModelError, default_cost_model
from deft_backend.settings.version import VERSION
from deft_backend.shapes import DTYPE_BYTES, TILE_SEGMENTS, AttentionShape
from failure_lines import raising


def test_a_tuned_table_is_found_again(tmp_path):
    model = replace(default_cost_model(), source="tuned here")
    table_lookup.save_table(model, KEY, tmp_path / "deeper" / KEY.file_name)
    found = table_lookup.table_in_use(KEY, tmp_path / "deeper")
    assert (found.tuned, found.notice) == (True, None)
    assert table_lookup.cost_model_for(KEY, tmp_path / "deeper").source == "tuned here"
    np.testing.assert_array_equal(found.model.time_ms, model.time_ms)
    other = replace(KEY, triton="3.7.0")
    assert not table_lookup.table_in_use(other, tmp_path / "deeper").tuned


def test_elsewhere_the_shipped_table_is_used_and_the_log_says_so_once(tmp_path, caplog):
    caplog.set_level("INFO")
    assert table_lookup.cost_model_for(KEY, tmp_path) is default_cost_model()
    table_lookup.cost_model_for(KEY, tmp_path)
    (record,) = caplog.records
    assert "the cost table of an NVIDIA H100 80GB HBM3" in record.message
    assert "none was measured on this NVIDIA A100-SXM4-40GB" in record.message
    assert "deft tune --heads 32/8 --head-dim 128 --dtype fp16 --page-size 1" in record.message


NO_KEY = ": key is None; expected an object with " + ", ".join(
    sorted(tables.TableKey.__annotations__)
)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("list", NO_KEY),
        ("no key", NO_KEY),
        ("key", ": its key is another one than its name says"),
        ("time", ": time_ms holds a time that is not positive"),
        ("link", ": it is a symbolic link; expected the file itself; expected a file"),
        ("folder", ": Permission denied"),
    ],
)
def test_a_damaged_file_is_named_in_one_warning_and_ignored(
    damage, said, tmp_path, monkeypatch, caplog
):
    key = replace(KEY, gpu="NVIDIA H100 80GB HBM3")
    path = tmp_path / key.file_name
    table_lookup.save_table(default_cost_model(), key, path)
    data = json.loads(path.read_text())
    if damage == "no key":
        del data["key"]
    elif damage == "key":
        data["key"]["head_dim"] = 64
    elif damage == "time":
        data["time_ms"][0][0] = -1.0
    path.write_text(json.dumps([] if damage == "list" else data))
    if damage == "link":
        path.unlink()
        path.symlink_to("nowhere")
    elif damage == "folder":  # that nobody may enter
        monkeypatch.setattr(Path, "exists", raising(PermissionError(13, "Permission denied")))
    for _ in range(2):
        assert table_lookup.cost_model_for(key, tmp_path) is default_cost_model()
    assert caplog.messages == [
        f"deft: cost table {path}{said}; the file is ignored. {key.command} measures it again"
    ]


@pytest.mark.parametrize("gpu", ["", "NVIDIA L40S"])
def test_the_key_of_an_attention(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    heads = {"query_heads": 32, "kv_heads": 8, "head_dim": 128}
    device, kind = torch.device("cuda" if gpu else "cpu"), torch.bfloat16
    shape = AttentionShape(*heads.values(), torch.float16, kind, device, 16)
    key = table_lookup.table_key(shape)
    versions = {"torch": torch.__version__, "triton": version("triton")}
    own = {"package": VERSION, "kernels": table_lookup.kernels_digest()}
    assert key == tables.TableKey(
        gpu=gpu, **own, **versions, **heads, dtype="bfloat16", page_size=16
    )
    assert re.fullmatch("[0-9a-f]{16}", key.kernels)
    assert (key.gqa_group, key.shape) == (
        4,
        "heads 32/8, head dimension 128, bfloat16, page size 16",
    )
    assert key.command == ("deft tune --heads 32/8 --head-dim 128 --dtype bf16 --page-size 16")
    monkeypatch.setattr(table_lookup, "installed_version", lambda name: None)
    assert table_lookup.table_key(shape) == replace(key, triton="unknown")


@pytest.mark.parametrize("untold", [None, "clock_rate", "memory_clock_rate", "memory_bus_width"])
@pytest.mark.parametrize("zero", [True, False])
def test_the_drivers_facts_of_a_gpu(untold, zero, monkeypatch):
    """Those of an H100 SXM, whose memory delivers 3.35 TB/s; a part of a GPU tells less."""
    clocks = {"clock_rate": 1_980_000, "memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
    if untold is not None:
        del clocks[untold]
        clocks |= {untold: 0} if zero else {}
    properties = SimpleNamespace(multi_processor_count=132, **clocks)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    facts = tables.gpu_facts(torch.device("cuda"))
    assert facts == (None if untold else tables.GpuFacts(132, 1980.0, pytest.approx(3352.32)))
    assert tables.gpu_facts(torch.device("cpu")) is None


def test_the_bytes_of_an_element_are_torchs():
    sizes = {name: getattr(torch, name).itemsize for name in DTYPE_BYTES}
    assert sizes == DTYPE_BYTES


def test_only_a_users_own_table_must_be_private(tmp_path):
    """A package's files may be anybody's: root may have installed it."""
    path = tmp_path / "table.json"
    path.write_text(DEFAULT_TABLE.read_text())
    path.chmod(0o666)
    assert tables.read_key(path) == tables.read_key(DEFAULT_TABLE)
    with pytest.raises(CostModelError, match="mode 0666"):
        tables.read_key(path, private=True)


def test_the_shipped_table_is_scaled_by_bytes():
    model = default_cost_model()
    key = replace(tables.read_key(DEFAULT_TABLE), gpu="")
    assert tables.shipped_for(key) is model
    assert tables.shipped_for(replace(key, dtype="bfloat16")) is model
    half = tables.shipped_for(
        replace(key, query_heads=16, kv_heads=4, head_dim=64, dtype="bfloat16")
    )
    assert half.head_dim == 64
    assert half.source == f"{model.source}; scaled to 16 query heads of 64 bfloat16"
    assert tree_attention()._shapes[1].target.cost_model.head_dim == 64
    wider = tables.shipped_for(
        replace(key, query_heads=2 * key.query_heads, kv_heads=2 * key.kv_heads)
    )
    assert wider.tiles == replace(model.tiles, partial_ns=2 * model.tiles.partial_ns)
    assert half.tiles.token_ns == tuple(time / 2 for time in model.tiles.token_ns)
    assert half.tiles.item_ns == model.tiles.item_ns
    assert half.tiles.partial_ns == pytest.approx(model.tiles.partial_ns / 4)
    np.testing.assert_allclose(half.time_ms - half.launch_ms, (model.time_ms - model.launch_ms) / 2)
    for head_dim in (64, 96, 128, 256):  # tables that CostModel accepts
        for dtype in DTYPE_BYTES:
            small = replace(key, query_heads=8, kv_heads=2, head_dim=head_dim, dtype=dtype)
            assert isinstance(tables.shipped_for(small), CostModel)


@pytest.mark.parametrize("table", tables.shipped_tables(), ids=lambda table: table.path.stem)
def test_a_measured_gpu_plans_with_its_own_table_and_others_by_their_facts(table, tmp_path, caplog):
    assert table.path in tables.SHIPPED_TABLES
    measured = table.key
    key = replace(KEY, gpu=measured.gpu, dtype=measured.dtype, kv_heads=measured.kv_heads)
    caplog.set_level("INFO")
    assert table_lookup.cost_model_for(key, tmp_path, table.facts) is table.model
    assert table_lookup.cost_model_for(key, tmp_path) is table.model  # the driver tells nothing
    assert not caplog.records
    assert len(table.model.tiles.item_ns) == TILE_SEGMENTS.count(1)
    was, model = table.facts, table.model
    assert tables.derived_table(table, was) is tables.derived_table(table, None) is model
    half = tables.GpuFacts(was.sms // 2, was.sm_clock_mhz / 2, was.memory_gb_s / 4)
    found = tables.derived_table(table, half)
    assert found.bandwidth_gb_s == pytest.approx(model.bandwidth_gb_s / 4)
    assert found.tiles.item_ns == pytest.approx([2 * time for time in model.tiles.item_ns])
    assert found.tiles.token_ns == pytest.approx([2 * time for time in model.tiles.token_ns])
    assert found.tiles.partial_ns == pytest.approx(4 * model.tiles.partial_ns)
    assert found.tiles.reduce_ns == pytest.approx(2 * model.tiles.reduce_ns)
    np.testing.assert_allclose(
        found.time_ms - found.launch_ms, 2 * (model.time_ms - model.launch_ms)
    )
    assert (found.launch_ms, found.fasttree) == (model.launch_ms, model.fasttree)
    assert f"{half.sms} SMs" in found.source


def test_another_gpu_takes_the_table_of_the_gpu_most_like_it(tmp_path, caplog):
    h100, h200, *_ = tables.shipped_tables()
    lean = tables.GpuFacts(sms=108, sm_clock_mhz=1410.0, memory_gb_s=1555.0)
    rich = tables.GpuFacts(sms=66, sm_clock_mhz=1980.0, memory_gb_s=2400.0)
    assert tables.nearest_table(KEY, lean) is h100
    assert tables.nearest_table(KEY, rich) is h200
    assert tables.nearest_table(KEY, None) is h100
    caplog.set_level("INFO")
    model = table_lookup.cost_model_for(KEY, tmp_path, rich)
    assert model.bandwidth_gb_s == pytest.approx(h200.model.bandwidth_gb_s * 2400.0 / 4814.304)
    (record,) = caplog.records
    assert "66 SMs at 1980 MHz and a memory of 2400 GB/s" in record.message


def test_a_gpu_plans_with_the_table_of_the_gqa_group_most_like_its_own():
    _, h200, mha, *_ = tables.shipped_tables()
    for group, table in ((1, mha), (3, h200), (4, h200), (16, h200)):
        key = replace(KEY, query_heads=group, kv_heads=1, dtype="bfloat16")
        assert tables.nearest_table(replace(key, gpu=h200.key.gpu), None) is table
        assert tables.nearest_table(key, h200.facts) is table


def test_a_cache_of_8_bits_takes_a_table_of_8_bits(tmp_path):
    """Also on a GPU that only has a table of 16 bits: it is carried to the GPU's facts."""
    h100, h200, _, *eight_bits = tables.shipped_tables()
    for table, other in zip(eight_bits, (h100, h200), strict=True):
        assert table.key.dtype == "float8_e4m3fn"
        for dtype, size in DTYPE_BYTES.items():
            found = tables.nearest_table(replace(KEY, gpu=table.key.gpu, dtype=dtype), h200.facts)
            assert found is (table if size == 1 else other)
    key = replace(KEY, gpu="another", dtype="float8_e5m2")
    half = replace(h100.facts, memory_gb_s=h100.facts.memory_gb_s / 2)
    used = table_lookup.table_in_use(key, tmp_path, half)
    assert used.path == eight_bits[0].path
    assert used.model.tiles.item_ns == eight_bits[0].model.tiles.item_ns  # the clocks are equal
    assert used.model.bandwidth_gb_s == pytest.approx(eight_bits[0].model.bandwidth_gb_s / 2)
    assert "--kv-cache-dtype fp8_e5m2" in used.notice
