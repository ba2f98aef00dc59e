"""A stored run of a study stands for the same flags and the same data only."""

import os

import pytest

from topk_studies import runner, studies

FLAGS = {
    **studies.DATA["vectors"], "loss": "focal", "loss_opt": {"gamma": 1.0}, "lr": 0.1, "seed": 0,
    "val_split": "validation", "eval_metric": "top5",
}  # fmt: skip


def flipped(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {**value, "other": 1}
    return f"{value}x" if isinstance(value, str) else value + 1


@pytest.fixture
def stored(tmp_path):
    runner.Runs(tmp_path / "runs.jsonl", lambda flags: {"top5": 1.0}, data="images")(FLAGS)
    return lambda data="images": runner.Runs(tmp_path / "runs.jsonl", None, data=data)


@pytest.mark.parametrize("name", FLAGS)
def test_a_run_with_another_flag_is_trained(stored, name):
    assert stored().missing([FLAGS]) == []
    assert stored().missing([{**FLAGS, name: flipped(FLAGS[name])}])
    assert stored().missing([{key: value for key, value in FLAGS.items() if key != name}])


def test_the_order_of_flags_does_not_matter_and_other_data_do(stored):
    assert stored().missing([dict(reversed(FLAGS.items()))]) == []
    assert stored("other images").missing([FLAGS])
    assert stored("").missing([FLAGS])


def test_tuning_and_results_are_different_runs():
    study = studies.Study("?", "-", {"a": {"noise": 0.0}}, (studies.Contestant("ce"),), "top5", ("top5",))
    (cell,) = runner.cells(study, {"dataset_opt": {"size": 9}})
    tuning, results = cell.tuning(), cell.results(1, range(2))
    assert {flags["seed"] for flags in tuning} == {runner.TUNING_SEED}
    assert {flags["seed"] for flags in results} == {0, 1}
    assert {flags["lr"] for flags in results} == {tuning[1]["lr"]}
    assert {flags["val_split"] for flags in results} == {"test"}
    assert all(flags["dataset_opt"] == {"size": 9, "noise": 0.0} for flags in [*tuning, *results])


def test_the_fingerprint_of_a_folder_sees_every_file(tmp_path):
    folder = tmp_path / "images"
    (folder / "a").mkdir(parents=True)
    file = folder / "a" / "1.png"
    file.write_bytes(b"12")
    os.utime(file, ns=(10**18, 10**18))
    seen = [runner.fingerprint(folder)]
    assert runner.fingerprint(folder) == seen[0]
    file.write_bytes(b"34")  # of the same size
    os.utime(file, ns=(10**18, 10**18 + 1))
    seen.append(runner.fingerprint(folder))
    file.rename(file.with_name("2.png"))
    seen.append(runner.fingerprint(folder))
    file.with_name("3.png").write_bytes(b"")
    seen.append(runner.fingerprint(folder))
    (folder / "a" / "2.png").write_bytes(b"345")
    os.utime(folder / "a" / "2.png", ns=(10**18, 10**18 + 1))
    seen.append(runner.fingerprint(folder))
    (linked := tmp_path / "linked").mkdir()
    (folder / "b").symlink_to(linked)
    (linked / "1.png").write_bytes(b"1")
    seen.append(runner.fingerprint(folder))
    assert len(set(seen)) == len(seen)
