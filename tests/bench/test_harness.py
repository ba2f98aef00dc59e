"""The harness measures what it says it measures, and keeps silent about what is not tested."""

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import topk_registry as tr
from tests.bench import bandwidth, instructions, linear, targets
from tests.bench.__main__ import main
from tests.bench.gate import is_green, outcome
from tests.bench.operators import OPERATORS, gpu_options
from tests.bench.report import table
from tests.export.colours import colours_by
from topk_studies.timing.contest import OURS, Case, Contestant, Operator, UnavailableError
from topk_studies.timing.measure import measure
from topk_studies.timing.memory import peak_bytes
from topk_studies.timing.peers import COMPILED
from topk_studies.timing.rounds import Clock, OverLimitError, Spread, captured, interleave, step, time_limit

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


def test_a_graph_s_step_is_its_whole_time_and_the_forward_graph_s(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[str] = []
    graphs = iter(("forward", "whole"))

    def recorded(run: Callable[[], object]) -> Callable[[], object]:
        run()
        name = next(graphs)
        return lambda: replayed.append(name)

    monkeypatch.setattr("topk_studies.timing.rounds.captured", recorded)
    seconds = iter((1.0, 3.0))
    clock = Clock(lambda: None, lambda start, end: next(seconds))
    logits, target = CASE.inputs()
    run = step(torch.nn.functional.cross_entropy, logits, target, clock=clock, graph=True)
    assert run() == (1.0, 2.0)
    assert replayed == ["forward", "whole"]
    assert logits.grad is None


def test_a_graph_is_captured_after_three_runs_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    where = ["main"]
    runs: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            runs.append("waits")

    class Place(contextlib.AbstractContextManager):
        def __init__(self, of: object) -> None:
            self.name = "side" if isinstance(of, Stream) else "graph"

        def __enter__(self) -> None:
            where.append(self.name)

        def __exit__(self, *_: object) -> None:
            where.pop()

    graph = SimpleNamespace(replay=lambda: runs.append("replayed"))
    for name, stand_in in {
        "is_available": lambda: True,
        "current_stream": Stream,
        "Stream": Stream,
        "stream": Place,
        "graph": Place,
        "CUDAGraph": lambda: graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    captured(lambda: runs.append(where[-1]))()
    assert runs == ["waits", "side", "side", "side", "waits", "graph", "replayed"]


def test_cross_entropy_is_compiled_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.config as config

    graphs: list[tuple[int, ...]] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(tuple(inputs[0].shape))
        return graph.forward

    def compiled_so(loss: Callable, dynamic: bool) -> Callable:
        return compile_with(loss, dynamic=dynamic, backend=kept)

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", compiled_so)
    with config.patch(recompile_limit=8):
        for n in range(3, 13):  # more than the eight that are compiled by default
            logits, target = (case := replace(CASE, n=n)).inputs()
            loss = COMPILED.build(case)(logits, target)
            torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))
    assert graphs == [(4, n) for n in range(3, 13)]
    assert [COMPILED.takes_part(replace(CASE, device=device)) for device in ("cpu", "cuda:0")] == [False, True]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_cases_of_a_gpu_are_both_kinds_of_targets_with_and_without_a_graph(name: str) -> None:
    found = list(gpu_options(OPERATORS[name]))
    assert len({tuple(each.items()) for each in found}) == len(found)
    assert {(each["mixup"], each["graph"], each["cold"]) for each in found} == {
        (0.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.3, 0.0, 1.0), (0.3, 1.0, 1.0),
    }  # fmt: skip
    own = [Case(4, 10, 2, each).loss_options for each in found]
    assert {"ksubset": {"tau"}, "perturbed": {"epsilon", "num_samples"}, "losses": set()}[name] == set(own[0])


def test_the_outcome_of_tests_is_read_from_their_report(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    assert not is_green(outcome(report))
    case = '<testcase classname="tests.ops" name="{}">{}</testcase>'
    cases = [case.format("one", ""), case.format("two", "<skipped/>"), case.format("three", "<failure/>")]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert outcome(report) == {"passed": 1, "failed": ["tests.ops::three"], "skipped": 1}
    assert not is_green(outcome(report))
    report.write_text(f"<testsuites><testsuite>{cases[0]}</testsuite></testsuites>")
    assert is_green(outcome(report))
    cut = '<testcase classname="pytest" name="internal"><error/></testcase>'  # what pytest writes of an interrupt
    report.write_text(f"<testsuites><testsuite>{cases[0]}{cut}</testsuite></testsuites>")
    assert outcome(report) == {"passed": 1, "failed": [], "skipped": 0, "cut_off": True}


def test_targets_of_a_gpu_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def row(contestant: str, seconds: float, graph: float = 1.0, **other: object) -> dict[str, object]:
        shape = {"B": 8192, "n": 1000, "k": 5, "dtype": "bfloat16", "tau": 1.0, "mixup": 0.0, "graph": graph}
        return {**shape, "contestant": contestant, "floor": 4e-6, "both": {"median": seconds}, **other}

    times = {"topk_registry": 1e-5, "F.cross_entropy": 2e-5, "F.cross_entropy, compiled": 5e-6}
    small = [row(name, seconds, 0.0, B=256, k=50) for name, seconds in times.items()]
    soft = [row(name, seconds, mixup=0.3) for name, seconds in times.items()]
    missing = {**row("topk_registry: torch", 1.0), "both": None}
    rows = [*(row(name, seconds) for name, seconds in times.items()), *small, *soft, missing]
    (tmp_path / "ksubset_gpu.json").write_text(json.dumps({"results": rows}))
    layer = {"n": 10, "d": 2, "B": 4, "dtype": "bfloat16", "problem": ""}
    linears = [{**layer, "contestant": "linear_smooth_topk", "both": 1.2, "bytes": 3}]
    linears += [{**layer, "contestant": "F.cross_entropy on logits", "both": 1.0, "bytes": 2}]
    (tmp_path / "linear_gpu.json").write_text(json.dumps({"results": linears}))
    shares = [{"model": "resnet50", "loss": "focal", "share": 0.02, "problem": ""}, {"loss": "x", "problem": "no"}]
    (tmp_path / "steps_gpu.json").write_text(json.dumps({"results": shares}))
    found = [(one.what, one.target, round(one.found, 3), one.met) for one in targets.verdicts(tmp_path)]
    assert found == [
        ("time over F.cross_entropy", 1.0, 0.5, True),
        ("time over F.cross_entropy, compiled", 1.3, 2.0, False),
        ("share of the copy bandwidth", 0.5, 0.4, False),
        ("time over F.cross_entropy, launched", 1.3, 0.5, True),
        ("time over F.cross_entropy", 1.5, 0.5, True),
        ("time over F.cross_entropy, compiled", 1.5, 2.0, False),
        ("share of the copy bandwidth", 0.5, 0.4, False),
        ("time over F.cross_entropy on logits", 1.3, 1.2, True),
        ("memory over F.cross_entropy on logits", 1.1, 1.5, False),
        ("share of a training step", 0.01, 0.02, False),
    ]
    assert main(["targets", str(tmp_path)]) == 0
    assert "4 of 10 targets met" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "targets_gpu.json").read_text())) == 10


def test_a_linear_classifier_that_fails_is_told_of() -> None:
    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("out of memory\nat length")

    losses = {"fails": fails, linear.ON_LOGITS: linear.contestants(2, 1.0, 2)[linear.ON_LOGITS]}
    rows = linear.measure(linear.layer(3, 7, 2), losses, 1, 1e6)
    assert [row["problem"] for row in rows] == ["RuntimeError: out of memory", ""]
    assert "fails: RuntimeError: out of memory" in linear.table(rows)


@pytest.mark.slow
def test_the_loss_s_share_of_a_training_step(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = tmp_path / "steps.json"
    tiny = ["--models", "test_vit", "--batch", "2", "--size", "160", "--classes", "12", "--repeats", "1"]
    with tr.use_backend("torch"):
        main(["steps", *tiny, "--losses", "focal", "--device", "cpu", "--junit", "none", "--json", str(report)])
    rows, printed = json.loads(report.read_text())["results"], capsys.readouterr().out
    assert [row["loss"] for row in rows] == ["F.cross_entropy", "focal"]
    for row in rows:
        assert row["share"] == pytest.approx(row["of_loss"] / row["seconds"])
        assert 0 < row["share"] < 1
        assert f"{row['share']:.2%}" in printed


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
