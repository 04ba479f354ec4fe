"""Token trees as `deft explain` draws them."""

import json
from pathlib import Path

import numpy as np
from rich.console import Console
from typer.testing import CliRunner

from deft_backend.cli.app import app
from deft_backend.tools.explain import draw_token_tree, seen_from_parents


def drawn(seen: np.ndarray, **options: int) -> list[str]:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw_token_tree(seen, **options))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_each_token_hangs_below_its_nearest_ancestor() -> None:
    assert drawn(seen_from_parents((-1, 0, 0, 1, 3))) == [
        "5 query tokens in 1 query block · 12 of 25 pairs seen · 1 × 64 bits a token",
        "└── token 0 · seen by 5",
        "    ├── token 1 · seen by 3",
        "    │   └── token 3 · seen by 2",
        "    │       └── token 4 · seen by 1",
        "    └── token 2 · seen by 1",
    ]


def test_large_trees_are_cut() -> None:
    lines = drawn(seen_from_parents((-1, *[0] * 99)), gqa_group=4, max_tokens=3)
    assert lines[0].startswith("100 query tokens in 7 query blocks · 199 of 10,000 pairs")
    assert lines[-1] == "└── … 97 more"


def test_explain_draws_a_recorded_token_tree(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({
        "Tree_Structure": [[0], [1], [0, 0]],
        "Records": [{"prompt": "x" * 40, "Accept_length": [1, 2]}],
    }))  # fmt: skip
    result = CliRunner().invoke(app, ["explain", "--trace", str(path)])
    assert result.exit_code == 0, result.output
    assert "4 query tokens in 1 query block" in result.output
    assert "token 3 · seen by 1" in result.output


def test_the_documented_token_tree_is_drawn_as_documented(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    trace, _, drawing = page.partition('```json\n{"Tree_Structure"')[2].partition("\n```")
    path = tmp_path / "tokens.json"
    path.write_text('{"Tree_Structure"' + trace)
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    result = runner.invoke(app, ["explain", "--trace", str(path)])
    assert result.exit_code == 0, result.output
    expected = drawing.split("```\n")[1].splitlines()
    found = [line.rstrip() for line in result.output.splitlines()]
    cut = expected.index("…")
    assert found[:cut] == expected[:cut]
    assert found[cut + 1 - len(expected) :] == expected[cut + 1 :]
