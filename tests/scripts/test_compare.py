"""``compare``: statistics beside an independent computation, and models in files."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from tests.system_calls import Calls
from topk_registry.cli.main import main
from topk_registry.data.held_out import record_of
from topk_registry.errors import DataError
from topk_registry.train import compare, data
from topk_registry.train.compare import compare_scores, mcnemar, table
from topk_registry.train.config import TrainConfig
from topk_registry.train.model import read_checkpoint


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 9), (9, 1), (5, 5), (40, 61), (700, 800)])
def test_mcnemar_is_the_exact_binomial_test(gained, lost):
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9)


@pytest.fixture
def scores():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 300)
    first = rng.normal(size=(300, 6)) + 1.0 * np.eye(6)[labels]
    return [first, first + rng.normal(size=(300, 6)), first + 1.5 * np.eye(6)[labels]], labels


def test_values_and_counts_are_those_of_a_plain_computation(scores):
    logits, labels = scores
    for other, differences in zip(logits[1:], compare_scores(logits, labels, k=(1, 3), resamples=50), strict=True):
        found = {d.measure: d for d in differences}
        assert list(found) == ["top1", "top3", "nll", "macro top1", "macro top3"]
        for k in (1, 3):
            a, b = ((np.argsort(-x, axis=1)[:, :k] == labels[:, None]).any(1) for x in (logits[0], other))
            d = found[f"top{k}"]
            assert (d.first, d.second) == (pytest.approx(100 * a.mean()), pytest.approx(100 * b.mean()))
            assert (d.gained, d.lost) == ((b & ~a).sum(), (a & ~b).sum())
            macro = [100 * np.mean([x[labels == c].mean() for c in range(6)]) for x in (a, b)]
            assert (found[f"macro top{k}"].first, found[f"macro top{k}"].second) == pytest.approx(macro)
        nll = [stats_nll(x, labels) for x in (logits[0], other)]
        assert (found["nll"].first, found["nll"].second) == pytest.approx(nll)


def stats_nll(x, labels):
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    return -np.log(p[np.arange(len(x)), labels]).mean()


def test_intervals_are_those_of_scipys_paired_bootstrap(scores):
    logits, labels = scores
    found = {d.measure: d for d in compare_scores(logits[:2], labels, k=(1,), resamples=4000)[0]}
    a, b = (x.argmax(1) == labels for x in logits[:2])
    reference = stats.bootstrap(
        (100.0 * (b.astype(float) - a),), np.mean, n_resamples=4000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    spread = reference.high - reference.low
    assert found["top1"].low == pytest.approx(reference.low, abs=0.1 * spread)
    assert found["top1"].high == pytest.approx(reference.high, abs=0.1 * spread)


def test_resamples_come_in_parts(monkeypatch):
    monkeypatch.setattr(compare, "MAX_DRAWN", 20)
    parts = list(compare._resamples(7, 5, seed=0))
    assert [part.shape for part in parts] == [(2, 7), (2, 7), (1, 7)]
    assert all(part.sum(1).tolist() == [7] * len(part) for part in parts)


def test_a_bootstrap_of_three_images_is_that_of_all_resamples():
    """27 resamples, enumerated."""
    labels = np.array([0, 1, 1])
    first = np.array([[1.0, 0], [1, 0], [0, 1]])
    second = np.array([[1.0, 0], [0, 1], [0, 1]])
    gain = np.array([0.0, 100, 0])
    drawn = [np.mean([gain[i] for i in index]) for index in itertools.product(range(3), repeat=3)]
    ((d, *_),) = [compare_scores([first, second], labels, k=(1,), resamples=20000)[0]]
    assert (d.low, d.high) == pytest.approx(tuple(np.quantile(np.repeat(drawn, 1000), [0.025, 0.975])))


def test_equal_scores_share_their_credit():
    flat = np.zeros((4, 4))
    (d, *_), nan = compare_scores([flat, flat, flat * np.nan], np.arange(4), k=(2, 5), resamples=10)
    assert (d.first, d.second, d.gained, d.p, nan[0].second, nan[1].second) == (50.0, 50.0, 0, 1.0, 0.0, 0.0)


def test_the_table_names_every_model(scores):
    logits, labels = scores
    text = table(["a", "b", "c"], compare_scores(logits, labels, k=(1,), resamples=20))
    lines = text.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["b"] * 3 + ["c"] * 3
    for line in lines:
        assert len(re.search(r"\.(\d+)", line)[1]) == (4 if " nll " in line else 2), line


@pytest.fixture
def two_models(tmp_path):
    flags = ["--dataset-opt", "size=96", "superclasses=4", "fine=3", "pixel_noise=1.0", "--model", "topk_convnet"]
    flags += ["--model-kwargs", "width=2", "-b", "16", "-j", "0", "--no-aug", "--device", "cpu", "--epochs", "1"]
    files = []
    for loss in ("ce", "smooth_topk_svm"):
        argv = ["train", *flags, "--loss", loss, "--output", str(tmp_path), "--experiment", loss]
        assert main(argv) == 0
        files.append(str(tmp_path / loss / "last.pth.tar"))
    return files


@pytest.mark.slow
def test_two_checkpoints_on_the_data_of_their_training(two_models, tmp_path, capsys):
    assert main(["compare", *two_models, "--resamples", "50", "-j", "0", "--json", str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    assert "12 classes" in out
    report = json.loads((tmp_path / "c.json").read_text())
    (comparison,) = report["comparisons"]
    assert comparison["second"] == two_models[1]
    assert {d["measure"] for d in comparison["differences"]} >= {"top1", "top5", "macro top1", "nll"}


@pytest.mark.parametrize("argv", [["one.pth"], ["a.pth", "a.pth"], ["a.pth", "./a.pth"]])
def test_wrong_usage_is_status_2(argv):
    with pytest.raises(SystemExit, match="2"):
        main(["compare", *argv])


def test_a_file_that_is_missing_is_status_2(capsys):
    assert main(["compare", "/no/such/a.pth", "/no/such/b.pth"]) == 2
    assert "/no/such/a.pth" in capsys.readouterr().err


def test_images_that_are_held_out_are_those_of_the_run():
    options = {"size": 400, "change_seed": 7}
    config = TrainConfig(dataset="topk/hierarchy", val_split="0.25", dataset_opt=options)
    trained = data.open_split(config, config.train_split, training=True, held_out=0.25)
    own = record_of(config.to_dict())

    def other(**settings):
        return {"a": own, "b": record_of(config.replace(**settings).to_dict())}

    for records in ({"a": own}, other(dataset_opt={**options, "noise": 0.4}), other(dataset="topk/ambiguous")):
        used, notes = data.open_images(config, records)
        assert set(used.indices).isdisjoint(trained.indices)
        assert 0 < len(used) == 400 - len(trained)
        assert "the 25 % of topk/hierarchy that training held out; see --all-images" in notes
    changes = [{"val_split": "0.5"}, {"val_split": "validation"}]
    changes += [{"dataset_opt": {"size": 400, "change_seed": 8}}, {"dataset_opt": {"size": 500, "change_seed": 7}}]
    for change in changes:
        with pytest.raises(DataError, match="so some of them were trained on images of topk/hierarchy"):
            data.open_images(config, other(**change))
        assert len(data.open_images(config, other(**change), all_images=True)[0]) == len(used)
    assert not data.open_images(config, {"b": other(dataset="topk/ambiguous")["b"]})[1]  # of other data
    assert "b records no images of training" in data.open_images(config, {"a": own, "b": None})[1][0]
    data.open_images(config.replace(val_split="validation"), {"a": own, "b": None})


def test_runs_on_other_folders_trained_on_other_images(tmp_path):
    for name in ("ant", "bee"):
        (place := tmp_path / "photos" / "train" / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (4, 4), (i, 0, 0)).save(place / f"{i}.png")
    config = TrainConfig(data_dir=str(tmp_path / "photos"), val_split="0.25")
    own = record_of(config.to_dict())

    def other(**settings):
        return {"a": own, "b": record_of(config.replace(val_split="validation", **settings).to_dict())}

    used, notes = data.open_images(config, other(data_dir="drawings"))
    assert len(used) == 4
    assert "that training held out; see" in notes[0]
    for settings in ({}, {"dataset": "topk/folder"}, {"data_dir": "elsewhere/photos"}):
        with pytest.raises(DataError, match="held out different images"):
            data.open_images(config, other(**settings))


def small_run(tmp_path, name, *flags):
    argv = ["train", "--model", "topk_convnet", "--model-kwargs", "width=2", "-b", "8", "-j", "0", "--device", "cpu"]
    argv += ["--epochs", "1", "--warmup-epochs", "0", "--lr", "0.01", "--no-aug", *flags]
    assert main([*argv, "--output", str(tmp_path), "--experiment", name]) == 0
    return str(tmp_path / name / "last.pth.tar")


def test_images_of_training_are_refused_by_both_commands(tmp_path, capsys):
    built_in = ["--dataset", "topk/hierarchy", "--dataset-opt", "size=96", "superclasses=2", "fine=2"]
    half, quarter = (small_run(tmp_path, name, *built_in, "--val-split", name) for name in ("0.5", "0.25"))
    for argv in (["compare", half, quarter], ["validate", half, "--split", "0.25"]):
        capsys.readouterr()
        assert main([*argv, "-j", "0", "--device", "cpu"]) == 2
        assert "were trained on images of topk/hierarchy" in capsys.readouterr().err
        assert main([*argv, "-j", "0", "--device", "cpu", "--all-images"]) == 0
    saved = read_checkpoint(half)
    del saved["args"].val_split, saved["args"].dataset
    torch.save(saved, unknown := str(tmp_path / "unknown.pth.tar"))
    capsys.readouterr()
    assert main(["compare", half, unknown, "-j", "0", "--device", "cpu"]) == 0
    assert "unknown.pth.tar records no images of training" in capsys.readouterr().out


def test_checkpoints_of_several_labels_are_an_error(tmp_path, capsys):
    several = ["--task", "multilabel", "--dataset", "topk/several", "--dataset-opt", "size=40", "eval_size=20"]
    files = [small_run(tmp_path, name, *several, "--loss", name) for name in ("bce", "db")]
    capsys.readouterr()
    assert main(["compare", *files, "-j", "0", "--device", "cpu"]) == 2
    assert "bce/last.pth.tar predicts several labels per image, and compare needs one" in capsys.readouterr().err
    assert main(["validate", files[1], "-j", "0", "--device", "cpu"]) == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_models_of_one_channel_and_unreadable_images(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    for split, name, i in itertools.product(("train", "validation"), ("a", "b"), range(8)):
        path = tmp_path / "images" / split / name / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    folder = str(tmp_path / "images")
    gray = small_run(tmp_path, "gray", folder, "--input-size", "1", "32", "32")
    color = small_run(tmp_path, "color", folder, "--input-size", "3", "32", "32")
    (tmp_path / "images/validation/a/3.png").write_bytes(b"no image")
    capsys.readouterr()
    report = tmp_path / "report.json"
    argv = ["compare", gray, color, "-j", "0", "--device", "cpu", "--resamples", "20", "--json", str(report)]
    for where in ([], ["--data-dir", folder]):
        calls = Calls(monkeypatch)
        assert main([*argv, *where]) == 0
        out = capsys.readouterr().out
        assert "1 of 16 images cannot be read and are left out" in out
        assert "15 images of 2 classes" in out
        calls.check_written(report)
        found = json.loads(report.read_text())
        assert (found["images"], found["classes"], found["comparisons"][0]["second"]) == (15, 2, color)
    assert main([*argv, "--dataset", "topk/hierarchy", "--dataset-opt", "size=40", "superclasses=2", "fine=1"]) == 2
    assert "images have 3 channels (RGB), and the model takes 1" in capsys.readouterr().err
