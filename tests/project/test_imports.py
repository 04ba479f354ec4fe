"""The data flow is also the import order: rooms import rooms below them, and nothing else."""

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deft_backend"
PATCHES = ROOT / "patches" / "deft_patches"
HOST_PACKAGES = {"sglang", "vllm"}
CHECKOUT = {"benchmarks", "tools", "tests", "integration_tests", "examples"}

BASE = ("settings", "shapes", "files", "compile")  # every room above them may import these

# From bottom to top. A room may import those named there, rooms of BASE and itself.
ROOMS = json.loads(Path(__file__).with_name("rooms.json").read_text())
MAY_IMPORT = {name: needs.split() for name, needs in ROOMS.items()}

# Rooms whose modules load without torch: servers that do not ask for us, the process that measures
# servers and commands that need no tensor would otherwise take seconds longer to start.
WITHOUT_TORCH = (
    *["", "__main__", "cli", "settings", "files", "policies", "telemetry", "hosts"],
    *["tools/ab", "tools/harness", "tools/servers", "tools/traces"],
)


@cache
def imports(path):
    """Absolute module names that a file imports, wherever it does."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; the package uses absolute ones"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(name):
    """The room of a module of the package, or of a name that a module imports from it.

    >>> [room("deft_backend." + name) for name in ("hosts.sglang.start", "hosts.windows", "cli")]
    ['hosts/sglang', 'hosts', 'cli']
    >>> room("deft_backend"), room("deft_backend.tools"), room("deft_backend.forest.Forest")
    ('', 'tools', 'forest')
    """
    parts = name.split(".")[1:]
    nested = parts[:1] == ["tools"] or (
        parts[:1] == ["hosts"] and (PACKAGE / "/".join(parts[:2])).is_dir()
    )
    return "/".join(parts[: 2 if nested else 1])


def modules(folder):
    paths = sorted(folder.rglob("*.py"))
    assert paths, f"{folder} holds no modules"
    return paths


def test_every_module_has_a_room():
    assert {room(module_name(path)) for path in modules(PACKAGE)} == MAY_IMPORT.keys()


def test_a_room_imports_only_rooms_below_it():
    """So there is no circle, and no arrow back up."""
    order = list(MAY_IMPORT)
    for name, needs in MAY_IMPORT.items():
        above = {need for need in needs if order.index(need) >= order.index(name)}
        assert not above, f"{name} imports {above}"


def wrong_imports(path, rooms, packages):
    """What a file imports of our rooms, of hosts, patches and the checkout, besides those given."""
    others = {*CHECKOUT, *HOST_PACKAGES, "deft_patches"} - packages
    for name in imports(path):
        top, _, inner = name.partition(".")
        if top in others or (top == "deft_backend" and (not inner or room(name) not in rooms)):
            yield f"{path.relative_to(ROOT)} imports {name}"


def test_modules_import_along_the_data_flow():
    """Only hosts import servers and load patches. No module imports `deft_backend/__init__.py`."""
    wrong = []
    for path in modules(PACKAGE):
        here = room(module_name(path))
        allowed = {here, *MAY_IMPORT[here]} | ({*BASE} if here not in BASE else set())
        top, _, host = here.partition("/")
        wrong += wrong_imports(path, allowed, {host, "deft_patches"} if top == "hosts" else set())
    assert not wrong, "\n".join(sorted(wrong))


def test_patches_import_a_host_and_each_other_alone():
    """A patch makes no decisions: its adapter passes in all that it needs."""
    for path in modules(PATCHES):
        hosts = {path.parent.name} if path.parent != PATCHES else HOST_PACKAGES
        assert not [*wrong_imports(path, (), {*hosts, "deft_patches"})]


def needed(path, names):
    """The modules of `names` that a file imports, for types alone as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # of a module, or of a name that a module defines
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & names
            found |= {str(node.module)} if inner - names else set()
    return found & names


def test_no_modules_import_each_other():
    files = {module_name(path): path for path in modules(PACKAGE)}
    TopologicalSorter({name: needed(path, {*files}) for name, path in files.items()}).prepare()


def loaded_by(names, heavy):
    """The first of some modules whose import loads a heavy package, itself or through others."""
    script = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    if heavy := {heavy} & set(sys.modules):
        sys.exit(f"{{name}} loads {{heavy}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    return done.stderr


@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_servers_that_do_not_ask_for_us_load_little(host):
    """Hosts load the plugin in every process of every server on the machine.

    An imported compiler would delay all of them.
    """
    names = [f"deft_backend.hosts.{host}.plugin", "deft_backend.hosts.common.contract"]
    assert loaded_by(names, {"numpy", "torch", "triton"}) == ""


def test_the_commands_start_without_a_compiler():
    """Each command loads what it needs: NumPy alone takes a tenth of a second."""
    heavy = {"numpy", "torch", "triton"}
    assert loaded_by(["deft_backend.cli.app"], heavy) == ""
    assert loaded_by(["benchmarks.__main__"], heavy - {"numpy"}) == ""


def test_what_needs_no_tensor_loads_without_torch():
    """In the process that measures servers, a CUDA context would take GPU memory from them."""
    names = [module_name(path) for path in modules(PACKAGE)]
    names = [name for name in names if room(name) in WITHOUT_TORCH]
    assert {room(name) for name in names} == {*WITHOUT_TORCH}
    measuring = modules(ROOT / "benchmarks" / "e2e")
    for path in measuring:
        if path.name != "random_weights.py":
            lazily = imports(path) & {"torch", "benchmarks.e2e.random_weights"}
            assert not lazily, f"{path.relative_to(ROOT)} imports {lazily}"
    names += [module_name(path) for path in measuring if path.name != "random_weights.py"]
    assert loaded_by(names, {"torch", *HOST_PACKAGES}) == ""


def test_an_import_through_others_is_seen():
    """Such as torch, which a module of ours imports."""
    name = "deft_backend.planner.device_plan"
    assert loaded_by([name], {"torch"}) == f"{name} loads {{'torch'}}\n"
