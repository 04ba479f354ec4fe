"""Examples of the fuzzer: Hypothesis strategies, which the tests share, and how one runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from hypothesis import strategies as st

from benchmarks.fuzz.attention_cases import AttentionFuzzer, Failure
from benchmarks.fuzz.attention_settings import PLANNERS, AttentionSetting, attention_settings


@dataclass(frozen=True)
class Example:
    """Batches of one setting: those of `seeds` numbers from `seed` on.

    - `planner`: one of :data:`~benchmarks.fuzz.attention_settings.PLANNERS`.
    - `large`: whether batches are as large as a GPU runs fast.
    """

    setting: AttentionSetting
    planner: str
    seed: int
    seeds: int
    large: bool

    def to_dict(self) -> dict[str, Any]:
        """As a record holds it; :func:`example_of` reads it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "setting": asdict(self.setting)}


def example_of(content: dict[str, Any]) -> Example:
    """The example of :meth:`Example.to_dict`."""
    known = {name: content[name] for name in ("planner", "seed", "seeds", "large")}
    return Example(AttentionSetting(**content["setting"]), **known)


def attention_examples(
    dtypes: tuple[str, ...], *, large: bool, seeds: int
) -> st.SearchStrategy[Example]:
    """Any setting of attention with any planner."""
    return st.builds(
        Example,
        st.sampled_from(attention_settings(dtypes, large=large)),
        st.sampled_from(PLANNERS),
        st.integers(0, 1 << 40),
        st.just(seeds),
        st.just(large),
    )


@dataclass
class Counts:
    """What examples came to."""

    plans: int = 0
    skipped: int = 0
    by_planner: Counter[str] = field(default_factory=Counter)
    largest_error: dict[str, float] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Add another process's counts."""
        for name in ("plans", "skipped", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.by_planner.update(other.by_planner)
        for dtype, error in other.largest_error.items():
            self.largest_error[dtype] = max(error, self.largest_error.get(dtype, 0.0))


class Runner:
    """Runs examples on a device; fuzzers of a setting keep their compiled kernels."""

    def __init__(self, device: torch.device) -> None:
        self.counts = Counts()
        self._device = device
        self._fuzzers: dict[Any, AttentionFuzzer] = {}

    def run(self, example: Example) -> list[Failure]:
        """Run an example and count it; returns what fails."""
        key = (example.setting, example.large)
        if key not in self._fuzzers:
            self._fuzzers[key] = AttentionFuzzer(example.setting, self._device, large=example.large)
        fuzzer, counts = self._fuzzers[key], self.counts
        seeds = range(example.seed, example.seed + example.seeds)
        try:
            failures, largest = fuzzer.run(seeds, example.planner)
        except torch.OutOfMemoryError:
            del self._fuzzers[key]
            torch.cuda.empty_cache()
            counts.skipped += example.seeds
            return []
        counts.plans += example.seeds
        counts.by_planner[example.planner] += example.seeds
        dtype = example.setting.dtype
        counts.largest_error[dtype] = max(largest, counts.largest_error.get(dtype, 0.0))
        counts.failures += [
            {**example.to_dict(), "seeds": 1, **each._asdict()} for each in failures
        ]
        return failures
