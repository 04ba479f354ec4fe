"""Starting a host server: its command line and environment, on a GPU or on the CPU engine."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deft_backend.hosts.driver_stub import ensure_driver_stub, has_nvidia_driver, num_gpus

BACKEND = "deft"
"""Name under which the plugin registers with the host."""

CPU_TOKENS = 16384
"""KV cache of the CPU engine; without a limit it takes most of the machine's memory."""


class LaunchError(RuntimeError):
    """A host server could not be started, or died."""


@dataclass(frozen=True)
class ServerCommand:
    """A host server's command line, with the environment variables it needs beside ours."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    port: int
    on_gpu: bool
    notes: tuple[str, ...] = field(default=())

    def shell(self) -> str:
        """The command as one types it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.arguments)])

    def full_environment(self) -> dict[str, str]:
        """This process's environment with the server's variables put in."""
        return {**os.environ, **self.environment}


def use_gpu() -> bool:
    """Whether a server here would run on a GPU: one is visible, and torch was built for CUDA."""
    if not num_gpus():
        return False
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def free_port() -> int:
    """A TCP port on the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_command(
    model: str,
    port: int,
    *,
    backend: str | None = BACKEND,
    policy: str | None = None,
    host_arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    gpu: bool | None = None,
) -> ServerCommand:
    """Command line and environment of an SGLang server.

    Parameters
    ----------
    model : str
        Folder of the checkpoint, or whatever the host accepts for ``--model-path``.
    port : int
        TCP port to listen on.
    backend : str, optional
        ``--attention-backend``; None leaves the choice to the host.
    policy : str, optional
        Put into ``DEFT_POLICY``.
    host_arguments : sequence of str
        Passed on as they are, last, so that they win over ours.
    environment : mapping, optional
        Further variables for the server.
    gpu : bool, optional
        Run on the GPU; None asks :func:`use_gpu`.

    Raises
    ------
    DriverStubError
        If the CPU engine needs the driver stand-in and it cannot be made.
    """
    on_gpu = use_gpu() if gpu is None else gpu
    extra = dict(environment or {})
    notes: list[str] = []
    arguments = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    arguments += ["--port", str(port)]
    if backend is not None:
        arguments += ["--attention-backend", backend]
    if policy is not None:
        extra["DEFT_POLICY"] = policy
    if not on_gpu:
        arguments += ["--device", "cpu", "--max-total-tokens", str(CPU_TOKENS)]
        # Two kernels round 16-bit results differently, and where two tokens are nearly equally
        # likely that decides: in float32, only what is wrong differs.
        arguments += ["--dtype", "float32"]
        extra["SGLANG_USE_CPU_ENGINE"] = "1"
        extra["TRITON_INTERPRET"] = "1"  # Triton's kernels run in its interpreter, in NumPy
        notes.append("no usable GPU: the host's CPU engine, kernels in Triton's interpreter")
        if not has_nvidia_driver():
            inherited = os.environ.get("LD_LIBRARY_PATH")
            paths = [str(ensure_driver_stub()), *([inherited] if inherited else [])]
            extra["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
            notes.append(f"no NVIDIA driver: a stand-in for libcuda.so.1 in {paths[0]}")
    arguments += host_arguments
    return ServerCommand(tuple(arguments), extra, port, on_gpu, tuple(notes))
