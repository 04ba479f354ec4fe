"""Attacks on the files and the port of the package: each ends in a refusal that names its cause."""

import json
import os
from dataclasses import asdict

import numpy as np
import pytest

from benchmarks.fuzz.forests import Limits, draw_batch
from deft_backend.compile.kernel_folder import KernelFolderError, Origin, fill, take
from deft_backend.costs.cost_model import CostModel, CostModelError, default_cost_model
from deft_backend.files.json_fields import shown
from deft_backend.files.private_files import unsafe_folder, write_private
from deft_backend.forest import build_forest, forest_from_page_tables
from deft_backend.telemetry.shown_batch import forest_as_json, forest_from_json
from deft_backend.telemetry.state_reader import StateError, read_state
from deft_backend.tools.traces.arrivals import TraceError, load_arrivals
from sglang_fakes import make_state

HERE = Origin.of("sm_90")
FOREST = build_forest([2, 0, 1, 3], [8, 4, 0], [9, 12, 8, 3], 4)


def deep(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


WRONG = (
    None,
    True,
    -1,
    1 << 40,
    1 << 70,
    -(1 << 70),
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "7",
    "../x",
    [],
    [[]],
    [1, "2"],
    ["1", "2"],
    [True],
    [[1], [2, 3]],
    {},
    {"": 0},
    deep(40),
    deep(900),
    ["x" * 10_000] * 100,
    "x" * 10_000,
    "\x1b[2J",  # a terminal obeys control characters
)
"""Values of wrong types, sizes and nesting, for any field."""


def places(content, path=()):
    """Every field of a document, and the first elements of its lists."""
    if path:
        yield path
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content[:1])
        for name, value in pairs:
            yield from places(value, (*path, name))


def changed(content, path, value):
    if not path:
        return value
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[path[0]] = changed(content[path[0]], path[1:], value)
    return copy


STATE = make_state()
MANIFEST = {"kernels": {"1" * 64: {"k.json": "2" * 64, "k.cubin": "3" * 64}}, **asdict(HERE)}
ARRIVAL = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
TABLE = default_cost_model().to_dict()
FILES = {
    "state": ({**STATE.as_json(STATE.counters()), "updated": 1.0}, read_state, StateError),
    "table": (TABLE, lambda path: CostModel.load(path, private=True), CostModelError),
    "manifest": (MANIFEST, lambda path: take(path.parent, HERE), KernelFolderError),
    "trace": (ARRIVAL, load_arrivals, TraceError),
}
LENGTHS = {"tokens", "query_rows", "input_length", "hash_ids", "time_ms"}
"""Fields that must fit each other: the message may name the other one."""


@pytest.mark.parametrize("kind", FILES)
def test_every_wrong_value_of_every_field_is_refused_by_name(tmp_path, kind):
    """The message names the field, or the field above it, and is short. Nothing else is raised."""
    content, read, error = FILES[kind]
    path = tmp_path / "manifest.json"
    write_private(path, json.dumps(content))
    read(path)
    for place in places(content):
        for value in WRONG:
            write_private(path, json.dumps(changed(content, place, value)))
            try:
                read(path)
                assert (kind, place, value) != ("state", ("host",), "\x1b[2J")
            except error as refused:
                said = str(refused)
                assert len(said) < 700, said
                names = [part for part in place if isinstance(part, str)]
                told = any(name in said for name in names) or names[0] in LENGTHS
                assert told or "its kernels are for" in said, (place, said)


@pytest.mark.parametrize("levels", range(800, 1000, 7))
def test_no_depth_of_nesting_escapes(tmp_path, levels):
    """Python may parse a value that it cannot show, because showing nests a little deeper."""
    path = tmp_path / "table.json"
    text = json.dumps({**TABLE, "head_dim": 0})
    write_private(path, text.replace('"head_dim": 0', f'"head_dim": {"[" * levels}{"]" * levels}'))
    with pytest.raises(CostModelError):
        CostModel.load(path, private=True)
    assert len(shown(deep(5000))) < 90


def test_a_forest_whose_arrays_do_not_fit_is_refused():
    """The reader returns the forest that the arrays describe, or none."""
    content = forest_as_json(FOREST)
    assert forest_as_json(forest_from_json(content)) == content
    refused = 0
    for name in ("order", "shared", "seq_lens"):
        array = content[name]
        for at in range(len(array)):
            for value in (-2, 10_000, (1 << 31) - 1, array[at] + 1):
                wrong = {**content, name: [*array[:at], value, *array[at + 1 :]]}
                try:
                    assert forest_as_json(forest_from_json(wrong)) == wrong
                except ValueError:
                    refused += 1
        for wrong_array in (array[:-1], [*array, 0], array * 2):
            with pytest.raises(ValueError, match="describe no forest"):
                forest_from_json({**content, name: wrong_array})
    assert refused > 30  # a longer request fits
    large = forest_as_json(build_forest([0], [], [5], (1 << 31) - 1))
    assert forest_as_json(forest_from_json(large)) == large
    for wrong_size in (0, 1 << 31):
        with pytest.raises(ValueError, match="page_size"):
            forest_from_json({**content, "page_size": wrong_size})


def test_every_forest_that_a_server_writes_is_read():
    """Also those of pages in two copies, where rows that agree may differ before."""
    limits = Limits(24, 400, 1 << 14)
    for seed in range(120):
        batch = draw_batch(np.random.default_rng(seed), 16, limits, twins=True)
        tables = np.ascontiguousarray(batch.page_table[batch.rows])
        forest = forest_from_page_tables(tables, batch.seq_lens, 16, check=False)
        content = json.loads(json.dumps(forest_as_json(forest)))
        assert forest_as_json(forest_from_json(content)) == content
    assert forest_from_json(forest_as_json(build_forest([], [], [], 1))).batch_size == 0


def test_folders_in_which_others_could_exchange_files(tmp_path, monkeypatch):
    inner = tmp_path / "above" / "inner"
    inner.mkdir(parents=True)
    assert unsafe_folder(inner) is None
    for folder in (inner, inner.parent):
        folder.chmod(0o777)
        assert f"others may write to {folder}" in str(unsafe_folder(inner))
        folder.chmod(0o1777)  # as /tmp: each user changes only the user's own files
        assert unsafe_folder(inner) is None
        folder.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(inner.parent)
    assert unsafe_folder(link / "inner") is None
    inner.parent.chmod(0o777)
    assert str(inner.parent) in str(unsafe_folder(link / "inner"))
    inner.parent.chmod(0o755)
    if os.getuid() == 0:
        os.lchown(link, 4321, 4321)
        assert "belongs to user 4321" in str(unsafe_folder(link / "inner"))
    inner.chmod(0o775)
    assert unsafe_folder(inner) is None  # this user's own group
    monkeypatch.setattr(os, "getgid", lambda: 4321)
    assert f"others may write to {inner}" in str(unsafe_folder(inner))


def test_a_link_to_another_folder_gives_no_kernels_of_others(tmp_path):
    """The files themselves must be this user's, even behind a link."""
    folder = tmp_path / "kernels"
    fill(folder, HERE, [])
    (tmp_path / "link").symlink_to(folder)
    assert take(tmp_path / "link", HERE).copied == 0
    (folder / "manifest.json").chmod(0o666)
    with pytest.raises(KernelFolderError, match="others may write"):
        take(tmp_path / "link", HERE)
