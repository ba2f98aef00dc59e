"""Running what the cache lacks, in processes that may fail."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from topk_studies.engine.runner import Words, run_study
from topk_studies.engine.study import Options
from topk_studies.old_trainer.executors.local import processors

from .conftest import QUIET


def test_every_run_is_done_once_and_the_second_stage_follows_the_first(stub, store):
    said = []
    records = run_study(stub.study, Options(), store, say=said.append)
    assert [(record.configuration["x"], record.result["y"]) for record in records] == [
        *((0, 0), (1, 1), (2, 4), (3, 9)),
        (30, 900),
    ]
    assert stub.runs() == [(x, "square") for x in (0, 1, 2, 3, 30)]
    assert not any(record.error for record in records)
    assert all(record.seconds >= 0 and record.versions["topk-registry"] for record in records)
    assert said[0] == "4 of 4 runs to do, 0 are cached"
    assert not list((store.root / "work").rglob("trace"))  # what a finished run worked with is gone

    again = run_study(stub.study, Options(), store, **QUIET)
    assert again == records
    assert len(stub.runs()) == 5


def test_one_missing_run_is_all_that_is_repeated(stub, store):
    records = run_study(stub.study, Options(), store, **QUIET)
    (path,) = [path for path in store.root.rglob("runs/stub/*.json") if '"y": 4' in path.read_text()]
    path.unlink()
    assert [r.result for r in run_study(stub.study, Options(), store, **QUIET)] == [r.result for r in records]
    assert stub.runs()[5:] == [(2, "square")]


def test_rerun_repeats_everything(stub, store):
    run_study(stub.study, Options(), store, **QUIET)
    run_study(stub.study, Options(), store, rerun=True, **QUIET)
    assert stub.runs() == 2 * [(x, "square") for x in (0, 1, 2, 3, 30)]


@pytest.mark.parametrize(
    ("plan", "message"),
    [("refuse", "not to the study's liking"), ("break", "ZeroDivisionError: by x"), ("die", "status -9")],
)
def test_a_run_that_fails_is_recorded_and_holds_nothing_up(stub, store, plan, message):
    said = []
    records = run_study(stub.study, Options(flags={"1": plan}), store, say=said.append)
    assert [bool(record.error) for record in records] == [False, True, False, False]
    assert message in records[1].error
    assert any("FAILED" in line and message in line for line in said)
    # a run that failed is tried again
    run_study(stub.study, Options(flags={"1": plan}), store, **QUIET)
    assert stub.runs() == [(0, "square"), (1, plan), (2, "square"), (3, "square"), (1, plan)]


def test_what_a_run_prints_is_no_answer(stub, store):
    records = run_study(stub.study, Options(flags={"0": "talk"}), store, **QUIET)
    assert not any(record.error for record in records)


def test_jobs_run_side_by_side_and_share_the_processors(stub, store, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    records = run_study(stub.study, Options(), store, jobs=2, **QUIET)
    assert sorted(record.result["y"] for record in records) == [0, 1, 4, 9, 900]
    assert {record.result["threads"] for record in records} == {str(max(1, processors() // 2))}


def test_studies_that_measure_time_run_alone(stub, store, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(stub.study, "ALONE", True)
    monkeypatch.setattr(stub.study, "COUNT", 3)
    records = run_study(stub.study, Options(flags={"0": "talk"}), store, jobs=4, **QUIET)
    assert {record.result["threads"] for record in records} == {str(processors())}


def test_words_tell_runs_apart_and_no_more():
    a = {"flags": {"loss": "ce", "lr": 0.1, "epochs": 8}, "device": "cpu"}
    b = {"flags": {"loss": "focal", "lr": 0.1, "epochs": 8, "loss_opt": {"gamma": 2}}, "device": "cpu"}
    words = Words([a, b])
    assert words.of(a) == "loss=ce"
    assert words.of(b) == "loss=focal gamma=2"
    assert Words([a]).of(a) == "loss=ce lr=0.1 epochs=8 device=cpu"


def test_records_of_other_versions_are_not_taken(stub, store, monkeypatch):
    first = run_study(stub.study, Options(), store, **QUIET)
    monkeypatch.setattr(stub.study, "VERSION", 2)
    second = run_study(stub.study, Options(), store, **QUIET)
    assert [replace(record, version=1).configuration for record in second] == [record.configuration for record in first]
    assert len(stub.runs()) == 10


@pytest.mark.slow
@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed: topk-registry[slurm]")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_study_goes_on_with_another_executor(stub, store, tmp_path, monkeypatch):
    from topk_studies.old_trainer.executors.slurm import SlurmExecutor

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(stub.study, "COUNT", 2)
    executor = SlurmExecutor(2, tmp_path / "slurm", cluster="local", timeout_min=10)
    try:
        records = run_study(stub.study, Options(), store, jobs=2, executor=executor, **QUIET)
    finally:
        executor.kill()
    assert sorted(record.configuration["x"] for record in records if not record.error) == [0, 1, 10]
    monkeypatch.setattr(stub.study, "COUNT", 3)
    assert not any(record.error for record in run_study(stub.study, Options(), store, **QUIET))
    assert [x for x, _ in stub.runs()[3:]] == [2, 20]
