"""The speed study times what it names, and says of a claim only what the quartiles allow."""

import json
from collections.abc import Mapping

import pytest
import torch

import topk_registry as tr
from topk_registry import registry
from topk_studies.baselines.algorithms import ALGORITHM_2, AUTHORS, DIVIDE, PYTOPK, SUMMATION
from topk_studies.engine.study import Median, Options, Record
from topk_studies.experiments import speed
from topk_studies.report import plots
from topk_studies.timing.contest import OURS

SMALL = {"B": 4, "n": 30, "k": 3, "tau": 1.0, "dtype": "float32", "device": "cpu", "repeats": 3, "limit": 30.0}


def timed(*contestants: str) -> dict:
    return speed.run({"sweep": "n", **SMALL, "contestants": list(contestants)}, None, lambda share, words: None)


@pytest.mark.slow
def test_every_contestant_of_the_study_runs() -> None:
    names = {name for c in speed.configurations(Options(), []) for name in c["contestants"]}
    found = timed(*names)
    assert {name: times["problem"] for name, times in found["times"].items()} == dict.fromkeys(names, "")
    for times in found["times"].values():
        assert times["repeats"] == 3
        for which in ("forward", "backward", "both"):
            assert 0 < times[which]["minimum"] <= times[which]["q1"] <= times[which]["median"] <= times[which]["q3"]
        assert times["both"]["minimum"] >= times["forward"]["minimum"] + times["backward"]["minimum"]
    assert found["threads"] == torch.get_num_threads()
    assert json.loads(json.dumps(found)) == found


@pytest.mark.slow
def test_a_third_partys_loss_is_timed_with_the_options_it_takes() -> None:
    seen = {}

    @tr.register_loss("their_loss")
    def factory(k: int = 1, class_counts: list | None = None):
        seen.update(k=k, counts=len(class_counts or ()))
        return torch.nn.CrossEntropyLoss()

    try:
        wanted = speed.configurations(Options(losses=("their_loss",)), [])
        assert {name for c in wanted if c["sweep"] == "k" for name in c["contestants"][:1]} == {"their_loss"}
        assert timed("their_loss")["times"]["their_loss"]["problem"] == ""
    finally:
        registry.losses.unregister("their_loss")
    assert seen == {"k": 3, "counts": 30}


def test_the_sweeps_are_the_papers() -> None:
    wanted = speed.configurations(Options(), [])
    assert [c["n"] for c in wanted if c["sweep"] == "n"] == [100, 1000, 10_000, 100_000]
    assert {c["k"] for c in wanted if c["sweep"] == "n"} == {5}
    assert max(c["k"] for c in speed.configurations(Options(budget="paper"), [])) == 100
    assert {c["B"] for c in speed.configurations(Options(budget="paper"), [])} == {256}


def record(sweep: str, value: int, medians: Mapping[str, float | str], *, spread: float = 0.01) -> Record:
    """A run with these times in ms, quartiles so far apart; a string is a problem."""
    times = {}
    for name, ms in medians.items():
        if isinstance(ms, str):
            times[name] = {"repeats": 0, "problem": ms}
        else:
            s = {"median": ms / 1e3, "q1": (1 - spread) * ms / 1e3, "q3": (1 + spread) * ms / 1e3, "minimum": ms / 2e3}
            times[name] = {"forward": s, "backward": s, "both": s, "repeats": 9, "problem": ""}
    configuration = {**SMALL, sweep: value, "sweep": sweep, "contestants": list(medians)}
    result = {"times": times, "threads": 2, "busy": "", "processor": "a processor"}
    return Record("speed", 1, configuration, result, 1.0, "2026-01-01T00:00:00", {})


def test_medians_come_out_in_milliseconds_and_problems_in_words() -> None:
    records = [
        record("n", 1000, {SUMMATION: 20.0, OURS: 0.5}),
        record("n", 100, {SUMMATION: "over the limit", OURS: 0.1}),
    ]
    forward, backward = speed.report(records).tables
    assert forward.columns == ("contestant", "n = 100", "n = 1000")
    assert forward.rows[0] == (SUMMATION, "over the limit", Median(20.0, pytest.approx(19.8), pytest.approx(20.2), 9))
    assert "Table 3" in forward.title
    assert "Table 4" in backward.title


@pytest.mark.parametrize(
    ("divide", "spread", "verdict"),
    [(5, 0.01, "agrees"), (20, 0.01, "differs"), (9, 0.2, "open"), (9.8, 0.001, "same"), (10.2, 0.2, "same")],
)
def test_a_claim_holds_where_the_quartiles_are_apart(divide: float, spread: float, verdict: str) -> None:
    records = [record("n", n, {SUMMATION: 10.0, DIVIDE: divide}, spread=spread) for n in (100, 1000)]
    (note,) = speed.report(records).notes
    assert note.verdict == verdict
    assert f"{10 / divide:.2g} at n = 100, {10 / divide:.2g} at n = 1000." in note.evidence


def test_each_verdict_on_a_claim_names_the_sizes_it_is_true_of() -> None:
    records = [record("n", n, {SUMMATION: 10.0, DIVIDE: ms}) for n, ms in ((100, 10.2), (1000, 5.0), (10_000, 2.0))]
    same, faster = speed.report(records).notes
    assert same.claim == faster.claim
    assert (same.verdict, faster.verdict) == ("same", "agrees")
    assert same.evidence.endswith(": 0.98 at n = 100.")
    assert faster.evidence.endswith(": 2 at n = 1000, 5 at n = 10000.")


def test_growth_with_k_is_read_where_all_arrive() -> None:
    names = (AUTHORS, PYTOPK, ALGORITHM_2, "smooth_topk_svm", "noised_topk")
    records = [
        record("k", 1, dict.fromkeys(names, 1.0)),
        record("k", 10, {**dict.fromkeys(names, 1.5), AUTHORS: 9.0, ALGORITHM_2: 2.0}),
        record("k", 50, {**dict.fromkeys(names, 1.5), AUTHORS: "over the limit", ALGORITHM_2: 12.0}),
    ]
    paper, ours = speed.report(records).notes
    assert paper.verdict == "agrees"
    assert paper.evidence.startswith("Time at k = 10 over that at k = 1")
    assert (ours.verdict, ours.beyond) == ("agrees", True)
    assert ours.evidence.startswith("Time at k = 50")
    assert [note.verdict for note in speed.report(records[:2]).notes] == ["agrees", "differs"]


def test_the_figures_draw_every_contestant() -> None:
    records = [record("n", n, {SUMMATION: 20.0, OURS: 0.5}) for n in (100, 1000)]
    records += [record("k", k, {PYTOPK: 20.0, AUTHORS: "over it"}) for k in (1, 5)]
    classes, ks = (plots.svg(figure, name="x") for figure in speed.report(records).figures)
    assert f">{SUMMATION}<" in classes
    assert f">{OURS}<" in classes
    assert f">{PYTOPK}<" in ks
    assert ">5<" in ks


def test_the_protocol_tells_the_machine_and_that_it_was_busy() -> None:
    one = record("n", 100, {OURS: 1.0})
    one.result["busy"] = "load average 9.0 on 2 cores"
    told = speed.report([one, record("n", 1000, {OURS: 1.0})]).protocol
    assert "a processor, 2 threads" in told
    assert "1 of 2 runs began while other work kept the machine busy" in told


def test_a_report_of_nothing_is_a_report() -> None:
    assert speed.report([]).tables == ()
