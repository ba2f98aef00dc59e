"""The parts of a GPU's turn: their plan holds what it should, and a rehearsal runs it."""

import json
import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.gpu import __main__ as gpu
from tests.gpu.plan import PARTS, TESTS, Part, Place, Step
from topk_registry.train.config.arguments import parse_args
from topk_studies import command as study_command
from topk_studies.experiments.noise import STUDY

ROOT = Path(__file__).parents[2]


def test_parts_fit_their_minutes_and_steps_have_names_of_their_own(tmp_path):
    assert list(PARTS) == ["kernels", "speed", "training", "study"]
    assert sum(part.minutes for part in PARTS.values()) <= 25
    for part in PARTS.values():
        assert part.minutes <= 9
        for place in (Place(tmp_path), Place(tmp_path, rehearse=True)):
            names = [step.name for step in part.steps(place)]
            assert len(names) == len(set(names))
            assert "cuda" not in [word for step in part.steps(place) for word in step.command] or not place.rehearse


def test_the_plan_has_every_test_for_a_gpu():
    signs = "pytest.mark.gpu", "@runs_kernels"
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    marked = [path for path in files if any(sign in path.read_text() for sign in signs)]
    assert len(marked) >= 7
    assert [path for path in marked if not any(path.is_relative_to(ROOT / folder) for folder in TESTS)] == []


def test_every_module_and_flag_of_the_plan_exists(tmp_path):
    """A command that cannot be parsed is found here, not in the first minute on a GPU."""
    for name, part in PARTS.items():
        for step in part.steps(Place(tmp_path)):
            assert step.command[:2] == [sys.executable, "-m"], (name, step.name)
            assert find_spec(step.command[2]) is not None
            _parse(step)


def _parse(step: Step) -> None:
    module, words = step.command[2], list(step.command[3:])
    if module == "tests.bench" and words[0] in bench.OPERATORS:
        args = bench._parser().parse_args(words)
        assert len(bench._cases(bench.OPERATORS[args.operator], args)) >= 32
    if module == "topk_registry" and words[0] == "train":
        assert parse_args(words[1:]).loss == "smooth_topk_svm"
    if module == "topk_registry" and words[0] == "study":
        options = study_command._options(study_command._parser().parse_args(words[1:]), "noise")
        # three losses and four shares of noise, each tuned over four trials
        assert len(STUDY.configurations(options, ())) >= 48


def test_a_part_is_listed_and_an_unknown_step_is_named(capsys):
    assert gpu.main(["speed", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines][:2] == ["warm", "linear"]
    with pytest.raises(SystemExit):
        gpu.main(["speed", "--only", "losses", "nonsense"])
    assert "no step nonsense; part speed has warm, linear" in capsys.readouterr().err


def code(name: str, text: str, seconds: float = 60, **options) -> Step:
    return Step(name, seconds, [sys.executable, "-c", text], needs=(), **options)


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A part of four steps: one that works, one that fails, one that never ends, and one that needs what is missing."""

    def steps(place: Place) -> list[Step]:
        kept = place.file("kept.json")
        return [
            code("works", f"open({kept!r}, 'w').write('[1]'); print('all is well')"),
            code("fails", "print('a reason'); raise SystemExit(3)"),
            Step("endless", 1, ["sh", "-c", f"printf '[2]' > {place.file('part.json')}; sleep 600"], needs=()),
            Step("resumes", 0.3, ["sleep", "600"], resumes=True, needs=()),
            Step("missing", 1, ["true"], needs=(lambda: "no such thing here",)),
        ]

    monkeypatch.setitem(PARTS, "kernels", Part("a toy", 1, steps))
    monkeypatch.setattr(gpu, "PATIENCE", 0.5)
    return tmp_path / "results"


@pytest.mark.slow
def test_steps_end_alone_and_leave_what_they_have(toy, tmp_path, capsys):
    archive = tmp_path / "results.tar.gz"
    assert gpu.main(["kernels", "--results", str(toy), "--archive", str(archive)]) == 1
    written = json.loads((toy / "kernels.json").read_text())
    assert {one["step"]: one["status"] for one in written} == {
        "works": "passed",
        "fails": "failed",
        "endless": "out of time",
        "resumes": "unfinished",
        "missing": "skipped",
    }
    told = {one["step"]: one["told"] for one in written}
    assert (told["works"], told["missing"]) == ("all is well", "no such thing here")
    assert told["fails"] == "exit 3, see fails.log"
    printed = capsys.readouterr().out
    assert "a reason" in printed
    assert [line.split()[0] for line in printed.splitlines()[-5:]] == [*told]
    with tarfile.open(archive) as packed:
        assert {"./kept.json", "./part.json", "./kernels.json", "./logs/fails.log"} <= set(packed.getnames())
    again = tmp_path / "again"
    assert gpu.main(["kernels", "--results", str(again), "--state", str(archive), "--only", "missing"]) == 0
    assert (again / "part.json").read_text() == "[2]"


def test_no_step_begins_when_the_part_has_no_time_left(toy):
    assert gpu.main(["kernels", "--results", str(toy), "--minutes", "0", "--only", "works"]) == 0
    assert json.loads((toy / "kernels.json").read_text())[0]["status"] == "skipped"


def test_a_tool_that_is_missing_skips_its_step_on_a_gpu_alone(tmp_path):
    step = code("sanitised", "print(1)", tool=("no-such-sanitizer", "--strictly"))
    assert step.missing(Place(tmp_path)) == "no-such-sanitizer is not installed"
    assert step.missing(Place(tmp_path, rehearse=True)) == ""
    assert step.runnable(Place(tmp_path, rehearse=True)) == [*step.command]
    assert step.runnable(Place(tmp_path))[:2] == ["no-such-sanitizer", "--strictly"]


@pytest.mark.slow
def test_a_rehearsal_measures_and_judges(tmp_path):
    command = [
        ROOT / "tests/gpu/run.sh",
        "kernels",
        "--rehearse",
        "--results",
        tmp_path,
        "--only",
        "ksubset",
        "targets",
    ]
    variables = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "ksubset_gpu.json").read_text())
    assert {(row["mixup"], row["graph"]) for row in report["results"]} == {(0, 0), (0, 1), (0.3, 0), (0.3, 1)}
    assert all(row["both"] for row in report["results"])
    assert report["tests"] == {"passed": 0, "failed": [], "skipped": 0}
    verdicts = json.loads((tmp_path / "targets_gpu.json").read_text())
    assert {verdict["target"] for verdict in verdicts} == {1.3, 1.5}
