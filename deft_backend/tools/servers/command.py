"""Starting a host server: its command line and environment, on a GPU or on the CPU engine."""

import errno
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

from deft_backend.hosts.vllm.versions import backend_name
from deft_backend.settings.version import installed_version
from deft_backend.tools.servers.driver_stub import ensure_driver_stub, has_nvidia_driver, num_gpus

BACKEND = "deft"  # our name for the plugin; :data:`BACKEND_NAMES` has the hosts' names for it

BACKEND_NAMES = {"sglang": BACKEND, "vllm": backend_name()}
"""The plugin's name for ``--attention-backend`` in the installed version of each host."""

HOSTS = tuple(BACKEND_NAMES)

CPU_TOKENS = 16384
"""Tokens in the KV cache of SGLang's CPU engine, which otherwise takes most of the memory."""

_PORTS = range(20_000, 32_768)

CPU_GIB = 1  # size of vLLM's KV cache on the CPU, in GiB


class StartError(RuntimeError):
    """A host server did not start, or it ended."""


@dataclass(frozen=True)
class ServerCommand:
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    port: int
    on_gpu: bool
    notes: tuple[str, ...] = ()
    address: str = "127.0.0.1"  # where it listens

    @property
    def url(self) -> str:
        every = {"0.0.0.0": LOOPBACK, "::": "::1"}  # a server listens there, nobody is there
        host = every.get(self.address, self.address)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def shell(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.arguments)])

    def full_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def use_gpu() -> bool:
    if not num_gpus():
        return False
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def installed_hosts() -> list[str]:
    return [host for host in HOSTS if find_spec(host) is not None]


def vllm_is_cpu_build() -> bool:
    version = installed_version("vllm")
    if version is None:  # the package from PyPI has a name of its own
        return find_spec("vllm") is not None
    return "cpu" in version


LOOPBACK = "127.0.0.1"
"""Where servers listen unless `host_arguments` say otherwise: vLLM by itself would listen on every
interface of the machine."""


def free_port() -> int:
    """A port on which nothing listens now.

    Linux gives no such port to an outgoing connection, which could take it while the server starts.
    """
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def check_port(arguments: Sequence[str], default: int | None = None) -> None:
    """Raise StartError if another program listens where a host with these arguments will: a host
    tells only after a full start. Without a port, nothing is checked.
    """
    address = value_of("--host", arguments) or LOOPBACK
    port = value_of("--port", arguments) or default
    if port is None:
        return
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OverflowError:
        return
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise StartError(
                f"cannot listen on {address}, port {port}: {os.strerror(error.errno)}; choose "
                "another --port"
            ) from None


def server_command(
    model: str,
    port: int,
    *,
    host: str = "sglang",
    backend: str | None = BACKEND,
    host_arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    gpu: bool | None = None,
) -> ServerCommand:
    """Command line and environment of a host server; `host_arguments` come last and override ours.
    None leaves `backend` or `gpu` to the host. Raises StartError, or DriverStubError if
    SGLang's CPU engine needs the driver stand-in, and it cannot be compiled.
    """
    on_gpu = use_gpu() if gpu is None else gpu
    if host == "vllm" and gpu is None:
        on_gpu = on_gpu and not vllm_is_cpu_build()
    address = value_of("--host", host_arguments) or LOOPBACK
    port = _port(value_of("--port", host_arguments), port)
    place = ["--host", LOOPBACK, "--port", str(port)]
    module, notes = _MODULES[host], list[str]()
    several = (value_of(name, host_arguments) for name in ("--api-server-count", "-asc"))
    if host == "vllm" and any(several):
        if on_gpu:
            module = _SEVERAL_API_SERVERS
        else:
            notes.append("one API server: vLLM's CPU build has no `vllm serve`, which starts more")
    arguments = [sys.executable, "-m", *module, model, *place]
    if backend is not None:
        name = BACKEND_NAMES[host] if backend == BACKEND else backend
        arguments += ["--attention-backend", name]
    extra = dict(environment or {})
    if not on_gpu:
        notes.append(
            "no usable GPU: the host's CPU engine runs, with kernels in Triton's interpreter"
        )
        extra["TRITON_INTERPRET"] = "1"  # Triton's interpreter runs the kernels in NumPy
        # Two kernels round 16-bit results differently. If two tokens are almost equally likely,
        # rounding decides between them. In float32, only wrong results differ.
        arguments += ["--dtype", "float32"]
        if host == "sglang":
            _sglang_on_cpu(arguments, extra, notes)
        else:
            arguments += ["--enforce-eager"]  # compiling takes more time than it saves
            extra.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CPU_GIB))
    arguments += host_arguments
    return ServerCommand(tuple(arguments), extra, port, on_gpu, tuple(notes), address)


def _port(named: str | None, default: int) -> int:
    if named is None:
        return default
    try:
        port = int(named)
    except ValueError:
        port = 0
    if not 1 <= port <= 65535:
        raise StartError(f"--port is {named!r}; expected a number from 1 to 65535")
    return port


_MODULES = {
    "sglang": ("sglang.launch_server", "--model-path"),
    # Not `vllm serve`: that command looks up a distribution that the CPU build lacks.
    "vllm": ("vllm.entrypoints.openai.api_server", "--model"),
}

_SEVERAL_API_SERVERS = ("vllm.entrypoints.cli.main", "serve")
"""`vllm serve`: the module of `_MODULES` starts one API server, whatever their number."""


def _sglang_on_cpu(arguments: list[str], extra: dict[str, str], notes: list[str]) -> None:
    arguments += ["--device", "cpu", "--max-total-tokens", str(CPU_TOKENS)]
    extra["SGLANG_USE_CPU_ENGINE"] = "1"
    if not has_nvidia_driver():
        inherited = os.environ.get("LD_LIBRARY_PATH")
        paths = [str(ensure_driver_stub()), *([inherited] if inherited else [])]
        extra["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
        notes.append(f"no NVIDIA driver: a stand-in for libcuda.so.1 in {paths[0]}")


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The last value of an option, from ``--option value`` or ``--option=value``; None: none."""
    value = None
    for at, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            value = word.partition("=")[2]
        elif word == option and at + 1 < len(arguments):
            value = arguments[at + 1]
    return value
