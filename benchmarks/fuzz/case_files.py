"""Failing seeds as files, and their replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz.attention_cases import AttentionFuzzer
from benchmarks.fuzz.attention_settings import AttentionSetting
from benchmarks.fuzz.outcome import Failure
from benchmarks.fuzz.plan_cases import PlanFuzzer
from benchmarks.fuzz.plan_settings import PlanSetting
from deft_backend.files.json_fields import read_json

MOST_FILES = 20
"""Most files that one run writes. Hundreds of failing seeds have a common cause."""


class CaseFileError(ValueError):
    """A file that holds no case."""


def keep(failures: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the first failing seeds, one file each."""
    written = []
    for failure in failures[:MOST_FILES]:
        if "seed" not in failure:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{failure['what']}-{failure.get('planner', 'device')}-{failure['seed']}.json"
        path = folder / name
        path.write_text(json.dumps(failure, indent=1) + "\n")
        written.append(path)
    return written


def replay(path: Path, device: torch.device) -> list[Failure]:
    """Run a case again; returns what fails.

    Raises
    ------
    CaseFileError
        If the file holds no case.
    """
    content = read_json(path, CaseFileError, "the case ")
    try:
        what, planner, large = content["what"], content["planner"], bool(content["large"])
        seeds = range(content["seed"], content["seed"] + content.get("seeds", 1))
        values = content["setting"]
        if what == "plans":
            setting = PlanSetting(**{**values, "tiles": tuple(values["tiles"])})
        else:
            attention = AttentionSetting(**values)
    except (KeyError, TypeError) as error:
        raise CaseFileError(f"{path}: bad or missing field: {error!r}") from error
    if what == "plans":
        return PlanFuzzer(setting, device, large=large).run(seeds).failures
    return AttentionFuzzer(attention, device, large=large).run(seeds, planner).failures
