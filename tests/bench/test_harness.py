"""The harness measures what it says it measures, and keeps silent about what is not tested."""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bench import bandwidth, instructions, linear
from tests.bench.__main__ import main
from tests.bench.operators import OPERATORS
from tests.bench.report import table
from tests.export.colours import colours_by
from topk_studies.timing.contest import OURS, Case, Contestant, Operator, UnavailableError
from topk_studies.timing.measure import measure
from topk_studies.timing.memory import peak_bytes
from topk_studies.timing.rounds import Clock, OverLimitError, Spread, interleave, time_limit

CASE = Case(4, 10, 2, {"tau": 1.0})


def cross_entropy(case: Case):
    return torch.nn.functional.cross_entropy


def unavailable(case: Case):
    raise UnavailableError("needs a licence; try: asking")


def broken(logits: Tensor, target: Tensor) -> Tensor:
    raise RuntimeError("does not converge\nat all")


def endless(logits: Tensor, target: Tensor) -> Tensor:
    while True:
        time.sleep(0.01)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Operator:
    """An operator of one contestant, whose one test passes until the file is rewritten."""
    gate = tmp_path / "test_toy.py"
    gate.write_text("def test_truth():\n    assert True\n")
    operator = Operator(
        name="toy",
        summary="a toy",
        contestants=lambda path: [Contestant("F.cross_entropy", cross_entropy)],
        options=({"tau": 0.1}, {"tau": 1.0}),
        shapes=((4, 10, 2),),
        tests=(str(gate),),
    )
    monkeypatch.setitem(OPERATORS, "toy", operator)
    monkeypatch.setitem(bandwidth.BYTES, "cpu", 1 << 20)
    return operator


@pytest.mark.slow
def test_a_run_prints_a_table_and_writes_json(toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = tmp_path / "report.json"
    assert main(["toy", "--repeats", "3", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("(B, n, k) = (4, 10, 2), tau = ") == 2
    assert printed.count("F.cross_entropy") == 2
    written = json.loads(report.read_text())
    assert [row["tau"] for row in written["results"]] == [0.1, 1.0]
    assert written["environment"]["threads"] == torch.get_num_threads()
    assert not written["interrupted"]
    for row in written["results"]:
        assert row["repeats"] == 3
        assert 0 < row["both"]["minimum"] <= row["both"]["q1"] <= row["both"]["median"] <= row["both"]["q3"]
        assert row["peak_bytes"] >= 4 * 10 * 4
        # 4 x 10 numbers of 4 bytes, read and written
        assert row["floor"] * row["bandwidth"] == pytest.approx(2 * 4 * 10 * 4)
        assert f"{row['floor'] / row['both']['median']:.1%}" in printed


def test_no_report_when_a_test_fails(toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    Path(toy.tests[0]).write_text("def test_truth():\n    assert False, 'the core is wrong'\n")
    report = tmp_path / "report.json"
    assert main(["toy", "--json", str(report)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "the core is wrong" in output.err
    assert not report.exists()


@pytest.mark.slow
def test_no_report_when_there_is_no_test(toy: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "toy", replace(toy, tests=(str(tmp_path / "nothing_here"),)))
    assert main(["toy"]) == 1


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_gated_by_tests_and_compares_with_cross_entropy_and_ours(name: str) -> None:
    operator = OPERATORS[name]
    assert operator.tests
    names = [contestant.name for contestant in operator.contestants(Path("/nowhere"))]
    assert len(set(names)) == len(names)
    ours = "smooth_topk_svm" if name == "losses" else "topk_registry"
    assert {"F.cross_entropy", ours} <= set(names)


def test_the_ksubset_contestants_run_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topk_studies.timing.measure.SET_UP", 1e6)  # compiling takes as long as the machine pleases
    case = Case(4, 40, 3, {"tau": 1.0})
    rows, _ = measure(case, OPERATORS["ksubset"].contestants(Path("/nowhere")), repeats=1, limit=1e6)
    problems = {row.contestant: row.problem for row in rows if row.problem}
    assert problems == {
        "authors' code": "/nowhere has no topk/svm.py; give the root of the authors' repository",
        "topk_registry: triton": "for cuda only",
    }


@pytest.mark.slow
def test_a_failing_contestant_is_reported_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topk_studies.timing.measure.SET_UP", 0.0)
    contestants = [
        Contestant("absent", unavailable),
        Contestant("broken", lambda case: broken),
        Contestant("endless", lambda case: endless),
        Contestant("F.cross_entropy", cross_entropy),
    ]
    ticks: list[int] = []
    rows, interrupted = measure(CASE, contestants, repeats=2, limit=2.0, tick=lambda name, count: ticks.append(count))
    assert not interrupted
    assert sum(ticks) == 4 * (1 + 2)
    assert [row.repeats for row in rows] == [0, 0, 0, 2]
    assert [row.problem for row in rows] == [
        "needs a licence; try: asking",
        "RuntimeError: does not converge",
        "over the limit of 2 s",
        "",
    ]
    assert "absent: needs a licence; try: asking" in table(rows, 1e9)


def test_an_interrupt_keeps_what_was_measured() -> None:
    runs = 0

    def interrupted_at_the_fourth(logits: Tensor, target: Tensor) -> Tensor:
        nonlocal runs
        runs += 1  # two of them warm up
        if runs == 4:
            raise KeyboardInterrupt
        return logits.sum()

    contestants = [
        Contestant("F.cross_entropy", cross_entropy),
        Contestant("tired", lambda _: interrupted_at_the_fourth),
    ]
    rows, interrupted = measure(CASE, contestants, repeats=10, limit=10)
    assert interrupted
    assert [row.repeats for row in rows] == [2, 1]


def test_the_memory_meter_counts_the_peak_of_known_allocations_exactly() -> None:
    def run() -> None:
        first = torch.empty(1000)
        second = torch.empty(300, dtype=torch.uint8)
        del first, second
        torch.empty(500, dtype=torch.float64)

    assert peak_bytes(run) == 4300


def test_the_memory_meter_sees_what_an_operator_uses_inside() -> None:
    x = torch.randn(64, 100)
    assert peak_bytes(lambda: x.logsumexp(0)) >= x.nbytes  # the exponentials; the result is 64 times smaller


def test_the_memory_meter_sees_the_backward_pass() -> None:
    x = torch.randn(64, 100, requires_grad=True)
    peak = peak_bytes(lambda: x.exp().sum().backward())  # exp(x) is kept, the gradient comes to it
    assert 2 * x.nbytes <= peak < 2.1 * x.nbytes


@pytest.mark.slow
def test_the_bandwidth_is_that_of_a_large_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bandwidth.BYTES, "cpu", 1 << 20)
    marks = itertools.count()
    monkeypatch.setattr(bandwidth, "CPU", Clock(lambda: next(marks), lambda start, end: 0.5 * (end - start)))
    assert bandwidth.copy_bandwidth("cpu", repeats=3) == 2 * (1 << 20) / 0.5
    monkeypatch.undo()
    assert 1e8 < bandwidth.copy_bandwidth("cpu", repeats=1) < 1e13


@pytest.mark.parametrize("operator", ["ksubset", "perturbed"])
def test_every_backend_computes_the_same_loss(operator: str) -> None:
    case = Case(64, 50, 3, {"tau": 0.5} if operator == "ksubset" else {"epsilon": 1.0, "num_samples": 400})
    contestants = {one.name: one for one in OPERATORS[operator].contestants(None)}
    logits, target = case.inputs()
    losses = [contestants[name].build(case)(logits, target) for name in (OURS, f"{OURS}: torch", f"{OURS}: numba")]
    # draws differ: 400 in each of 64 rows
    tolerance = 1e-6 if operator == "ksubset" else 4.5 * (2 / (400 * 64)) ** 0.5
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=tolerance)
    assert losses[2].item() == pytest.approx(losses[0].item(), abs=tolerance)


@pytest.mark.slow
def test_a_slow_contestant_sits_out_the_rounds_beyond_its_limit() -> None:
    samples = {"slow": [], "quick": []}
    interleave({"slow": lambda: (2.0, 1.0), "quick": lambda: (0.1, 0.1)}, samples, repeats=10, limit=5.0)
    assert len(samples["slow"]) == 2
    assert len(samples["quick"]) == 10


def test_what_a_step_does_untimed_counts_towards_its_limit() -> None:
    def untimed() -> tuple[float, float]:
        time.sleep(0.05)
        return 0.0, 0.0

    samples = {"untimed": []}
    interleave({"untimed": untimed}, samples, repeats=100, limit=0.08)
    assert 1 <= len(samples["untimed"]) <= 2


def test_a_loss_without_a_k_takes_part_once() -> None:
    contestants = OPERATORS["losses"].contestants(None)
    names = {k: [one.name for one in contestants if one.takes_part(Case(4, 100, k))] for k in (5, 50)}
    assert {"F.cross_entropy", "focal", "differentiable_topk"} <= set(names[5])
    assert "focal" not in names[50]
    assert {"F.cross_entropy", "differentiable_topk", "lapsum"} <= set(names[50])


def test_the_time_limit_ends_a_block_and_leaves_no_alarm_behind() -> None:
    with pytest.raises(OverLimitError, match=r"0\.05 s"), time_limit(0.05):
        time.sleep(10)
    with time_limit(600.0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(median=3.0, q1=2.0, q3=4.0, minimum=1.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)


@pytest.mark.parametrize("shape", ["256", "a,b,c", "1,2,3,4"])
def test_a_bad_shape_is_named(shape: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["ksubset", "--shapes", shape])
    assert f"expected B,n,k such as 256,1000,5, got '{shape}'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")
def test_instructions_of_gpu_kernels_are_counted_without_a_gpu(capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("triton")
    (one,) = instructions.count(8192, 1000, 5, torch.bfloat16, 90)
    # 500 for a row and 20 for a score, by the algorithm: the count must hold both, and nothing of the search
    assert 20 < one.executed < 45
    assert one.stack == 0


@pytest.mark.slow
def test_linear_classifiers_are_measured_beside_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(linear, "green", lambda tests: True)
    report = tmp_path / "report.json"
    sizes = ["--classes", "300", "--features", "8", "--batch", "4", "--rows", "2", "--repeats", "2"]
    assert main(["linear", *sizes, "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(report.read_text())["results"]
    assert [row["contestant"] for row in rows] == list(linear.contestants(5, 1.0, 2))
    for row in rows:
        assert row["repeats"] == 2
        assert 0 < row["q1"] <= row["both"] <= row["q3"]
        assert row["bytes"] >= 4 * 300 * 8  # the gradient of the weight
        assert row["contestant"] in printed


@pytest.mark.slow
def test_scoring_and_serving_are_measured_by_commands(
    made_once: Callable[..., Path], capfd: pytest.CaptureFixture
) -> None:
    model = str(colours_by(made_once))
    capfd.readouterr()
    assert main(["scoring", model, "--images", "8", "--workers", "1"]) == 0
    rows = [line.split("\t") for line in capfd.readouterr().out.splitlines() if line.startswith("8\t1\t")]
    assert [len(row) for row in rows] == [7]
    assert main(["serving", model, "--workers", "1", "--clients", "2", "--seconds", "0.2"]) == 0
    header, row = capfd.readouterr().out.splitlines()
    assert dict(zip(header.split("\t"), row.split("\t"), strict=True))["other statuses"] == "none"
