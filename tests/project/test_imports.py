"""The data flow is also the import order: forest → policies → planner → kernels → hosts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deft_backend"
PATCHES = ROOT / "deft_patches"

# Tools, not stages of the data flow: every folder may import them.
TOOLS = {
    "compile", "policy_names", "dtype_names", "installed", "folders", "private_files",
    "json_fields", "version",
}  # fmt: skip
SHARED_BY_HOSTS = {
    "forest", "costs", "policies", "planner", "attention", "config", "telemetry",
    "hosts/common", "hosts/contract",
}  # fmt: skip
MAY_IMPORT: dict[str, set[str]] = {
    "compile": set(),
    "forest": set(),
    "costs": set(),
    "policies": {"forest", "costs", "kernel_limits"},
    "planner": {"forest", "policies", "kernel_limits"},
    "kernels": {"planner", "kernel_limits", "query_blocks"},
    "attention": {
        "forest",
        "policies",
        "planner",
        "kernels",
        "costs",
        "kernel_limits",
        "query_blocks",
    },
    "tuning": {
        "forest",
        "costs",
        "policies",
        "planner",
        "attention",
        "harness",
        "traces",
        "kernel_limits",
    },
    "explain": {"forest", "policies", "planner", "query_blocks", "kernel_limits"},
    "telemetry": {"forest", "config"},
    "hosts/contract": set(),
    "hosts/common": {
        "forest",
        "policies",
        "planner",
        "attention",
        "config",
        "query_blocks",
        "hosts/contract",
    },
    "hosts/sglang": SHARED_BY_HOSTS,
    "hosts/vllm": SHARED_BY_HOSTS,
    "servers": {"config", "hosts/vllm"},  # the name to start vLLM with
    "traces": {"forest", "json_file"},
    "harness": {"servers", "telemetry", "traces", "json_file"},
    "watch": {"forest", "policies", "planner", "kernels", "attention", "explain", "telemetry"},
    "ab": {"harness", "servers", "telemetry", "traces"},
}
HOST_PACKAGES = {"sglang", "vllm"}


def imports(path: Path) -> set[str]:
    """Absolute module names that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            pytest.fail(f"{path}: relative import; the package uses absolute ones")
    return found


def room(name: str) -> str:
    """The folder, or module beside the folders, of an absolute name in the package.

    >>> room("deft_backend.hosts.sglang.start.factory"), room("deft_backend.telemetry.state")
    ('hosts/sglang', 'telemetry')
    """
    parts = name.split(".")[1:]
    return "/".join(parts[: 2 if parts[0] == "hosts" else 1])


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_folders_import_along_the_data_flow(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder} | TOOLS
    files = list((PACKAGE / folder).rglob("*.py"))
    assert files, f"deft_backend/{folder} holds no modules"
    for path in files:
        for name in imports(path):
            if name.startswith("deft_backend."):
                assert room(name) in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_the_data_flow_has_no_circle() -> None:
    """The table has an order: each folder comes after all folders that it imports."""
    placed: set[str] = set()
    left = {folder: needs & MAY_IMPORT.keys() for folder, needs in MAY_IMPORT.items()}
    while left:
        ready = {folder for folder, needs in left.items() if needs <= placed}
        assert ready, f"these import each other: {sorted(left)}"
        placed |= ready
        left = {folder: needs for folder, needs in left.items() if folder not in ready}


def test_patches_import_a_host_and_each_other_alone() -> None:
    """A patch makes no decisions: its adapter passes in all that it needs."""
    files = list(PATCHES.rglob("*.py"))
    assert files, "deft_patches holds no modules"
    for path in files:
        ours = {name for name in imports(path) if name.split(".")[0] == "deft_backend"}
        assert not ours, f"{path.relative_to(ROOT)} imports {ours}"


def test_only_hosts_load_patches() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[:2] in (("hosts", "sglang"), ("hosts", "vllm")):
            continue
        patches = {name for name in imports(path) if name.split(".")[0] == "deft_patches"}
        assert not patches, f"{path.relative_to(ROOT)} imports {patches}"


def test_only_hosts_import_servers() -> None:
    for path in PACKAGE.rglob("*.py"):
        if "hosts" in path.relative_to(PACKAGE).parts:
            continue
        servers = {name for name in imports(path) if name.split(".")[0] in HOST_PACKAGES}
        assert not servers, f"{path.relative_to(ROOT)} imports {servers}"


@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_servers_that_do_not_ask_for_us_load_little(host: str) -> None:
    """Hosts load the plugin in every process of every server on the machine.

    An imported compiler would delay all of them. It would even stop one: on a CPU, vLLM 0.32 looks
    through all imported modules at its start, and fails at a part of llvmlite.
    """
    script = (
        f"import sys, deft_backend.hosts.{host}.plugin, deft_backend.hosts.common.tested_versions; "
        "print({'numba', 'llvmlite', 'numpy', 'torch', 'triton'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "set()"


def test_no_module_imports_the_package_itself() -> None:
    """`deft_backend/__init__.py` imports the folders; no module imports it."""
    for path in PACKAGE.rglob("*.py"):
        assert "deft_backend" not in imports(path), f"{path.relative_to(ROOT)} imports deft_backend"


def test_the_package_never_imports_the_benchmarks() -> None:
    for path in PACKAGE.rglob("*.py"):
        found = {name for name in imports(path) if name.split(".")[0] == "benchmarks"}
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_the_process_that_measures_servers_does_without_torch() -> None:
    """A CUDA context in this process would take GPU memory from the servers."""
    files = list((ROOT / "benchmarks" / "e2e").glob("*.py"))
    assert files
    for path in files:
        if path.name != "random_weights.py":
            found = imports(path) & {"torch", "benchmarks.e2e.random_weights"}
            assert not found, f"{path.relative_to(ROOT)} imports {found}"
