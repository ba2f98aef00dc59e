"""The tool that counts undetected changes of the code: its sample, the tests that it runs, and its results."""

import json
import os
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import mutants
from tests import needs

SOURCE = '''from typing import TYPE_CHECKING

if TYPE_CHECKING:
    NUMBER = 1


def f(x: int = 2, *, y: "list[int] | None" = None) -> int:
    """Return 3."""
    return x + 1 if x < 4 else x
'''


def test_names_of_modules_and_packages():
    assert mutants.module_of("plugins/topk_studies/topk_studies/data/parts.py") == "topk_studies.data.parts"
    assert mutants.module_of("topk_registry/train/__init__.py") == "topk_registry.train"
    assert mutants.package_of("topk_registry/train/loop.py") == "topk_registry.train"
    assert mutants.package_of("topk_registry/functional.py") == "topk_registry"
    assert mutants.package_of("export/topk_export/runtime/session.py") == "topk_export"


def test_a_file_is_tested_by_its_folder_and_by_files_that_import_it():
    found = mutants.selected_tests("topk_registry/train/loop.py")
    assert found[-1] == "tests/train"
    found = mutants.selected_tests("export/topk_export/verify.py")
    assert found[-2:] == ["tests/export", "tests/deploy"]
    assert "tests/export/test_spoiled.py" in found
    assert all(mutants.selected_tests(file) for file in mutants.source_files())


def test_annotations_are_left_out():
    assert mutants.annotations(SOURCE) == {3, 4, 7}


def test_a_line_belongs_to_its_innermost_statement():
    source = "def f(x):\n    if x:\n        return (\n            x\n        )\n    return 2\n"
    assert [mutants.statement_of(source, line) for line in (1, 2, 4, 6)] == [1, 2, 3, 6]


def test_coverage_does_not_see_kernels_and_lines_that_run_at_import():
    source = "@triton.jit\ndef f(x):\n    return x\n\n@cache\ndef g(x):\n    return x\n\n@kernel\ndef h(x):\n    pass\n"
    assert [line for line in range(1, 12) if mutants.is_seen(source, line)] == [7]


@pytest.mark.slow  # coverage and cosmic-ray are packages of the extra lint
def test_a_mutant_is_tested_by_the_tests_that_run_its_line(tmp_path, monkeypatch):
    coverage = needs.package("coverage", extra="lint")
    file = "topk_registry/train/loop.py"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("A = (\n    1 + 1\n)\n\ndef f():\n    return 1\n")
    data = coverage.CoverageData(str(tmp_path / "data"))
    direct, other = "tests/train/test_loop.py::test_f[1|2]", "tests/deploy/test_a.py::test_g"
    for context, lines in ((f"{direct}|run", [6]), (f"{other}|setup", [6]), (f"{other}2|run", [6]), ("", [1, 2, 5])):
        data.set_context(context)
        data.add_lines({str(tmp_path / file): lines})
    data.write()
    reached = mutants.Reached(tmp_path / "data", tmp_path)
    assert reached.tests(file, 6) == ["tests/deploy/test_a.py", direct]  # the whole file shares what a test sets up
    assert reached.tests(file, 2) == []

    copy = mutants.Copy(tmp_path / "copy", 10, reached)
    monkeypatch.setattr(mutants, "selected_tests", lambda *_: ["tests/train/test_loop.py", "tests/train"])
    chosen = [copy.tests_of(mutants.Mutant(1, file, "topk_registry.train", "core/AddNot", 0, line)) for line in (6, 2)]
    assert chosen == [[direct, "tests/deploy/test_a.py"], ["tests/train/test_loop.py", "tests/train"]]
    monkeypatch.setattr(mutants, "MANY", 1)
    assert copy.tests_of(mutants.Mutant(1, file, "topk_registry.train", "core/AddNot", 0, 6)) == [direct]


@pytest.mark.slow
@pytest.mark.parametrize("status", [None, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED])
def test_a_mutant_is_not_killed_by_tests_that_do_not_pass_without_it(tmp_path, monkeypatch, status):
    """For example because a test is not found, or because all tests of a folder take longer than the limit."""
    needs.package("cosmic_ray", extra="lint")
    reached = SimpleNamespace(tests=lambda *_: ["tests/test_size.py::test_that_is_not_there"])
    copy = mutants.Copy(tmp_path, 10, reached)
    (mutant,) = islice(mutants.sample(0, ["losses"]), 1)
    file = tmp_path / mutant.file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text((mutants.ROOT / mutant.file).read_text())  # outside of git, the copy is empty
    monkeypatch.setattr(copy, "run", lambda tests: (status, "what pytest prints"))
    with pytest.raises(SystemExit, match=r"without a mutant, the tests of .*\n.*what pytest prints"):
        copy.outcome(mutant)
    runs = iter([(status, ""), (0, "")])
    monkeypatch.setattr(copy, "run", lambda tests: next(runs))
    assert copy.outcome(mutant)["outcome"] == ("timeout" if status is None else "killed")


@pytest.mark.slow
def test_data_of_coverage_must_be_newer_than_the_code(tmp_path):
    needs.package("coverage", extra="lint")
    with pytest.raises(SystemExit, match="does not exist; first run"):
        mutants.Reached(tmp_path / "data")
    Path(tmp_path / "data").touch()
    os.utime(tmp_path / "data", (0, 0))
    with pytest.raises(SystemExit, match="is older than"):
        mutants.Reached(tmp_path / "data")


@pytest.mark.slow
def test_places_and_a_sample():
    needs.package("cosmic_ray", extra="lint")
    found = mutants.places(SOURCE)
    assert set(found) == {9}
    assert ("core/ReplaceComparisonOperator_Lt_LtE", 0) in found[9]
    first, again, other = (list(islice(mutants.sample(seed, ["losses"]), 3)) for seed in (0, 0, 1))
    assert first == again != other
    assert [mutant.number for mutant in first] == [1, 2, 3]
    assert {mutant.package for mutant in first} == {"topk_registry.losses"}
    source = (mutants.ROOT / first[0].file).read_text()
    changed = mutants.mutated(source, first[0])
    assert changed != source


def test_results_are_continued_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"package": "topk_export", "file": "a.py", "line": 3, "operator": "core/AddNot", "change": ["-a", "+not a"]}
    rows = [{**row, "outcome": outcome} for outcome in ("survived", "killed", "timeout")]
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"package"')
    assert mutants.rows_in(path) == rows
    assert mutants.rows_in(tmp_path / "none") == []
    lines = mutants.summary(rows)
    assert lines[0] == "survived: a.py:3 AddNot\n    -a\n    +not a"
    assert lines[1].split() == ["topk_export", "2", "of", "3", "67%"]
    assert lines[2] == "2 of 3 killed, 67%"
