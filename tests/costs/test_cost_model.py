"""The profiled cost table: FlashForge's Table 2, its interpolation, and files."""

import json
from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft_backend.costs import CostModel, cost_model
from deft_backend.files.json_fields import FieldError
from deft_backend.forest import build_forest
from deft_backend.policies import Target, get_policy
from drawings import check_asked

# FlashForge, Table 2: milliseconds by n (rows) and n_q (columns), typed from the paper.
QUERIES = [1, 2, 5, 10, 20, 50, 100]
TABLE_2 = {
    512: [0.036, 0.035, 0.036, 0.043, 0.048, 0.074, 0.112],
    1024: [0.043, 0.043, 0.044, 0.054, 0.062, 0.109, 0.122],
    2048: [0.060, 0.059, 0.059, 0.079, 0.094, 0.124, 0.145],
    4096: [0.092, 0.092, 0.093, 0.126, 0.147, 0.156, 0.183],
    8192: [0.156, 0.157, 0.156, 0.199, 0.189, 0.195, 0.266],
    16384: [0.283, 0.282, 0.283, 0.301, 0.303, 0.471, 0.746],
}


def test_times_are_exact_where_profiled_bilinear_between_and_linear_beyond():
    paper = _replaced(query_rows=QUERIES, tokens=list(TABLE_2), time_ms=list(TABLE_2.values()))
    for n, row in TABLE_2.items():
        for n_q, expected in zip(QUERIES, row, strict=True):
            assert float(paper.time(n_q, n)) == pytest.approx(expected, abs=1e-12)
    for n_q, n, expected in (
        (1, 768, (0.036 + 0.043) / 2),
        (15, 512, (0.043 + 0.048) / 2),
        (1.5, 768, (0.036 + 0.035 + 0.043 + 0.043) / 4),
        (75, 12_288, (0.195 + 0.266 + 0.471 + 0.746) / 4),
        (1, 32_768, 0.283 + 2 * (0.283 - 0.156)),
        (150, 512, 0.112 + (0.112 - 0.074)),
        (1, 0, 0.036 - (0.043 - 0.036)),
    ):
        assert float(paper.time(n_q, n)) == pytest.approx(expected)
    steep = _replaced(time_ms=[[0.001, 0.001], [1.0, 1.0]])  # no time is free
    assert 0 < float(steep.time(1, 0)) < 1e-3


def test_a_targets_own_table_changes_the_plan():
    # If slices cost as much as the whole, no division pays off.
    forest = build_forest([0, 1], [8192], [8200, 8200])
    flat = _replaced(time_ms=[[1.0, 1.0], [1.0, 1.0]])
    profiled = Target(4, 4, 64, num_programs=8)
    constant = Target(4, 4, 64, num_programs=8, cost_model=flat)
    policy = get_policy("flashforge")
    assert policy.group(forest, constant).num_groups == 3
    assert policy.group(forest, profiled).num_groups > 3


TILES = {"item_ns": [9, 8], "token_ns": [6, 5], "partial_ns": 3, "reduce_ns": 2}


def _data(**changes):
    data = {
        "format": 2,
        "source": "test",
        "head_dim": 64,
        "query_rows": [1, 2],
        "tokens": [16, 32],
        "time_ms": [[1.0, 2.0], [2.0, 3.0]],
        "launch_ms": 0.1,
        "bandwidth_gb_s": 1000,
        "fasttree": {"alpha": 0.5, "beta": 0.25, "gamma": 0.125},
        "tiles": TILES,
    }
    return {**data, **changes}


def _replaced(**changes):
    return CostModel._from_dict(_data(**changes))


def test_a_table_that_is_impossible_is_refused():
    """The message says what is wrong with a field; the fields of ``tiles`` have names of theirs."""

    def answer(*words):
        changes = {}
        for name, _, value in (word.partition("=") for word in words):
            place = changes.setdefault("tiles", {**TILES}) if name in TILES else changes
            place[name] = literal_eval(value)
        try:
            _replaced(**changes)
        except (cost_model.CostModelError, FieldError, ValueError) as error:
            return [str(error)]
        return ["a table"]

    check_asked(Path(__file__).with_name("tables.txt"), answer)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_of_a_measurement_are_finite(wrong):
    model = _replaced()
    weights = replace(model.fasttree, beta=wrong)
    for changes in ({"launch_ms": wrong}, {"bandwidth_gb_s": wrong}, {"fasttree": weights}):
        with pytest.raises(cost_model.CostModelError, match=f"is {wrong}; expected a number"):
            replace(model, **changes)
    with pytest.raises(cost_model.CostModelError, match="time_ms holds a time"):
        replace(model, time_ms=np.array([[1.0, 2.0], [wrong, 3.0]]))
    with pytest.raises(ValueError, match=f"partial_ns holds {wrong}; expected numbers above 0"):
        replace(model.tiles, partial_ns=wrong)


def test_the_costs_of_tiles_in_one_array():
    target = Target(4, 4, head_dim=64, query_tokens=2, cost_model=_replaced())
    assert target.tile_costs().tolist() == [9, 8, 6, 5, 6, 2]  # a result of each query token
    target = replace(target, cost_model=replace(_replaced(), bandwidth_gb_s=512.0))
    assert target.transfer_ns == pytest.approx(2.0)  # keys and values of four heads: 1 KiB
    assert target.cost_model.transfer_ms(2e6 * 512.0) == 2.0
    # The host's kernel for MLA reads from the same memory.
    latent = cost_model.latent_costs(16)
    assert latent.bandwidth_gb_s == cost_model.default_cost_model().bandwidth_gb_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "it holds a list; expected an object"),
        ("{", "is not JSON"),
        ('{"format": 3}', "format is 3; expected 2"),
        (None, "No such file or directory; expected a file"),
    ],
)
def test_a_file_without_a_table_is_named(text, said, tmp_path):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(cost_model.CostModelError, match=f"cost table {path}.*{said}"):
        CostModel.load(path)


def test_a_table_reads_back_what_it_writes():
    data = _data()
    assert json.loads(json.dumps(CostModel._from_dict(data).to_dict())) == data
    del data["source"]
    assert CostModel._from_dict(data).source == "unknown"
