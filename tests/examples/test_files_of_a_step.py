"""docs/how-it-works.md lists the files that a reader needs to follow a step."""

import re
import sys
from pathlib import Path

import pytest
import torch

from attention_checks import tree_attention

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deft_backend"


PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")


def listed():
    table = PAGE.split("<!-- files of a step -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| \[.*?\]\(\.\./(\S+)\) \| (.+) \|$", table, re.M)
    return [
        ROOT / folder / f"{name}.py"
        for folder, names in rows
        for name in re.findall("`(.+?)`", names)
    ]


def test_the_list_is_short_and_its_files_exist():
    files = listed()
    assert f"read these {len(set(files))} files" in PAGE
    assert len(files) == len(set(files)) <= 40
    assert [file for file in files if not file.is_file()] == []


@pytest.mark.parametrize("shared", [0, 64])
def test_a_step_runs_no_other_file(shared):
    """One request of 96 tokens alone, or three that share 64 of them."""
    requests = 3 if shared else 1
    table = torch.arange(6, dtype=torch.int32).repeat(requests, 1)
    table[1:, shared // 16 :] += 6 * torch.arange(1, requests, dtype=torch.int32)[:, None]
    lens = torch.full((requests,), 96, dtype=torch.int32)
    attention = tree_attention(dtype=torch.float16, page_size=16, max_batch=4)
    k, v = torch.randn(2, 24, 16, 2, 64).half()
    q = torch.randn(requests, 4, 64).half()

    def step():
        attention.plan_batch(table, lens, on_device=True)
        attention.run(q, k, v, table, lens, static_launch=True)

    def note(frame, event, argument):
        if event == "call":
            ran.add(Path(frame.f_code.co_filename))

    step()  # the first step makes what later ones use
    ran = set()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert {path for path in ran if path.is_relative_to(PACKAGE)} <= set(listed())
