"""Tensors of the package name their dtype and device: a default would differ on another machine."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKERS = {f"torch.{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")}

ON_CPU = {
    "attention/self_check.py": ["torch.empty", "torch.full"],
    "hosts/common/described_server.py": ["torch.zeros", "torch.zeros"],
    "planner/device_plan.py": ["torch.zeros"],
    "planner/on_device/arrays.py": ["torch.zeros"],
}
"""Calls without a device: a tensor on the CPU, wherever the attention runs."""


def test_every_tensor_names_its_dtype_and_its_device():
    without = {}
    for path in sorted((ROOT / "deft_backend").rglob("*.py")):
        file = str(path.relative_to(ROOT / "deft_backend"))
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: call.lineno):
            name, given = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
            if name not in MAKERS:
                continue
            assert "dtype" in given, (file, name)
            if "device" not in given:
                without.setdefault(file, []).append(name)
    assert without == ON_CPU
