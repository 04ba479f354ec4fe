"""The hosts' servers and their attention backends, by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from benchmarks.e2e.served_model import Model
from deft_backend.hosts.windows import TESTED
from deft_backend.servers.command import (
    BACKEND_NAMES,
    HOST_NAMES,
    ServerCommand,
    free_port,
    server_command,
    use_gpu,
    vllm_is_cpu_build,
)

HOST_DEFAULT = "host"
"""Backend name that leaves the choice to the host."""


class ServerChoiceError(ValueError):
    """A host that cannot be measured here, or a backend that was named twice."""


@dataclass(frozen=True)
class Host:
    """A host and the backends that are compared on it.

    Attributes
    ----------
    name : str
        As rows name it, and the package that it is.
    backends : tuple of str
        Compared on a GPU unless others are asked for: the plugin's, then the one of the host's own
        that it is held against where nothing is shared, then others.
    on_cpu : tuple of str
        The same without a GPU.
    """

    name: str
    backends: tuple[str, ...]
    on_cpu: tuple[str, ...]

    @property
    def ours(self) -> str:
        """The plugin's backend."""
        return self.backends[0]

    def on_gpu(self) -> bool:
        """Whether its servers run on a GPU here."""
        return use_gpu() and not (self.name == "vllm" and vllm_is_cpu_build())

    def defaults(self) -> tuple[str, ...]:
        """Backends to compare on this machine."""
        return self.backends if self.on_gpu() else self.on_cpu

    def reference(self) -> str:
        """The host's own backend whose answers ours are checked against on this machine."""
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


@dataclass(frozen=True)
class Launch:
    """How every server of a run is started.

    Attributes
    ----------
    host : Host
    model : Model
    tokenizer : bool
        Whether an SGLang server needs one: the hosts' own clients send text. vLLM's endpoint
        names tokens by their text, so its servers always have it.
    options : sequence of str
        The user's options of the host, last, so that they win.
    environment : mapping
        Further variables.
    """

    host: Host
    model: Model
    tokenizer: bool = False
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The options as rows name them."""
        return " ".join([*(["(tokenizer)"] if self.tokenizer else []), *self.options])

    def command(self, backend: str, state: Path) -> ServerCommand:
        """The server's command line, on a port that is free now."""
        host, model = self.host.name, self.model
        options: list[str] = []
        environment = {"DEFT_STATE_DIR": str(state)}
        if host == "sglang" and not self.tokenizer:
            options.append("--skip-tokenizer-init")
        if host == "vllm" and "VLLM_USE_FLASHINFER_SAMPLER" not in os.environ:
            environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it takes minutes to compile
        if model.load_format is not None:
            options += ["--load-format", model.load_format]
        return server_command(
            model.path, free_port(), host=host,
            backend=None if backend == HOST_DEFAULT else backend,
            host_arguments=[*options, *self.options],
            environment={**environment, **self.environment},
        )  # fmt: skip


def checked_backends(host: Host, names: Sequence[str]) -> tuple[str, ...]:
    """The names, if a server of the host can be started here and none is there twice.

    Raises
    ------
    ServerChoiceError
        Else.
    """
    if find_spec(host.name) is None:
        raise ServerChoiceError(
            f"{host.name} is not installed beside {sys.executable}; run this command with the "
            "Python of the server's environment"
        )
    reason = TESTED[host.name].refuse() if host.ours in names else None
    if reason is not None:
        raise ServerChoiceError(f"{HOST_NAMES[host.name]} decodes without tree attention: {reason}")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise ServerChoiceError(f"the backend {twice[0]} is named twice; expected each once")
    return tuple(names)
