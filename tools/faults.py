"""``make faults``: sample mutants of the package and the patches, and see whether tests fail.

Cosmic Ray, and a few operators for kernels' code, change one place of a copy of the checkout. A run
of all tests first notes the lines that each one reaches. A mutant then meets the tests that reach
its statement, and their neighbours. The same seed and sources give the same mutants. Annotations,
decorators, f-strings and log lines stay as they are.

docs/results/faults.json gets counts of each folder, and the mutants that no test caught. If such
a mutant changes nothing, begin its "note" with "equivalent" and say why; with "caught since" and
the test's name, if somebody has written one. Notes are kept.
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

TESTS = {
    "sglang": ("tests", "deft_backend", "tools/host_matrix"),
    "vllm": ("tests/hosts/vllm", "deft_backend/hosts/vllm", "tests/hosts/common"),
}
SECONDS = 120.0
"""A mutant meets so many seconds of tests, or at least one test."""
FIRST = 20
"""So many tests run before the others."""
EACH = 5
"""So many mutants of each folder come first; the others follow the lines of the folders."""

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
            yield node.start_pos, node.children[0].end_pos  # without the end of the line

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
    lines: frozenset[int]  # of the changed statement; none outside functions


def folder_of(path: str) -> str:
    """A folder of the record: two levels, and three for hosts."""
    folders = Path(path).parts[:-1]
    return "/".join(folders[: 3 if "hosts" in folders else 2])


def operators() -> dict[str, Operator]:
    classes = [get_operator(name) for name in operator_names() if name not in UNUSED]
    return {each.__name__: each() for each in (*classes, Drop, SwapBounds, DropCall)}


def kept_spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change would change no behaviour that a test should see."""
    kept: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        kept += getattr(node, "decorator_list", [])
        kept += [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cast":
            kept.append(node.args[0])
        text = ast.unparse(node) if isinstance(node, (ast.Expr, ast.If)) else ""
        if isinstance(node, ast.JoinedStr) or text.startswith(("logger.", "if TYPE_CHECKING")):
            kept.append(node)
    spans = filter(None, kept)
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in spans]


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


def statement_lines(source: str, line: int) -> frozenset[int]:
    """The lines of the innermost statement there, without its body; none outside functions."""
    module, lines = ast.parse(source), frozenset[int]()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for function in (node for node in ast.walk(module) if isinstance(node, functions)):
        for node in ast.walk(function):
            if not isinstance(node, ast.stmt) or isinstance(node, functions):
                continue
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            end = body[0].lineno - 1 if body else node.end_lineno or 0
            own = frozenset(range(node.lineno, max(node.lineno, end) + 1))
            if line in own and (not lines or len(own) < len(lines)):
                lines = own
    return lines


def sampled(seed: int, wanted: str) -> Iterator[Mutant]:
    """Mutants in random order: a folder, a file by its lines, a place of it, an operator there."""
    draw = random.Random(seed)
    files = [p for source in SOURCES for p in sorted((ROOT / source).rglob("*.py"))]
    texts = {str(p.relative_to(ROOT)): p.read_text() for p in files}
    texts = {path: text for path, text in texts.items() if path.startswith(wanted)}
    places_of = {path: places(text) for path, text in texts.items()}
    folders: dict[str, list[str]] = {}
    for path in texts:
        if places_of[path]:
            folders.setdefault(folder_of(path), []).append(path)
    turns = [folder for _ in range(EACH) for folder in folders]
    while True:
        among = folders[turns.pop(0)] if turns else [p for each in folders.values() for p in each]
        mutant = None
        while mutant is None and any(places_of[path] for path in among):
            (path,) = draw.choices(among, [texts[path].count("\n") for path in among])
            if places_of[path]:
                place = draw.choice(sorted(places_of[path]))
                name, occurrence = draw.choice(places_of[path].pop(place))
                mutant = changed(path, texts[path], place, name, occurrence)
        if mutant is not None:
            yield mutant


def changed(path: str, text: str, place: Any, name: str, occurrence: int) -> Mutant | None:
    """The mutant of an operator at a place, or None if it is no other program."""
    other = mutate_code(text, operators()[name], occurrence)
    try:
        if other is None or ast.dump(ast.parse(other)) == ast.dump(ast.parse(text)):
            return None
    except SyntaxError:
        return None
    lines = difflib.unified_diff(text.split("\n"), other.split("\n"), lineterm="", n=1)
    return Mutant(path, name, other, "\n".join(list(lines)[2:]), statement_lines(text, place[0][0]))


@dataclass(frozen=True)
class Test:
    """A test that passes, and what it reaches."""

    name: str
    seconds: float
    lines: dict[str, list[int]]

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


def chosen(tests: list[Test], mutant: Mutant) -> list[str]:
    """Tests that reach the statement, the fastest first, then their neighbours."""
    near = Path("tests", *Path(mutant.path).parts[1:-1])
    while not (ROOT / near).is_dir():
        near = near.parent
    on_line = [test for test in tests if mutant.lines & set(test.lines.get(mutant.path, ()))]
    files = {test.file for test in on_line}
    files = files or {test.file for test in tests if mutant.path in test.lines}
    others = [t for t in tests if t.file in files or t.name.startswith(f"{near}/")]
    ordered = {
        test.name: test.seconds
        for some in (on_line, others)
        for test in sorted(some, key=lambda test: test.seconds)
    }
    ends = itertools.accumulate(ordered.values())
    names = [name for name, end in zip(ordered, ends, strict=True) if end <= SECONDS]
    return names or list(ordered)[:1]


class Copy:
    """A copy of the checkout, with a process of each host that forks for each run of tests."""

    def __init__(self, folder: Path, pythons: dict[str, Path]) -> None:
        self._folder = folder
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
        for name in filter(lambda name: (ROOT / name).is_file(), listed):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        path = ":".join(str(folder / name) for name in ("", "patches", "tests/support"))
        own = {"PYTHONPATH": path, "HOME": str(folder.parent), "OMP_NUM_THREADS": "1"}
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        options |= {"text": True, "cwd": folder, "env": {**os.environ, **own}}
        self._processes = {
            host: subprocess.Popen([python, "-m", "tools.test_forks"], **options)
            for host, python in pythons.items()
        }
        self._tests: dict[str, list[Test]] = {}
        self._sound: set[str] = set()  # tests that pass without a mutant, tried on this machine

    def _ask(self, host: str, **asked: Any) -> tuple[int, str]:
        process = self._processes[host]
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(asked), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline())
        return answer["status"], answer["failed"]

    def trace(self, host: str, out: Path) -> None:
        """Note which lines each test of a host reaches in unchanged sources, if it passes."""
        self._ask(host, tests=TESTS[host], seconds=3 * 3600, reached=str(out), sources=SOURCES)

    def learn(self, host: str, reached: Path) -> None:
        """Read what `trace` noted, import what tests import of other packages, compile the copy."""
        rows = [json.loads(line) for line in reached.read_text().splitlines()]
        self._tests[host] = [Test(row["test"], row["seconds"], row["lines"]) for row in rows]
        modules = [name for row in rows for name in row["modules"]]
        self._ask(host, tests=["--collect-only", *TESTS[host]], seconds=600, modules=modules)

    def caught_by(self, mutant: Mutant) -> str:
        """The test that fails, or the reason why none can run; empty if none fails."""
        for host, tests in self._tests.items():
            names = chosen(tests, mutant)
            # Most mutants fail at once. Collecting all tests would take longer than a few need.
            for some in (names[:FIRST], names[FIRST:]):
                by = self._caught_by(host, some, mutant)
                if by:
                    return by
        return ""

    def _caught_by(self, host: str, names: list[str], mutant: Mutant) -> str:
        file = self._folder / mutant.path
        kept, times = file.read_text(), file.stat()
        seconds = 120.0 + 3 * sum(test.seconds for test in self._tests[host] if test.name in names)
        while names:
            file.write_text(mutant.text)
            status, failed = self._ask(host, tests=names, seconds=seconds)
            file.write_text(kept)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            if status == 0:
                return ""
            if status == 4 and "::" in names[0]:  # the mutant may have renamed a test
                names = list(dict.fromkeys(name.split("::")[0] for name in names))
                continue
            if not failed:
                return f"pytest ends with {status}"
            if failed not in self._sound and self._ask(host, tests=[failed], seconds=600.0)[0] == 0:
                self._sound.add(failed)
            if failed in self._sound:
                return failed
            names = [name for name in names if name != failed]  # fails without the mutant, too
        return ""

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
            process.wait()


def record(seed: int, seconds: float, results: list[tuple[Mutant, bool]]) -> None:
    """Write the counts and the mutants that no test caught, with their notes of before."""
    notes = {}
    if RECORD.exists():
        for each in json.loads(RECORD.read_text())["survivors"]:
            notes[each["path"], each["diff"]] = each["note"]
    left = [mutant for mutant, found in results if not found]
    survivors = [
        {
            "path": m.path,
            "operator": m.operator,
            "diff": m.diff,
            "note": notes.get((m.path, m.diff), ""),
        }
        for m in left
    ]
    noted = {
        kind: Counter(folder_of(e["path"]) for e in survivors if e["note"].startswith(kind))
        for kind in ("equivalent", "caught since")
    }
    tried = Counter(folder_of(mutant.path) for mutant, _ in results)
    caught = Counter(folder_of(mutant.path) for mutant, found in results if found)
    rows = [
        {"folder": name, "mutants": tried[name], "caught": caught[name]}
        | {kind: counts[name] for kind, counts in noted.items()}
        for name in sorted(tried)
    ]
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    header = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "seed": seed}
    header["minutes"] = round(seconds / 60)
    made = {"header": header, "rows": rows, "survivors": survivors}
    RECORD.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{sum(caught.values())} of {len(results)} caught: {RECORD}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--mutants", type=int, default=200, help="At most so many.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--folder", default="", help="Only files whose paths begin so.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--reached", type=Path, help="Keep there what the tests reach.")
    parser.add_argument("--python", type=Path, required=True, help="With SGLang and the tests.")
    parser.add_argument("--python-vllm", type=Path, required=True)
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    began = time.monotonic()
    mutants = itertools.islice(sampled(given.seed, given.folder), given.mutants)
    pythons = {"sglang": given.python.absolute(), "vllm": given.python_vllm.absolute()}
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="deft-faults-"))
        free: SimpleQueue[Copy] = SimpleQueue()
        kept = (given.reached or Path(made)).absolute()
        reached = {host: kept / f"{host}.jsonl" for host in TESTS}
        for number in range(given.processes):
            copy = Copy(Path(made, str(number)), pythons)
            stack.callback(copy.close)
            for host, path in reached.items():
                if not path.exists():
                    copy.trace(host, path)
                copy.learn(host, path)
            free.put(copy)

        def tried(mutant: Mutant) -> tuple[Mutant, bool] | None:
            if time.monotonic() - began > 60 * given.minutes:
                return None
            copy = free.get()
            by = copy.caught_by(mutant)
            free.put(copy)
            print(f"{by or 'SURVIVED'} {mutant.operator} {mutant.path}\n{mutant.diff}", flush=True)
            return mutant, bool(by)

        with ThreadPoolExecutor(given.processes) as pool:
            results = [result for result in pool.map(tried, mutants) if result is not None]
    if not results:
        raise SystemExit("no mutant was tried: give it more minutes, or see which tests fail")
    record(given.seed, time.monotonic() - began, results)


if __name__ == "__main__":
    main()
