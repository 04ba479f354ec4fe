"""The hosts' servers, their attention backends, and how a run starts them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.e2e.served_model import Model
from deft_backend.hosts.windows import TESTED
from deft_backend.tools.servers.command import (
    BACKEND_NAMES,
    ServerCommand,
    free_port,
    server_command,
    use_gpu,
    vllm_is_cpu_build,
)

HOST_DEFAULT = "host"
"""Backend name for the host's own default."""

EAGLE, NGRAM, MTP = "eagle", "ngram", "mtp"

STEPS, MOST_TOPK = 5, 8
"""Draft steps of a tree, and most branches of a step."""


class ChoiceError(ValueError):
    """The choice cannot be measured; the message names the value and the expected values."""


@dataclass(frozen=True)
class Host:
    """A host and the backends that are compared on it.

    `backends`: on a GPU, first the plugin's, then the host's own backend whose answers are the
    reference, then others. `on_cpu`: the same without a GPU.
    """

    name: str
    backends: tuple[str, ...]
    on_cpu: tuple[str, ...]

    @property
    def ours(self) -> str:
        """The plugin's backend."""
        return self.backends[0]

    def on_gpu(self) -> bool:
        """Whether its servers run on a GPU on this machine."""
        return use_gpu() and not (self.name == "vllm" and vllm_is_cpu_build())

    def defaults(self) -> tuple[str, ...]:
        """The default backends on this machine."""
        return self.backends if self.on_gpu() else self.on_cpu

    def reference(self) -> str:
        """The host's own backend whose answers are the reference on this machine."""
        return self.defaults()[1]


HOSTS: Mapping[str, Host] = {
    name: Host(name, (BACKEND_NAMES[name], *gpu), (BACKEND_NAMES[name], cpu))
    for name, gpu, cpu in (
        ("sglang", ("fa3", "flashinfer", "triton"), "torch_native"),
        ("vllm", ("FLASH_ATTN", "FLASHINFER"), "CPU_ATTN"),
    )
}


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of a verification, with forced acceptance.

    Times under dummy weights mean something only if every server accepts the same number of tokens,
    so the hosts' own switches for benchmarks set it.

    - `kind`: ``eagle``: one layer on the target's hidden states; ``ngram``; ``mtp``: the model's
      own draft layer, which drafts a chain.
    - `tokens`: query tokens of a verification: the draft tokens and the token before them.
    - `accepted`: tokens that every verification gives.
    """

    kind: str
    tokens: int
    accepted: float

    @property
    def label(self) -> str:
        """How rows name the drafts; their options hold the folder of a draft model."""
        return f"(drafts {self.kind},{self.tokens},{self.accepted:g})"

    @property
    def topk(self) -> int:
        """Branches of a draft step; 1: a chain."""
        return 1 if self.kind == MTP or self.tokens <= 6 else min(MOST_TOPK, self.tokens // 4)

    def options(self, host: str, model: Model) -> list[str]:
        """The host's options; writes a draft model of the model's shape beside it if needed."""
        if host == "vllm":
            return self._of_vllm()
        if self.kind == NGRAM:
            drafted = ["--speculative-num-draft-tokens", str(self.tokens)]
            breadth = ["--speculative-ngram-max-bfs-breadth", str(self.topk)]
            return ["--speculative-algorithm", "NGRAM", *drafted, *breadth]
        steps = self.tokens - 1 if self.topk == 1 else STEPS
        tree = ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(self.topk)]
        tree += ["--speculative-num-draft-tokens", str(self.tokens)]
        if self.kind == MTP:
            return ["--speculative-algorithm", "NEXTN", *tree]
        folder = Path(model.path) / "draft"
        folder.mkdir(exist_ok=True)
        config = {**model.config, "num_hidden_layers": 1}
        config["architectures"] = ["LlamaForCausalLMEagle"]
        (folder / "config.json").write_text(json.dumps(config))
        drafter = ["--speculative-draft-model-path", str(folder)]
        drafter += ["--speculative-draft-load-format", "dummy"]
        return ["--speculative-algorithm", "EAGLE", *drafter, *tree]

    def _of_vllm(self) -> list[str]:
        method: dict[str, Any] = {"method": "mtp"}
        if self.kind == NGRAM:
            method = {"method": NGRAM, "prompt_lookup_max": 4}
        elif self.kind == EAGLE:
            raise ChoiceError("vLLM drafts chains alone; expected ngram or mtp for --drafts")
        forced = {"rejection_sample_method": "synthetic"}
        config = {"num_speculative_tokens": self.tokens - 1, **method, **forced}
        config["synthetic_acceptance_length"] = self.accepted
        return ["--speculative-config", json.dumps(config)]


def parse_drafts(text: str) -> Drafts:
    """``KIND,TOKENS,ACCEPTED``, such as ``eagle,60,3``; raises ChoiceError for another form."""
    try:
        kind, tokens, accepted = text.split(",")
        found = Drafts(kind, int(tokens), float(accepted))
    except ValueError:
        found = Drafts("", 0, 0.0)
    kinds = (EAGLE, NGRAM, MTP)
    if found.kind not in kinds or found.tokens < 2 or not 1 <= found.accepted <= found.tokens:
        raise ChoiceError(
            f"--drafts is {text!r}; expected KIND,TOKENS,ACCEPTED, such as eagle,60,3: one of "
            f"{', '.join(kinds)}, tokens of a verification (2 or more), and tokens that each of "
            "them gives"
        )
    return found


@dataclass(frozen=True)
class Launch:
    """How a run's servers start.

    - `options`: the user's options of the host. They come last, so they win.
    - `environment`: further environment variables.
    - `tensor_parallel`: GPUs over which each server splits the model.
    - `policy`: the plugin's policy.
    - `disaggregated`: whether a prefill and a decode server make a server.
    """

    host: Host
    model: Model
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    tensor_parallel: int = 1
    drafts: Drafts | None = None
    policy: str | None = None
    disaggregated: bool = False
    start_seconds: float = 500.0

    def policy_of(self, backend: str) -> str | None:
        """The policy of a server of this backend, if the run names one."""
        return self.policy if backend == self.host.ours else None

    @property
    def label(self) -> str:
        """The options as rows hold them; ``tp`` is a field of its own."""
        marks = ["(disaggregated)"] if self.disaggregated else []
        marks += [self.drafts.label] if self.drafts else []
        return " ".join([*marks, *self.options])

    def command(self, backend: str) -> ServerCommand:
        """The command of a server on a free port."""
        host, model = self.host.name, self.model
        options: list[str] = []
        environment = dict(self.environment)
        if host == "vllm" and "VLLM_USE_FLASHINFER_SAMPLER" not in os.environ:
            environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # compiling takes minutes
        if model.load_format is not None:
            options += ["--load-format", model.load_format]
        if self.tensor_parallel > 1:  # both hosts spell it like this
            options += ["--tensor-parallel-size", str(self.tensor_parallel)]
        if self.drafts is not None:
            options += self.drafts.options(host, model)
            if host == "sglang":
                environment["SGLANG_SIMULATE_ACC_LEN"] = f"{self.drafts.accepted:g}"
        if (policy := self.policy_of(backend)) is not None:
            environment["DEFT_POLICY"] = policy
        return server_command(
            model.path,
            free_port(),
            host=host,
            backend=None if backend == HOST_DEFAULT else backend,
            host_arguments=[*options, *self.options],
            environment=environment,
        )


def same_prefill(host: Host, reference: str) -> dict[str, str]:
    """Environment in which the server with the plugin prefills as the reference does.

    Backends differ in their arithmetic over a cache of 8 bits. fa3 also rounds queries and softmax
    weights to 8 bits, and triton reads a prompt's keys and values before they are rounded. If the
    prompts are computed in two ways, answers differ by more than the tolerance
    (docs/reliability.md).
    """
    if host.name != "sglang" or "DEFT_FALLBACK_BACKEND" in os.environ:
        return {}
    return {"DEFT_FALLBACK_BACKEND": reference}


def checked_backends(host: Host, names: Sequence[str]) -> tuple[str, ...]:
    """The names, if the host is installed in a supported version and each name occurs once.

    Raises ChoiceError otherwise.
    """
    if find_spec(host.name) is None:
        raise ChoiceError(
            f"{host.name} is not installed for {sys.executable}; run this command with the "
            "Python of the server's environment"
        )
    reason = TESTED[host.name].refuse() if host.ours in names else None
    if reason is not None:
        raise ChoiceError(f"{TESTED[host.name].name} decodes without tree attention: {reason}")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise ChoiceError(f"the backend {twice[0]} is named twice; expected each once")
    return tuple(names)
