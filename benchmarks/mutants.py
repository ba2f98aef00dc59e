"""Change the code in one place, run the tests of this place, and count the changes that no test detects.

    python -m pytest -n 2 --cov --cov-context=test --cov-report=
    python -m benchmarks.mutants --output mutants.jsonl [--count 300] [--seed 0] [--seconds 3600] [--package NAME ...]

A changed program is called a mutant. The operators of cosmic-ray (extra ``lint``) make the mutants, for example ``<=``
in place of ``<``. A file is drawn in proportion to its statements, then a place in the file, then an operator. The
sample depends on the seed and on the code only.

The first command measures which default tests run which line, and writes ``.coverage``. For each mutant, the tests that
run the changed line run up to the first failure. If a fixture runs the line, all tests of the file run, because other
tests may share the fixture. If more than ``MANY`` tests run the line, only those in some folders run: the folder that
tests the package, and every folder with a test that imports the file. For some lines, coverage.py cannot tell which
tests run them: lines outside of functions, lines of compiled kernels, and lines that run only in other processes. For
these lines, all tests of the folders run.

The tests run in a copy of the repository, so the working tree never changes. A mutant is killed if a test fails, or if
the tests take more than ``--limit`` seconds of processor time. Other programs on the computer do not change processor
time.

The file of the results has one JSON object per mutant. A run with the same arguments continues the file. The exit
status is 1 if a test fails without a mutant.
"""

import argparse
import ast
import difflib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from tests.test_size import statements

ROOT = Path(__file__).parents[1]
# source folder of each distribution, name of its import package, and folders of tests for the package as a whole
SOURCES = {
    "topk_registry": (".", ()),
    "topk_plugins": ("plugins", ("plugins", "losses")),
    "topk_studies": ("plugins/topk_studies", ("studies",)),
    "topk_export": ("export", ("export", "deploy")),
}
WAIT = 5
MANY = 300  # tests
# decorators of functions that are compiled, so that coverage.py does not see which tests run them
COMPILED = {"borrowing", "compiled", "inlined", "intrinsic", "kernel", "summing", "triton.jit"}
Place = tuple[str, int]  # name of an operator of cosmic-ray, and the index of its occurrence in the file


@dataclass(frozen=True)
class Mutant:
    """A change of one file."""

    number: int
    file: str
    package: str
    operator: str
    occurrence: int
    line: int


def package_of(file: str) -> str:
    """Return the package whose kill rate counts the file: ``topk_registry.train`` or ``topk_export``."""
    module = module_of(file).split(".")
    return ".".join(module[:2]) if module[0] == "topk_registry" and len(module) > 2 else module[0]


def module_of(file: str) -> str:
    """Return the name of the module in a file of the repository."""
    parts = Path(file).with_suffix("").parts
    start = next(i for i, part in enumerate(parts) if part in SOURCES and parts[:i] == Path(SOURCES[part][0]).parts)
    return ".".join(parts[start:]).removesuffix(".__init__")


def source_files(root: Path = ROOT) -> list[str]:
    """Return all files of the packages, relative to the folder of the repository."""
    found = [path for name, (folder, _) in SOURCES.items() for path in (root / folder / name).rglob("*.py")]
    return sorted(str(path.relative_to(root)) for path in found)


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the names of the modules that a file imports. ``from a import b`` may import the module ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def selected_tests(file: str, root: Path = ROOT) -> list[str]:
    """Return the folders and files of tests for a file. Test files that import the file come first."""
    module, tests = module_of(file), root / "tests"
    parts = module.split(".")
    folders = [tests / name for name in SOURCES[parts[0]][1]]
    if parts[0] == "topk_registry" and len(parts) > 1:
        folders = [tests.joinpath(*parts[1:i]) for i in range(len(parts), 1, -1)]
    direct = [path for path in sorted(tests.rglob("test_*.py")) if module in imports_of(path)]
    chosen = [*direct, *folders, *(path.parent for path in direct if path.parent != tests)]
    existing = [path for path in dict.fromkeys(chosen) if path.exists()]
    whole = [path for path in existing if path.is_dir()]
    kept = [path for path in existing if path.is_file() or not any(other in path.parents for other in whole)]
    return [str(path.relative_to(root)) for path in kept] or ["tests/registry", "tests/cli"]


def statement_of(source: str, line: int) -> int:
    """Return the first line of the innermost statement around ``line``."""
    found = line
    for node in ast.walk(ast.parse(source)):  # outer statements come first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            found = node.lineno
    return found


def is_seen(source: str, line: int) -> bool:
    """Return whether a line is in a function of plain Python, so that coverage.py can tell which tests run the line."""
    seen = False  # lines outside of functions run at import, in whichever test imports the file first
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.lineno < line <= (node.end_lineno or node.lineno):
            if COMPILED & {ast.unparse(decorator) for decorator in node.decorator_list}:
                return False
            seen = True
    return seen


class Reached:
    """The tests that run each line of a file, from data of coverage.py with one context per test."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        from coverage import CoverageData

        if not path.is_file():
            raise SystemExit(f"{path} does not exist; first run: python -m pytest -n 2 --cov --cov-context=test")
        newer = [file for file in source_files(root) if (root / file).stat().st_mtime > path.stat().st_mtime]
        if newer:
            raise SystemExit(f"{path} is older than {newer[0]}; measure the coverage of the tests again")
        self.data, self.root = CoverageData(str(path)), root
        self.data.read()
        self.lines: dict[str, dict[int, list[str]]] = {}

    def tests(self, file: str, line: int) -> list[str]:
        """Return the tests whose own process runs ``line`` of ``file``, or no tests if coverage.py cannot know them."""
        source = (self.root / file).read_text(encoding="utf-8")
        if not is_seen(source, line):
            return []
        if file not in self.lines:
            self.lines[file] = self.data.contexts_by_lineno(str(self.root / file))
        contexts = self.lines[file].get(line) or self.lines[file].get(statement_of(source, line)) or []
        found = set()
        for context in filter(None, contexts):
            test, _, phase = context.rpartition("|")  # the name of a test may have "|", too
            # other tests of the file may share what the first one set up
            found.add(test.partition("::")[0] if phase == "setup" else test)
        return sorted(test for test in found if "::" not in test or test.partition("::")[0] not in found)


def annotations(source: str) -> set[int]:
    """Return the lines of annotations and of imports for type checkers, whose changes have no effect."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        hints = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            hints.append(node)
        for hint in hints:
            if isinstance(hint, ast.AST):
                lines |= set(range(hint.lineno, (hint.end_lineno or hint.lineno) + 1))  # type: ignore[attr-defined]
    return lines


def places(source: str) -> dict[int, list[Place]]:
    """Return the operators that apply to each line of a source text. Lines with annotations are left out."""
    from cosmic_ray.ast import Visitor, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    class Positions(Visitor):
        def __init__(self, operator: Any) -> None:
            self.operator, self.found = operator, []

        def visit(self, node: Any) -> Any:
            self.found += self.operator.mutation_positions(node)
            return node

    tree, skipped = get_ast(source), annotations(source)
    found: dict[int, list[Place]] = defaultdict(list)
    for name in sorted(operator_names()):
        kind = get_operator(name)
        if kind.arguments():
            continue
        visitor = Positions(kind())
        visitor.walk(tree)
        for index, (start, _) in enumerate(visitor.found):
            if start[0] not in skipped:
                found[start[0]].append((name, index))
    return found


def family(place: Place) -> str:
    return place[0].partition("_")[0]  # the eleven replacements of an operator count as one


def sample(seed: int, packages: list[str], root: Path = ROOT) -> Iterator[Mutant]:
    """Yield mutants without end and without repetitions. Empty ``packages`` stand for all packages."""
    files = [f for f in source_files(root) if not packages or any(package_of(f).endswith(p) for p in packages)]
    weights = [statements((root / file).read_text(encoding="utf-8")) for file in files]
    rng, known, seen = random.Random(seed), {}, set()
    for _ in range(100_000):
        (file,) = rng.choices(files, weights)
        if file not in known:
            known[file] = places((root / file).read_text(encoding="utf-8"))
        if not known[file]:
            continue
        line = rng.choice(sorted(known[file]))
        kind = rng.choice(sorted({family(place) for place in known[file][line]}))
        operator, occurrence = rng.choice([place for place in known[file][line] if family(place) == kind])
        if (file, operator, occurrence) not in seen:
            seen.add((file, operator, occurrence))
            yield Mutant(len(seen), file, package_of(file), operator, occurrence, line)


def mutated(source: str, mutant: Mutant) -> str | None:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)


class Copy:
    """A copy of the repository in a temporary folder, in which tests run with mutants."""

    def __init__(self, folder: Path, limit: int, reached: Reached) -> None:
        self.folder = folder
        self.limit = limit
        self.reached = reached
        self.passed: set[str] = set()  # tests that pass without a mutant
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run(self, tests: list[str]) -> tuple[int | None, str]:
        """Run default tests up to the first failure. Return pytest's status, or None if the time is over.

        The limit is in processor time. A process that waits for ever is stopped after ``WAIT`` times the limit.
        """
        paths = [str(self.folder / place) for place, _ in SOURCES.values()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *tests]
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=self._set_limit,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=WAIT * self.limit)
            return None if process.returncode == -signal.SIGXCPU else process.returncode, out
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def _set_limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (self.limit, self.limit + 10))

    def check(self, tests: list[str], mutant: Mutant) -> None:
        """Exit with an error if tests for a mutant do not pass without it, for example because pytest finds none."""
        if self.passed.issuperset(tests):
            return
        status, out = self.run(tests)
        if status != 0:
            problem = f"take more than {self.limit} s" if status is None else "fail"
            raise SystemExit(f"without a mutant, the tests of {mutant.file}:{mutant.line} {problem}:\n{out[-3000:]}")
        self.passed.update(tests)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests to run for a mutant. Tests in files that import the changed file come first."""
        chosen = selected_tests(mutant.file, self.folder)
        reached = self.reached.tests(mutant.file, mutant.line)
        if len(reached) > MANY:
            reached = [test for test in reached if any(test.startswith(place) for place in chosen)] or reached
        return sorted(reached, key=lambda test: test.partition("::")[0] not in chosen) or chosen

    def outcome(self, mutant: Mutant) -> dict[str, Any]:
        """Run the tests with a mutant, and return the row of the mutant."""
        path = self.folder / mutant.file
        tests = self.tests_of(mutant)
        source = path.read_text(encoding="utf-8")
        changed, start = mutated(source, mutant), time.monotonic()
        assert changed is not None
        path.write_text(changed, encoding="utf-8")
        try:
            status, out = self.run(tests)
        finally:
            path.write_text(source, encoding="utf-8")
        seconds = time.monotonic() - start
        failed = [line.split(" - ")[0] for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if status != 0:
            self.check([name.partition(" ")[2] for name in failed[:1]] or tests, mutant)
        lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
        return {
            **asdict(mutant),
            "change": [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")],
            "outcome": "survived" if status == 0 else "timeout" if status is None else "killed",
            "by": failed[:1],
            "seconds": round(seconds, 1),
            "tests": len(tests),
        }


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of results. A line that a stopped process did not finish is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the survivors, and then one line per package with its kill rate."""
    lines = [
        f"survived: {row['file']}:{row['line']} {row['operator'].removeprefix('core/')}\n    "
        + "\n    ".join(row["change"])
        for row in rows
        if row["outcome"] == "survived"
    ]
    count = Counter(row["package"] for row in rows)
    killed = Counter(row["package"] for row in rows if row["outcome"] != "survived")
    lines += [
        f"{name:28} {killed[name]:4} of {count[name]:4}  {killed[name] / count[name]:4.0%}" for name in sorted(count)
    ]
    total = f"{killed.total()} of {count.total()} killed"
    return [*lines, f"{total}, {killed.total() / count.total():.0%}" if rows else total]


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants of a sample, print a summary, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="JSON lines; a new run continues them"
    )
    parser.add_argument("--count", type=int, default=300, metavar="N", help="number of mutants (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="N", help="start no mutant after N seconds"
    )
    parser.add_argument(
        "--limit", type=int, default=300, metavar="N", help="processor seconds per mutant (default: 300)"
    )
    parser.add_argument(
        "--package", nargs="+", default=[], metavar="NAME", help="such as train or topk_export (default: all)"
    )
    parser.add_argument(
        "--coverage", type=Path, default=ROOT / ".coverage", metavar="FILE", help="data of coverage.py (.coverage)"
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and stop")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    rows = rows_in(options.output)
    known = {(row["file"], row["operator"], row["occurrence"], row["line"]) for row in rows}
    if options.list:
        for mutant in islice(sample(options.seed, options.package), options.count):
            print(f"{mutant.number:4} {mutant.file}:{mutant.line} {mutant.operator} {mutant.occurrence}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the tests and the copy do not remain
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), options.limit, Reached(options.coverage))
        for mutant in islice(sample(options.seed, options.package, copy.folder), options.count):
            if time.monotonic() - start > options.seconds:
                break
            if (mutant.file, mutant.operator, mutant.occurrence, mutant.line) in known:
                continue
            rows.append(copy.outcome(mutant))
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1], ensure_ascii=False) + "\n")
            print(f"{rows[-1]['outcome']:8} {mutant.file}:{mutant.line} in {rows[-1]['seconds']:g} s", flush=True)
    print("\n".join(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
