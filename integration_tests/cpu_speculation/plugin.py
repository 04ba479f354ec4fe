"""Load the stand-ins into every process of a server, as a plugin of SGLang."""

import os
from pathlib import Path

import torch

from deft_backend.hosts.contract.version_numbers import version_key
from deft_backend.settings.installed import installed_version
from integration_tests.cpu_speculation import attention, places, trees

ROOT = Path(__file__).parents[2]

SINCE = "0.5.23"


def environment(folder):
    """Write the plugin's entry point below `folder`; returns settings of servers that use it."""
    described = folder / "cpu_speculation-0.0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cpu-speculation\nVersion: 0\n"
    )
    (described / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\ncpu_speculation = {__name__}:register\n"
    )
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def unusable():
    """Why the installed SGLang cannot use the stand-ins, or None."""
    found = installed_version("sglang")
    if found is None or version_key(found) >= version_key(SINCE):
        return None
    return f"the stand-ins have the signatures of SGLang {SINCE}; this is {found}"


def register():
    """Add the operations; let the host choose its backend for CPUs with AMX, which uses them."""
    import sgl_kernel  # noqa: F401
    import sglang.srt.arg_groups.overrides as overrides

    for module in (attention, places, trees):
        for name, operation in _operations(module).items():
            setattr(torch.ops.sgl_kernel, name, operation)
    real = overrides.get_platform
    overrides.get_platform = lambda: _WithAmx(real())


def _operations(module):
    return {name: value for name, value in vars(module).items() if name.endswith("_cpu")}


class _WithAmx:
    """The host's platform, with AMX."""

    has_amx = True

    def __init__(self, platform):
        self._platform = platform

    def __getattr__(self, name):
        return getattr(self._platform, name)
