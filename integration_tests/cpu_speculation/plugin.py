"""Load the stand-ins into every process of a server, as a plugin of SGLang."""

import torch

from deft_backend.hosts.common.contract import version_key
from deft_backend.settings.version import installed_version
from integration_tests.cpu_speculation import attention, places, trees

REGISTER = f"{__name__}:register"
"""The target of the plugin's entry point."""

SINCE = "0.5.23"


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
