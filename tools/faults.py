"""``make faults``: sample mutants of the package and the patches, and see whether tests fail.

Cosmic Ray, and a few operators for kernels' code, change one place of a copy of the checkout. The
tests that lie nearest run there. The same seed and sources give the same mutants. Annotations,
decorators, f-strings and log lines stay as they are.

docs/results/faults.json gets the rate of each folder, and the mutants that no test caught. If such
a mutant changes nothing, say why in its "equivalent": the next record keeps the reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import parso.python.tree as tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "results" / "faults.json"
SOURCES = ("deft_backend", "patches/deft_patches")

_IN_KERNELS = " ".join(
    f"tests/kernels/test_{name}.py"
    for name in ("kernel_launches", "kernels", "query_tokens", "eight_bits_and_sinks", "other_gpus")
)
_IN_GLUON = " ".join(
    f"tests/kernels/test_{name}.py"
    for name in ("gluon_kernels", "masked_tile", "program_numbers", "compiled_kernels")
)
NEAREST = {
    "deft_backend/attention": "tests/attention tests/kernels/test_kernels.py",
    "deft_backend/costs": "tests/costs tests/policies/test_range_choice.py",
    "deft_backend/hosts/common": "tests/hosts/common tests/hosts/sglang",
    "deft_backend/hosts/windows.py": "tests/project/test_host_matrix.py",
    "deft_backend/kernels": _IN_KERNELS,
    "deft_backend/kernels/hopper": _IN_GLUON,
    "deft_backend/kernels/latent": "tests/attention/test_latent_attention.py",
    "deft_backend/policies": "tests/policies tests/planner",
    "deft_backend/shapes.py": "tests/kernels/test_query_tokens.py tests/planner",
    "deft_backend/telemetry": "tests/telemetry tests/tools/watch",
    "patches/deft_patches": "tests/hosts/sglang",
    "patches/deft_patches/vllm": "tests/hosts/vllm",
}
"""Tests by how a path begins, the longest match first; others lie in the same folder of tests."""

UNUSED = ("core/NoOp", "core/VariableInserter", "core/VariableReplacer", "core/RemoveDecorator")


class Own(Operator):  # type: ignore[misc]
    """An operator without Cosmic Ray's examples."""

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class Drop(Own):
    """A term of ``&``, ``|``, ``and``, ``or`` goes, or a keyword argument: a mask, for example."""

    def _parts(self, node: Any) -> list[Any]:
        if node.type in ("and_expr", "expr", "and_test", "or_test"):
            return list(node.children[::2])
        rest = node.children[2:] if node.type == "arglist" else ()
        return [part for part in rest if part.type == "argument" and part.children[1] == "="]

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        return ((part.start_pos, part.end_pos) for part in self._parts(node))

    def mutate(self, node: Any, index: int) -> Any:
        at = node.children.index(self._parts(node)[index])
        rest = node.children[: max(0, at - 1)] + node.children[max(2, at + 1) :]
        return tree.PythonNode(node.type, rest) if len(rest) > 1 else rest[0]


_BOUNDS = {"min": "max", "minimum": "maximum", "amin": "amax"}
_BOUNDS |= {largest: least for least, largest in _BOUNDS.items()}


class SwapBounds(Own):
    """The least becomes the largest, and the other way round."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "name" and node.value in _BOUNDS:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = _BOUNDS[node.value]
        return node


class DropCall(Own):
    """A statement that only calls something goes: a store, a barrier, a check."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "simple_stmt" and node.children[0].type in ("atom_expr", "power"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0].get_first_leaf()
        node.children[0] = tree.Name("pass", node.start_pos, first.prefix)
        return node


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    operator: str
    text: str  # of the changed file
    diff: str

    @property
    def folder(self) -> str:
        return Path(self.path).parent.as_posix()


def operators() -> dict[str, Operator]:
    classes = [get_operator(name) for name in operator_names() if name not in UNUSED]
    return {each.__name__: each() for each in (*classes, Drop, SwapBounds, DropCall)}


def kept_spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change would change no behaviour that a test should see."""
    kept: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        kept += getattr(node, "decorator_list", [])
        kept += [getattr(node, name, None) for name in ("annotation", "returns")]
        text = ast.unparse(node) if isinstance(node, (ast.Expr, ast.If)) else ""
        if isinstance(node, ast.JoinedStr) or text.startswith(("logger.", "if TYPE_CHECKING")):
            kept.append(node)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for node in kept
        if node is not None
    ]


def places(source: str) -> dict[Any, list[tuple[str, int]]]:
    """Operators and the numbers of their occurrences, by the place that they change."""
    kept = kept_spans(source)
    found: dict[Any, list[tuple[str, int]]] = {}
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in operators().items():
        every = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, place in enumerate(every):
            if not any(begin <= place[0] and place[1] <= end for begin, end in kept):
                found.setdefault(place, []).append((name, occurrence))
    return found


def tests_of(path: str) -> tuple[str, ...]:
    """The tests nearest to a file; those named after it come first."""
    known = [prefix for prefix in NEAREST if path.startswith(prefix)]
    if known:
        return tuple(NEAREST[max(known, key=len)].split())
    folder = Path("tests", *Path(path).parts[1:-1])
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    named = ROOT / folder / f"test_{Path(path).stem}.py"
    return (*([str(named.relative_to(ROOT))] if named.exists() else []), str(folder))


def sampled(seed: int, wanted: str) -> Iterator[Mutant]:
    """Mutants in random order: a folder by its lines, a place of it, and an operator there."""
    draw = random.Random(seed)
    files = [p for source in SOURCES for p in sorted((ROOT / source).rglob("*.py"))]
    texts = {str(p.relative_to(ROOT)): p.read_text() for p in files}
    texts = {path: text for path, text in texts.items() if path.startswith(wanted)}
    weights = [text.count("\n") for text in texts.values()]
    known: dict[str, dict[Any, list[tuple[str, int]]]] = {}
    while True:
        (path,) = draw.choices(list(texts), weights)
        if path not in known:
            known[path] = places(texts[path])
        if not known[path]:
            continue
        place = draw.choice(sorted(known[path]))
        name, occurrence = draw.choice(known[path].pop(place))
        text = mutate_code(texts[path], operators()[name], occurrence)
        try:
            same = text is None or ast.dump(ast.parse(text)) == ast.dump(ast.parse(texts[path]))
        except SyntaxError:
            continue
        if not same:
            lines = difflib.unified_diff(
                texts[path].split("\n"), text.split("\n"), lineterm="", n=1
            )
            yield Mutant(path, name, text, "\n".join(list(lines)[2:]))


class Copies:
    """Copies of the checkout, one for each test process at a time."""

    def __init__(self, folder: Path, count: int, pythons: dict[str, Path]) -> None:
        self._pythons = pythons
        self._folder = folder
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._seconds: dict[tuple[str, ...], int | None] = {}
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
        for number in range(count):
            copy = folder / str(number)
            for name in filter(lambda name: (ROOT / name).is_file(), listed):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
            self._free.put(copy)

    def ready(self, tests: tuple[str, ...]) -> bool:
        """Whether unchanged sources pass these tests; that run sets the limit for mutants."""
        every = self._without_order(tests)
        if every not in self._seconds:
            began = time.monotonic()
            failed = self._fails(tests, None, 3600.0)
            self._seconds[every] = None if failed else round(time.monotonic() - began)
            print(f"    {' '.join(tests)}: unchanged, {self._seconds[every]} s", flush=True)
        return self._seconds[every] is not None

    def _without_order(self, tests: tuple[str, ...]) -> tuple[str, ...]:
        """The same tests without those files that their folder runs as well."""
        return tuple(name for name in tests if str(Path(name).parent) not in tests)

    def catch(self, mutant: Mutant) -> bool:
        """Whether a test fails, or all take three times as long as without the mutant."""
        tests = tests_of(mutant.path)
        return self._fails(
            tests, mutant, 3 * (self._seconds[self._without_order(tests)] or 0) + 60.0
        )

    def _fails(self, tests: tuple[str, ...], mutant: Mutant | None, seconds: float) -> bool:
        copy = self._free.get()
        python = self._pythons["vllm" if "hosts/vllm" in tests[0] else "sglang"]
        path = ":".join(str(copy / name) for name in ("", "patches", "tests/support"))
        own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(self._folder)}
        options = ("-q", "-x", "-m", "not rare", "-p", "no:cacheprovider")
        if mutant is not None:
            original = (copy / mutant.path).read_text()
            (copy / mutant.path).write_text(mutant.text)
        tested = subprocess.Popen(
            [str(python), "-m", "pytest", *options, *tests],
            cwd=copy,
            env={**os.environ, **own},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return tested.wait(seconds) != 0
        except subprocess.TimeoutExpired:
            return True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tested.pid, signal.SIGKILL)  # what the tests started, too
            tested.wait()
            if mutant is not None:
                (copy / mutant.path).write_text(original)
            self._free.put(copy)


def record(seed: int, seconds: float, results: list[tuple[Mutant, bool]]) -> None:
    """Write the rates and the mutants that no test caught, with the reasons given before."""
    reasons = {}
    if RECORD.exists():
        for each in json.loads(RECORD.read_text())["survivors"]:
            reasons[each["path"], each["diff"]] = each["equivalent"]
    tried = Counter(mutant.folder for mutant, _ in results)
    caught = Counter(mutant.folder for mutant, found in results if found)
    left = [mutant for mutant, found in results if not found]
    why = [reasons.get((mutant.path, mutant.diff), "") for mutant in left]
    equal = Counter(mutant.folder for mutant, reason in zip(left, why, strict=True) if reason)
    survivors = [
        {"path": m.path, "operator": m.operator, "diff": m.diff, "equivalent": reason}
        for m, reason in zip(left, why, strict=True)
    ]
    folders = {
        name: {"mutants": tried[name], "caught": caught[name], "equivalent": equal[name]}
        for name in sorted(tried)
    }
    made = {"seed": seed, "minutes": round(seconds / 60), "folders": folders}
    made["survivors"] = survivors
    RECORD.write_text(json.dumps(made, indent=2) + "\n")
    print(f"{sum(caught.values())} of {len(results) - sum(equal.values())} caught: {RECORD}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--mutants", type=int, default=200, help="At most so many.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--folder", default="", help="Only files whose paths begin so.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--python", type=Path, required=True, help="With SGLang and the tests.")
    parser.add_argument("--python-vllm", type=Path, required=True)
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    began, results = time.monotonic(), []
    mutants = itertools.islice(sampled(given.seed, given.folder), given.mutants)
    with tempfile.TemporaryDirectory(prefix="deft-faults-") as folder:
        pythons = {"sglang": given.python.absolute(), "vllm": given.python_vllm.absolute()}
        copies = Copies(Path(folder), given.processes, pythons)

        def tried(mutant: Mutant) -> tuple[Mutant, bool] | None:
            if time.monotonic() - began > 60 * given.minutes:
                return None
            found = copies.catch(mutant)
            print(f"{'caught' if found else 'SURVIVED'} {mutant.path}\n{mutant.diff}", flush=True)
            return mutant, found

        with ThreadPoolExecutor(given.processes) as pool:
            chosen = [mutant for mutant in mutants if copies.ready(tests_of(mutant.path))]
            results = [result for result in pool.map(tried, chosen) if result is not None]
    if not results:
        raise SystemExit("no mutant was tried: give it more minutes, or see which tests fail")
    record(given.seed, time.monotonic() - began, results)


if __name__ == "__main__":
    main()
