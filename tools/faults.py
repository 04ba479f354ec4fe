"""``make faults``: sample mutants of the package and the patches, and see whether tests fail.

Cosmic Ray, and a few operators for kernels' code, change one place of a copy of the checkout. A run
of all tests first notes the lines that each one reaches; tests that fail in it count for nothing.
A mutant then meets the tests that reach its statement, and their neighbours. The same seed and
sources give the same mutants. Annotations, decorators, f-strings and log lines stay as they are.

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import parso.python.tree as tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "results" / "faults.json"
T = TypeVar("T")
SOURCES = ("deft_backend", "patches/deft_patches")

TESTS = {
    "sglang": ("tests", "deft_backend", "tools/host_matrix"),
    "vllm": ("tests/hosts/vllm", "deft_backend/hosts/vllm", "tests/hosts/common"),
}
SECONDS = 120.0
"""A mutant meets so many seconds of tests, or at least one test."""
LIMIT = 600.0
"""A mutant gets no verdict if its tests take longer, in seconds."""
TOGETHER = 8
"""A process notes what so many tests reach, and then takes the next ones of any file."""
OF_SOURCES = "tests/project/test_tensors.py"
"""These tests read the sources, so no line of them is reached."""
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
    try:
        other = mutate_code(text, operators()[name], occurrence)
        if other is None or ast.dump(ast.parse(other)) == ast.dump(ast.parse(text)):
            return None
    except (SyntaxError, AttributeError):  # Cosmic Ray cannot replace an exception with a dot
        return None
    lines = difflib.unified_diff(text.split("\n"), other.split("\n"), lineterm="", n=1)
    return Mutant(path, name, other, "\n".join(list(lines)[2:]), statement_lines(text, place[0][0]))


def file_of(test: str) -> str:
    return test.split("::")[0]


@dataclass(frozen=True)
class Test:
    """A test that passes, and what it reaches."""

    name: str
    seconds: float
    lines: dict[str, list[int]]

    @property
    def file(self) -> str:
        return file_of(self.name)


def chosen(tests: list[Test], mutant: Mutant) -> list[str]:
    """Tests that reach the statement, the fastest first, then their neighbours."""
    near = Path("tests", *Path(mutant.path).parts[1:-1])
    while not (ROOT / near).is_dir():
        near = near.parent
    on_line = [test for test in tests if mutant.lines & set(test.lines.get(mutant.path, ()))]
    files = {test.file for test in on_line}
    files = files or {test.file for test in tests if mutant.path in test.lines}
    files.add(OF_SOURCES)
    others = [t for t in tests if t.file in files or t.name.startswith(f"{near}/")]
    ordered = {
        test.name: test.seconds
        for some in (on_line, others)
        for test in sorted(some, key=lambda test: test.seconds)
    }
    ends = itertools.accumulate(ordered.values())
    names = [name for name, end in zip(ordered, ends, strict=True) if end <= SECONDS]
    return names or list(ordered)[:1]


def files_of_checkout() -> list[str]:
    """What git knows or would add; every file where there is no repository."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    else:
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    return [name for name in listed if (ROOT / name).is_file()]


Part = tuple[str, list[str], Path]
"""A host, what pytest gets, and the file for what the tests reach."""


class Copy:
    """A copy of the checkout, with a process of each host that forks for each run of tests."""

    def __init__(self, folder: Path, pythons: dict[str, Path]) -> None:
        self._folder = folder
        for name in files_of_checkout():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        home = folder.with_name(f"{folder.name}-home")
        home.mkdir()
        path = ":".join(str(folder / name) for name in ("", "patches", "tests/support"))
        own = {"PYTHONPATH": path, "HOME": str(home), "TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
        own["CUDA_VISIBLE_DEVICES"] = ""  # kernels run in Triton's interpreter
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        settings = ("DEFT_", "TRITON_", "SGLANG_", "VLLM_", "XDG_")  # tests expect the defaults
        rest = {k: v for k, v in os.environ.items() if not k.startswith(settings)}
        options |= {"text": True, "cwd": folder, "env": rest | own}
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

    def note(self, part: Part) -> None:
        """Note which lines the tests of a part reach in unchanged sources, if they pass."""
        host, tests, out = part
        if not out.exists():
            begun = out.with_suffix(".begun")
            begun.write_text("")
            self._ask(host, tests=tests, seconds=900, reached=str(begun), sources=SOURCES)
            begun.rename(out)

    def prepare(self, modules: dict[str, list[str]]) -> None:
        """Import what tests import of other packages, and compile the copy."""
        for host, names in modules.items():
            tests = ["--collect-only", *TESTS[host]]
            self._ask(host, tests=tests, seconds=600, modules=names)

    def learn(self, tests: dict[str, list[Test]]) -> None:
        self._tests = tests

    def caught_by(self, mutant: Mutant) -> str:
        """The test that fails, or the reason why none can run; empty if none fails."""
        until = time.monotonic() + LIMIT
        for host, tests in self._tests.items():
            names = chosen(tests, mutant)
            # Most mutants fail at once. Collecting all tests would take longer than a few need.
            for some in (names[:FIRST], names[FIRST:]):
                by = self._caught_by(host, some, mutant, until)
                if by:
                    return by
        return ""

    def _caught_by(self, host: str, names: list[str], mutant: Mutant, until: float) -> str:
        file = self._folder / mutant.path
        kept, before = file.read_text(), file.stat()
        times = [test.seconds for test in self._tests[host] if test.name in names]
        # A test that hangs fails. A run that is slow as a whole tells nothing.
        one, seconds = 30.0 + 10 * max(times, default=0.0), 120.0 + 3 * sum(times)
        while names:
            if time.monotonic() > until:
                raise TimeoutError
            file.write_text(mutant.text)
            asked = [f"--timeout={one:.0f}", *names]
            status, failed = self._ask(host, tests=asked, seconds=seconds)
            file.write_text(kept)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
            if status == 0:
                return ""
            if status == 4 and "::" in names[0]:  # the mutant may have renamed a test
                names = list(dict.fromkeys(map(file_of, names)))
                continue
            if not failed and status == -1:
                raise TimeoutError
            if not failed:
                return f"pytest ends with {status}"
            if failed not in self._sound and self._ask(host, tests=[failed], seconds=120.0)[0] == 0:
                self._sound.add(failed)
            if failed in self._sound:
                return failed
            names = [name for name in names if name != failed]  # fails without the mutant, too
        return ""

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
            process.wait()


class Copies:
    """Copies that do one thing each at a time."""

    def __init__(self, every: list[Copy]) -> None:
        self._every = every
        self._pool = ThreadPoolExecutor(len(every))
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for copy in every:
            self._free.put(copy)

    def all(self, do: Callable[[Copy], None]) -> None:
        list(self._pool.map(do, self._every))

    def each(self, do: Callable[[Copy, T], None], things: Iterable[T]) -> None:
        def with_copy(thing: T) -> None:
            copy = self._free.get()
            do(copy, thing)
            self._free.put(copy)

        list(self._pool.map(with_copy, things))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trace(copies: Copies, kept: Path) -> None:
    """Let the copies know what each test reaches; parts that the folder holds are not run again."""
    paths = {host: kept / f"{host}.jsonl" for host in TESTS}
    copies.each(Copy.note, [(h, ["--collect-only", *TESTS[h]], path) for h, path in paths.items()])
    collected = {host: rows_of(path) for host, path in paths.items()}
    modules = {
        h: [name for row in rows for name in row["modules"]] for h, rows in collected.items()
    }
    copies.all(lambda copy: copy.prepare(modules))
    parts: list[Part] = []
    for host, rows in collected.items():
        for _, of_file in itertools.groupby((row["test"] for row in rows), file_of):
            names = list(of_file)
            for at in range(0, len(names), TOGETHER):
                path = kept / f"{host}-{len(parts)}.jsonl"
                parts.append((host, names[at : at + TOGETHER], path))
    copies.each(Copy.note, parts)
    tests: dict[str, list[Test]] = {host: [] for host in TESTS}
    for host, _, path in parts:
        tests[host] += [Test(row["test"], row["seconds"], row["lines"]) for row in rows_of(path)]
    copies.all(lambda copy: copy.learn(tests))
    for host, rows in collected.items():
        print(f"{host}: {len(tests[host])} of {len(rows)} tests pass without a mutant", flush=True)


def record(seeds: list[int], seconds: float, results: list[tuple[Mutant, bool]]) -> None:
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
    commit = os.environ.get("GIT_COMMIT") or subprocess.check_output(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, text=True
    )
    header: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": commit.strip()}
    header |= {"seeds": seeds, "minutes": round(seconds / 60)}
    made = {"header": header, "rows": rows, "survivors": survivors}
    RECORD.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{sum(caught.values())} of {len(results)} caught: {RECORD}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0, help="0: record what is kept.")
    parser.add_argument("--mutants", type=int, default=200, help="At most so many of a seed.")
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[random.SystemRandom().getrandbits(32)]
    )
    parser.add_argument("--folder", default="", help="Only files whose paths begin so.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kept", type=Path, help="Keep there what tests reach, and the verdicts.")
    parser.add_argument("--python", type=Path, required=True, help="With SGLang and the tests.")
    parser.add_argument("--python-vllm", type=Path, required=True)
    given = parser.parse_args()
    print(f"seed {' '.join(map(str, given.seed))}", flush=True)
    began = time.monotonic()
    mutants = [
        mutant
        for seed in given.seed
        for mutant in itertools.islice(sampled(seed, given.folder), given.mutants)
    ]
    pythons = {"sglang": given.python.absolute(), "vllm": given.python_vllm.absolute()}
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="deft-faults-"))
        kept = (given.kept or Path(made)).absolute()
        kept.mkdir(parents=True, exist_ok=True)
        verdicts = kept / "verdicts.jsonl"

        def found() -> dict[tuple[str, str], str]:
            return {(row["path"], row["diff"]): row["by"] for row in rows_of(verdicts)}

        def judge(copy: Copy, mutant: Mutant) -> None:
            if time.monotonic() - began > 60 * given.minutes:
                return
            try:
                by = copy.caught_by(mutant)
            except TimeoutError:
                print(f"NO VERDICT {mutant.operator} {mutant.path}\n{mutant.diff}", flush=True)
                return
            print(f"{by or 'SURVIVED'} {mutant.operator} {mutant.path}\n{mutant.diff}", flush=True)
            with verdicts.open("a") as out:
                print(json.dumps({"path": mutant.path, "diff": mutant.diff, "by": by}), file=out)

        if given.minutes > 0:
            every = [Copy(Path(made, str(n)), pythons) for n in range(given.processes)]
            for copy in every:
                stack.callback(copy.close)
            copies = Copies(every)
            trace(copies, kept)
            before = found()
            copies.each(judge, [m for m in mutants if (m.path, m.diff) not in before])
        by = found()
        results = [(m, bool(by[m.path, m.diff])) for m in mutants if (m.path, m.diff) in by]
    if not results:
        raise SystemExit("no mutant was tried: give it more minutes, or see which tests fail")
    record(given.seed, time.monotonic() - began, results)


if __name__ == "__main__":
    main()
