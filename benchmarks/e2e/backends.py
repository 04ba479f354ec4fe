"""The hosts' servers and their attention backends."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from benchmarks.e2e.served_model import Model
from deft_backend.hosts.windows import TESTED
from deft_backend.tools.servers.command import (
    BACKEND_NAMES,
    HOST_NAMES,
    ServerCommand,
    free_port,
    server_command,
    use_gpu,
    vllm_is_cpu_build,
)

HOST_DEFAULT = "host"
"""Backend name for the host's own default."""


class ServerChoiceError(ValueError):
    """A host that cannot be measured here, or a backend that is named twice."""


@dataclass(frozen=True)
class Host:
    """A host and the backends that are compared on it.

    Attributes
    ----------
    name : str
        Its name in rows, and its Python package.
    backends : tuple of str
        Default backends on a GPU: first the plugin's, then the host's own backend for the
        comparison without sharing, then others.
    on_cpu : tuple of str
        Default backends without a GPU.
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
    "sglang": Host(
        "sglang", (BACKEND_NAMES["sglang"], "fa3", "flashinfer", "triton"),
        (BACKEND_NAMES["sglang"], "torch_native"),
    ),
    "vllm": Host(
        "vllm", (BACKEND_NAMES["vllm"], "FLASH_ATTN", "FLASHINFER"),
        (BACKEND_NAMES["vllm"], "CPU_ATTN"),
    ),
}  # fmt: skip


_SLEEP_OPTIONS = {
    # Dummy weights are in no file, so the CPU keeps them while the server sleeps.
    "sglang": ("--enable-memory-saver", "--enable-weights-cpu-backup"),
    "vllm": ("--enable-sleep-mode",),
}
_SLEEP_ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "sglang": {}, "vllm": {"VLLM_SERVER_DEV_MODE": "1"},
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """The start options of a run's servers.

    Attributes
    ----------
    host : Host
    model : Model
    tokenizer : bool
        Whether an SGLang server needs a tokenizer: the hosts' own clients send text. vLLM servers
        always have it, because their endpoint names tokens by text.
    options : sequence of str
        The user's options of the host. They come last, so they win.
    environment : mapping
        Further environment variables.
    tensor_parallel : int
        GPUs over which each server splits the model.
    sleeps : bool
        Whether the server frees its GPU memory between rollouts.
    drafts : sequence of str
        Options of drafts, and their label for rows.
    policy : str, optional
        The plugin's policy, as ``DEFT_POLICY``.
    """

    host: Host
    model: Model
    tokenizer: bool = False
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    tensor_parallel: int = 1
    sleeps: bool = False
    drafts: Sequence[str] = ()
    drafts_label: str = ""
    policy: str | None = None

    def policy_of(self, backend: str) -> str | None:
        """The policy of a server of this backend, if the run names one."""
        return self.policy if backend == self.host.ours else None

    @property
    def label(self) -> str:
        """The options as rows hold them; ``tp`` is a field of its own."""
        marks = {"(tokenizer)": self.tokenizer, "(sleeps)": self.sleeps}
        shown = [mark for mark, applies in marks.items() if applies]
        return " ".join([*shown, *filter(None, [self.drafts_label]), *self.options])

    def command(self, backend: str) -> ServerCommand:
        """The command of a server on a free port."""
        host, model = self.host.name, self.model
        options: list[str] = []
        environment: dict[str, str] = {}
        if host == "sglang" and not self.tokenizer:
            options.append("--skip-tokenizer-init")
        if host == "vllm" and "VLLM_USE_FLASHINFER_SAMPLER" not in os.environ:
            environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # compiling takes minutes
        if self.sleeps:
            options += _SLEEP_OPTIONS[host]
            environment |= _SLEEP_ENVIRONMENT[host]
        if model.load_format is not None:
            options += ["--load-format", model.load_format]
        if self.tensor_parallel > 1:  # both hosts spell it like this
            options += ["--tensor-parallel-size", str(self.tensor_parallel)]
        return server_command(
            model.path, free_port(), host=host,
            backend=None if backend == HOST_DEFAULT else backend, policy=self.policy_of(backend),
            host_arguments=[*options, *self.drafts, *self.options],
            environment={**environment, **self.environment},
        )  # fmt: skip


def checked_backends(host: Host, names: Sequence[str]) -> tuple[str, ...]:
    """The names, if the host is installed in a supported version and each name occurs once.

    Raises
    ------
    ServerChoiceError
        Otherwise.
    """
    if find_spec(host.name) is None:
        raise ServerChoiceError(
            f"{host.name} is not installed for {sys.executable}; run this command with the "
            "Python of the server's environment"
        )
    reason = TESTED[host.name].refuse() if host.ours in names else None
    if reason is not None:
        raise ServerChoiceError(f"{HOST_NAMES[host.name]} decodes without tree attention: {reason}")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise ServerChoiceError(f"the backend {twice[0]} is named twice; expected each once")
    return tuple(names)
