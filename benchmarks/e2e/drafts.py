"""Draft trees of a server: the options that make them, and forced acceptance.

Times under dummy weights mean something only if every server accepts the same number of tokens, so
the hosts' own switches for benchmarks set it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.e2e.choice import ChoiceError

EAGLE = "eagle"
MTP = "mtp"
NGRAM = "ngram"
KINDS = (EAGLE, NGRAM, MTP)

STEPS = 5
"""Draft steps of a tree."""

MOST_TOPK = 8


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of a verification.

    Attributes
    ----------
    kind : str
        ``eagle``: one layer on the target's hidden states; ``ngram``; ``mtp``: the model's own
        draft layer, which drafts a chain.
    tokens : int
        Query tokens of a verification: the draft tokens and the token before them.
    accepted : float
        Tokens that every verification gives, forced by the host.
    """

    kind: str
    tokens: int
    accepted: float

    @property
    def label(self) -> str:
        """How rows name the drafts; their options hold the folder of a draft model."""
        return f"(drafts {self.kind},{self.tokens},{self.accepted:g})"

    def options(self, host: str, target: Mapping[str, Any], folder: Path) -> list[str]:
        """The host's options. Writes a draft model of `target`'s shape into `folder` if needed."""
        if host == "vllm":
            return self._of_vllm()
        if self.kind == NGRAM:
            return [*ngram_arguments(host, self.tokens - 1),
                    "--speculative-ngram-max-bfs-breadth", str(self.topk)]  # fmt: skip
        tree = [
            "--speculative-num-steps", str(self.steps),
            "--speculative-eagle-topk", str(self.topk),
            "--speculative-num-draft-tokens", str(self.tokens),
        ]  # fmt: skip
        if self.kind == MTP:
            return ["--speculative-algorithm", "NEXTN", *tree]
        folder.mkdir(parents=True, exist_ok=True)
        config = {**target, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]}
        (folder / "config.json").write_text(json.dumps(config))
        return ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(folder),
                "--speculative-draft-load-format", "dummy", *tree]  # fmt: skip

    def environment(self, host: str) -> dict[str, str]:
        """The variables that force the acceptance."""
        return {} if host == "vllm" else {"SGLANG_SIMULATE_ACC_LEN": f"{self.accepted:g}"}

    @property
    def topk(self) -> int:
        """Branches of a draft step; 1: a chain."""
        return 1 if self.kind == MTP or self.tokens <= 6 else min(MOST_TOPK, self.tokens // 4)

    @property
    def steps(self) -> int:
        """Draft steps: those of a chain give all of its tokens."""
        return self.tokens - 1 if self.topk == 1 else STEPS

    def _of_vllm(self) -> list[str]:
        method: dict[str, Any] = {"method": "mtp"}
        if self.kind == NGRAM:
            method = {"method": NGRAM, "prompt_lookup_max": 4}
        elif self.kind == EAGLE:
            raise ChoiceError("vLLM drafts chains alone; expected ngram or mtp for --drafts")
        forced = {"rejection_sample_method": "synthetic",
                  "synthetic_acceptance_length": self.accepted}  # fmt: skip
        config = {"num_speculative_tokens": self.tokens - 1, **method, **forced}
        return ["--speculative-config", json.dumps(config)]


def ngram_arguments(host: str, tokens: int) -> list[str]:
    """Options with which a server drafts chains of `tokens` from n-grams of the context."""
    if host == "vllm":
        config = {"num_speculative_tokens": tokens, "method": NGRAM, "prompt_lookup_max": 4}
        return ["--speculative-config", json.dumps(config)]
    drafted = ["--speculative-num-draft-tokens", str(tokens + 1)]
    return ["--speculative-algorithm", "NGRAM", *drafted]


def parse_drafts(text: str) -> Drafts:
    """``KIND,TOKENS,ACCEPTED``, such as ``eagle,60,3``.

    Raises
    ------
    ChoiceError
        If the text has another form.
    """
    try:
        kind, tokens, accepted = text.split(",")
        found = Drafts(kind, int(tokens), float(accepted))
    except ValueError:
        found = Drafts("", 0, 0.0)
    if found.kind not in KINDS or found.tokens < 2 or not 1 <= found.accepted <= found.tokens:
        raise ChoiceError(
            f"--drafts is {text!r}; expected KIND,TOKENS,ACCEPTED, such as eagle,60,3: one of "
            f"{', '.join(KINDS)}, tokens of a verification (2 or more), and tokens that each of "
            "them gives"
        )
    return found
