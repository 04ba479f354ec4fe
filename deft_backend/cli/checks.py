"""The checks of `deft doctor`: one function for each subject yields its findings."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Literal

from deft_backend.files.folders import state_directory, write_fails
from deft_backend.hosts.common.contract import TestedVersions, tries_others, version_key
from deft_backend.hosts.sglang.versions import SGLANG
from deft_backend.hosts.vllm.versions import VLLM
from deft_backend.settings.config import (
    VARIABLES,
    NoBatchError,
    Settings,
    SettingsError,
    removed_settings,
    unknown_settings,
)
from deft_backend.settings.version import VERSION, installed_version
from deft_backend.tools.servers.driver_stub import (
    DriverStubError,
    StubFolderError,
    ensure_driver_stub,
    find_compiler,
    has_nvidia_driver,
    loading_fails,
    num_gpus,
)

Status = Literal["ok", "note", "problem"]

_INSTALL = f"pip install deft_backend-{VERSION}-py3-none-any.whl (in a checkout: pip install .)"
_COMPILER = "apt-get install gcc (or set CC)"
_CACHE = "export DEFT_CACHE_DIR=/tmp/deft-$(id -u)  # or any folder that only you may write"


@dataclass(frozen=True)
class Host:
    versions: TestedVersions
    group: str  # the group of entry points in which the host looks for plugins
    selection: str  # the environment variable that, if set, names the plugins to load
    selects_literally: bool  # whether spaces count, and an empty value names no plugin

    def leaves_us_out(self) -> bool:
        named = os.environ.get(self.selection)
        if named is None:
            return False
        names = named.split(",")
        if not self.selects_literally:
            names = [name.strip() for name in names if name.strip()] or ["deft"]
        return "deft" not in names


HOSTS = (
    Host(SGLANG, "sglang.srt.plugins", "SGLANG_PLUGINS", False),
    Host(VLLM, "vllm.general_plugins", "VLLM_PLUGINS", True),
)

# Package, lowest version, first version not supported, what its absence is, remedy.
_PACKAGES: tuple[tuple[str, str, str | None, Status, str], ...] = (
    ("torch", "2.8", "3", "problem", "pip install 'torch>=2.8,<3'"),
    ("triton", "3.4", "4", "problem", "pip install 'triton>=3.4,<4'"),
    ("aiohttp", "3.9", None, "note", "pip install 'deft-backend[bench]'"),
)


@dataclass(frozen=True)
class Check:
    """A finding. With a `problem` the plugin cannot work; a `note` is worth knowing."""

    subject: str
    status: Status
    state: str
    remedy: str | None = None


def check_packages() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()}")
    version = installed_version("deft-backend")
    if version is None:  # without the entry point, this is a problem
        text = f"{VERSION}, not installed: it runs from its folder"
        yield Check("deft-backend", "note", text, _INSTALL)
    else:
        yield Check("deft-backend", "ok", version)
    installed = hosts_with_metadata()
    for host in HOSTS:
        # Hosts exclude each other, so an environment holds one of them.
        if installed and host not in installed:
            text = f"not installed, and not needed: the other host is; {_window(host.versions)}"
            yield Check(host.versions.distributions[0], "ok", text)
        elif installed or host is HOSTS[0]:
            yield _host(host.versions)
    yield from (_bounded(*package) for package in _PACKAGES)


def check_imports() -> Iterator[Check]:
    for module in ("numpy", "torch", "triton", "deft_backend.attention"):
        if not find_spec(module.partition(".")[0]):
            return  # reported above
        try:
            import_module(module)
        except Exception as error:  # a library that is missing, or any error of its code
            text = f"{module} is installed, but cannot be imported: {error!r}"
            remedy = f"pip install --force-reinstall {module.partition('.')[0]}"
            yield Check("imports", "problem", text, remedy)
            return
    yield Check("imports", "ok", "numpy, torch, triton and the kernels")


def _host(versions: TestedVersions) -> Check:
    name = versions.distributions[0]
    version, window = versions.installed(), _window(versions)
    remedy = f"pip install 'deft-backend[{name}]'"
    if version is None:
        return Check(name, "problem", f"not installed; {window}", remedy)
    if versions.holds(version):
        newer = versions.newer(version)
        text = f"; newer inside the window: up to {newer}" if newer else ", the newest"
        return Check(name, "ok", f"{version}, inside the {window}{text}")
    if tries_others():
        text = f"{version}, outside the {window}. DEFT_UNTESTED_HOST tries it: see the server's log"
        return Check(name, "note", text, remedy)
    text = f"{version}, outside the {window}: this {versions.name} decodes without tree attention"
    return Check(name, "problem", text, f"{remedy} in an environment of its own")


def _window(versions: TestedVersions) -> str:
    return f"window {versions.lowest} to {versions.newest}"


def _bounded(name: str, low: str, high: str | None, missing: Status, remedy: str) -> Check:
    version, bounds = installed_version(name), f">={low}" + (f", <{high}" if high else "")
    if version is None:
        return Check(name, missing, f"not installed; supported is {bounds}", remedy)
    if version_key(version) < version_key(low):
        return Check(name, missing, f"{version}; supported is {bounds}", remedy)
    if high is not None and version_key(version) >= version_key(high):
        return Check(name, "note", f"{version}; tested is {bounds}", remedy)
    return Check(name, "ok", f"{version} (supported is {bounds})")


def hosts_with_metadata() -> list[Host]:
    return [host for host in HOSTS if host.versions.installed() is not None]


def check_entry_point() -> Iterator[Check]:
    for host in hosts_with_metadata() or HOSTS[:1]:
        points = {point.value: point for point in entry_points(group=host.group, name="deft")}
        if not points:
            name = host.versions.name
            text = f"no entry point 'deft' in the group {host.group}: {name} cannot find us"
            yield Check("plugin", "problem", text, _INSTALL)
            continue
        for value, point in points.items():
            try:
                point.load()
            except Exception as error:
                yield Check("plugin", "problem", f"{value} cannot be imported: {error}", _INSTALL)
            else:
                yield Check("plugin", "ok", f"{value} is registered in {host.group}")
        if host.leaves_us_out():
            allowed = os.environ[host.selection]
            text = f"{host.selection} is {allowed!r}, which leaves out 'deft'"
            kept = [word.strip() for word in allowed.split(",") if word.strip()]
            remedy = f"export {host.selection}={','.join([*kept, 'deft'])}"
            yield Check("plugin", "problem", text, remedy)


def check_device() -> Iterator[Check]:
    if has_nvidia_driver():
        yield Check("driver", "ok", "NVIDIA driver found")
    elif HOSTS[0] in hosts_with_metadata() or not hosts_with_metadata():
        yield from _stub()
    else:
        yield Check("driver", "note", "no NVIDIA driver; vLLM's CPU build needs none")
    if compiler := find_compiler():
        yield Check("C compiler", "ok", " ".join(compiler))
    else:  # Triton compiles its launchers
        yield Check("C compiler", "problem" if num_gpus() else "note", "none found", _COMPILER)
    yield _engine()


def check_settings() -> Iterator[Check]:
    pair = _no_batch()
    for variable in VARIABLES:
        if pair and variable.field == "min_batch":
            yield Check(variable.name, "problem", pair, "lower it, or raise DEFT_MAX_BATCH")
            continue
        value = os.environ.get(variable.name, "").strip()
        if not value:
            yield Check(variable.name, "ok", f"{variable.default or 'unset'} (default)")
            continue
        try:
            parsed = variable.read(value)
        except SettingsError as error:
            remedy = f"unset {variable.name}, or set it to {variable.allowed}"
            yield Check(variable.name, "problem", str(error), remedy)
            continue
        if variable.field == "fallback_backend":
            # Only the host knows its backends, and importing it takes too long here.
            yield Check(variable.name, "note", f"{value}; the server checks it when it starts")
        # kernel_folder.MANIFEST: its module imports Triton, which may be what is missing
        elif variable.field == "kernel_cache" and not os.path.isfile(parsed / "manifest.json"):
            text = f"{value} holds no kernels that can be read, so servers compile theirs"
            yield Check(variable.name, "note", text, "fill it with deft warm")
        else:
            yield Check(variable.name, "ok", value)
    for name, reason in removed_settings(os.environ).items():
        yield Check(name, "problem", reason, f"unset {name}")
    for name, hint in unknown_settings(os.environ):
        yield Check(name, "note", f"set, but no such setting exists; {hint}", f"unset {name}")
    yield from _state_folder()


def _no_batch() -> str | None:
    """Why tree attention would decode no batch, if each setting alone is allowed."""
    try:
        Settings.from_env()
    except NoBatchError as error:
        return str(error)
    except SettingsError:
        pass  # each variable is checked alone
    return None


def _stub() -> Iterator[Check]:
    try:
        folder = ensure_driver_stub()
    except DriverStubError as error:
        remedy = _CACHE if isinstance(error, StubFolderError) else _COMPILER
        yield Check("driver", "problem", str(error), remedy)
        return
    reason = loading_fails(folder)
    if reason is None:
        yield Check("driver", "note", f"no NVIDIA driver; a stand-in is in {folder}")
    else:
        yield Check("driver", "problem", f"the stand-in cannot be loaded: {reason}", _CACHE)


def _engine() -> Check:
    if not num_gpus():
        return Check("device", "note", "no GPU: servers use the CPU engine, and times mean nothing")
    try:
        import torch
    except Exception as error:
        remedy = "pip install 'deft-backend[sglang]'"
        return Check("device", "problem", f"torch cannot be imported: {error}", remedy)
    if torch.version.cuda is None or not torch.cuda.is_available():
        text = f"{num_gpus()} GPU(s), but torch {torch.__version__} cannot use them"
        return Check("device", "problem", text, "install a CUDA build of torch for this driver")
    major, minor = torch.cuda.get_device_capability()
    text = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return Check("device", "ok", f"{text}, CUDA {torch.version.cuda}")


def _state_folder() -> Iterator[Check]:
    try:
        folder = state_directory(Settings.from_env())
    except SettingsError as error:
        if "DEFT_" not in str(error).split(" ")[0]:  # otherwise reported above
            yield Check("state folder", "problem", str(error), _CACHE)
        return
    reason = write_fails(folder)
    if reason is None:
        yield Check("state folder", "ok", str(folder))
    else:
        text = (
            f"{folder} cannot be written: {reason}. Servers run, and `deft top` does not show them"
        )
        yield Check("state folder", "note", text, _CACHE)
