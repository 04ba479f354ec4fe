"""The GRPO example, end to end: a real server whose weights follow the trainer's."""

import json

import pytest
import torch

from examples.grpo.__main__ import main
from examples.grpo.rollouts import Samples
from examples.grpo.trainer import Trainer
from integration_tests.common.server import MODEL

RATE = 1e-3


@pytest.mark.rare
def test_rollouts_have_the_trainers_log_probabilities_after_each_update(tmp_path):
    """In float32 only rounding differs, unless the server kept old weights or an old cache."""
    out = tmp_path / "rollout-trust.json"
    sizes = ["--steps", "2", "--samples", "3", "--prompt-tokens", "300", "--tokens", "5"]
    model = ["--model", str(MODEL), "--learning-rate", str(RATE)]
    main([*model, *sizes, "--modes", "deft-invariant", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["mode"] == "deft-invariant"
    assert 0 < row["mean_difference"] <= row["largest_difference"] < 1e-4
    assert 0 <= row["kl"] < 1e-8 > row["kl_error"] > 0
    assert len(row["largest_by_step"]) == len(row["rewards"]) == 2
    assert "policy invariant" in (tmp_path / "rollout-trust" / "deft-invariant.log").read_text()


def test_a_step_changes_log_probabilities_by_more_than_rounding():
    trainer = Trainer(MODEL, torch.float32, RATE, rows=2)
    samples = Samples([[5, 6, 7], [8, 9, 10], [11, 12, 13]], [[-3.0] * 3] * 3, 1.0)
    before, after = (
        trainer.step([1, 2, 3, 4], samples, torch.tensor([1.0, 0.5, 0.0])) for _ in range(2)
    )
    assert before.shape == (3, 3)
    assert float((after - before).abs().max()) > 1e-2
