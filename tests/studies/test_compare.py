"""`topk-registry study compare` on the user's own data, and `study cifar100` on a folder of the same form."""

import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.system_calls import Calls
from topk_registry.data import open_dataset
from topk_registry.train import TrainConfig
from topk_registry.train.data import open_split
from topk_studies import runner
from topk_studies.command import _flags_of_train, check, create_study_parser, main
from topk_studies.compare import flags_of, study_of
from topk_studies.data import parts
from topk_studies.data.cifar100 import CLASSES, FAMILIES, SUPERCLASSES
from topk_studies.studies import STUDIES, Contestant, spread

SMALL = ["--dataset", "topk/hierarchy", "--dataset-opt", "size=120", "superclasses=4", "fine=2", "eval_size=80"]
SMALL += ["--model", "topk_convnet", "--model-kwargs", "width=4", "--epochs", "1", "--batch-size", "32", "--no-aug"]
SMALL += ["--warmup-epochs", "0", "--workers", "0", "--device", "cpu", "--eval-metric", "top3", "--smoothing", "0"]


@pytest.fixture
def folder(tmp_path):
    """Two classes with 8 training, 6 validation and 4 test images, each of a color of its own."""
    for split, count in (("train", 8), ("val", 6), ("test", 4)):
        for c in ("ant", "bee"):
            (tmp_path / split / c).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (4, 4), (i, c == "bee", len(split))).save(tmp_path / split / c / f"{i}.png")
    return tmp_path


def colors(part):
    return {part[i][0].getpixel((0, 0)) for i in range(len(part))}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("ce", [{}]),
        ("focal(gamma=1|2.5)", [{"gamma": 1}, {"gamma": 2.5}]),
        ("mirror(base=mse, link=softmax|sigmoid)", [{"base": "mse", "link": x} for x in ("softmax", "sigmoid")]),
        ("timm:x(k=[1, 5], a=1e-3|None)", [{"k": [1, 5], "a": 1e-3}, {"k": [1, 5], "a": None}]),
    ],
)
def test_a_loss_as_text(text, options):
    found = Contestant(text)
    assert found.options == options
    assert found.loss == text.partition("(")[0]


@pytest.mark.parametrize("text", ["focal(2)", "focal(gamma=1", "(gamma=1)", "focal(gamma=1)(2)", "focal(gamma=f(1))"])
def test_a_loss_of_another_form_is_an_error(text):
    with pytest.raises(ValueError, match="expected NAME"):
        Contestant(text)


@pytest.mark.parametrize("count", [3, 4, 6, 7])
def test_every_loss_gets_the_same_learning_rates(count):
    texts = ["ce", "smooth_topk_svm", "noised_topk(epsilon=0.3)", "focal(gamma=1|2)"]
    study = study_of(texts, count, (0.01, 1.0), TrainConfig(eval_metric="top5"))
    found = [contestant.trials(count, study.rates) for contestant in study.contestants]
    combinations = [1, 3, 1, 2]
    assert [len({json.dumps(trial) for trial in trials}) for trials in found] == [count * n for n in combinations]
    rates = spread(0.01, 1.0, count)
    for trials in found:
        for options in {json.dumps(trial["loss_opt"]) for trial in trials}:
            assert [trial["lr"] for trial in trials if json.dumps(trial["loss_opt"]) == options] == rates
    assert {trial["loss_opt"]["tau"] for trial in found[1]} == {0.1, 0.3, 1.0}  # the loss's own grid
    assert all(0.01 < trial["lr"] < 1.0 for trials in found for trial in trials)
    assert found[0][0]["lr"] == spread(0.01, 1.0, count)[0]


def test_the_default_rates_are_around_that_of_the_settings():
    study = study_of(["ce"], 2, None, TrainConfig(dataset="topk/folder", lr_base=0.1, batch_size=256))
    assert study.rates == (0.025, 0.8)


@pytest.mark.parametrize(
    ("settings", "test_split", "sizes", "note"),
    [
        ({}, "", (16, 12, 8), "on test"),
        ({}, "val", (16, 12, 12), "on val"),
        ({"val_split": "0.25"}, "", (12, 4, 8), "0.25 of the training images"),
        ({"train_split": "val", "val_split": "0.5"}, "", (6, 6, 8), "0.5 of the training images"),
    ],
)
def test_the_parts_of_a_folder(folder, settings, test_split, sizes, note):
    config = TrainConfig(dataset="topk/folder", data_dir=str(folder), dataset_opt={"noise": 0.5}, **settings)
    flags, said = flags_of(config, test_split)
    train, validation, test = (
        open_dataset(flags["dataset"], split, folder, **flags["dataset_opt"])
        for split in ("train", "validation", "test")
    )
    assert (len(train), len(validation), len(test)) == sizes
    assert not colors(train) & (colors(validation) | colors(test))
    assert test_split or not colors(validation) & colors(test)
    assert (train.targets != train.true_targets).sum() == round(sizes[0] / 2)
    assert all((part.targets == part.true_targets).all() for part in (validation, test))
    assert note in said


def test_the_parts_have_the_channels_of_the_model(folder):
    config = TrainConfig(dataset="topk/folder", data_dir=str(folder), input_size=[1, 4, 4], num_classes=2, device="cpu")
    flags = {**flags_of(config, "")[0], "model": "topk_convnet", "loss": "ce", "loss_opt": {}, "workers": 0}
    part = open_split(TrainConfig(**flags), "train", training=True, channels=1)
    assert part[0][0].mode == "L"
    check(study_of(["ce"], 1, None, TrainConfig(eval_metric="top1")), [{**flags, "lr": 0.1, "batch_size": 4}])


def test_timm_gets_the_options_of_its_readers(folder, monkeypatch):
    given = []
    opened = parts.open_dataset
    monkeypatch.setattr(parts, "open_dataset", lambda *args, **more: given.append(more) or opened(*args, **more))
    config = TrainConfig(dataset="torch/image_folder", data_dir=str(folder), class_map="classes.txt", val_split="0.5")
    open_split(TrainConfig(**flags_of(config, "")[0]), "train", training=True)
    assert given[0]["timm_options"]["class_map"] == "classes.txt"
    assert given[0]["training"] is False  # nothing of training alone, such as label noise


def test_without_a_test_split_each_class_of_validation_is_halved(folder):
    (folder / "test").rename(folder / "other")
    flags, said = flags_of(TrainConfig(dataset="topk/folder", data_dir=str(folder)), "")
    parts = [open_dataset(flags["dataset"], split, folder, **flags["dataset_opt"]) for split in ("validation", "test")]
    assert [np.bincount(part.targets).tolist() for part in parts] == [[3, 3], [3, 3]]
    assert len(colors(parts[0]) | colors(parts[1])) == 12
    assert "no test split" in said


@pytest.mark.parametrize(
    ("settings", "test_split", "words"),
    [
        ({"task": "multilabel", "dataset": "hfds/x"}, "", "one label per image"),
        ({"dataset": "torch/cifar100"}, "test", "one split for evaluation"),
        ({"dataset": "topk/folder", "input_key": ".png"}, "", "--input-key"),
    ],
)
def test_settings_that_serve_no_comparison(settings, test_split, words):
    with pytest.raises(ValueError, match=words):
        flags_of(TrainConfig(**settings), test_split)


def test_a_comparison_takes_a_recipe():
    command = ["--config", "finetune", "--pretrained-path", "x.pth", "--lr", "0.1"]
    flags = _flags_of_train(create_study_parser(), command)
    assert flags["model"] == "resnet18"
    assert flags["lr"] == 0.1
    assert "pretrained" not in flags  # the command line names other weights


@pytest.mark.slow
def test_the_command_compares_losses_and_repeats_no_run(tmp_path, capsys, monkeypatch):
    path = tmp_path / "out.json"
    command = ["compare", "--losses", "ce", "focal(gamma=1|2)", "--seeds", "2", "--trials", "2", *SMALL]
    command += ["--output", str(path)]
    calls = Calls(monkeypatch)
    assert main(command) == 0
    calls.check_written(path)
    printed = capsys.readouterr()
    assert re.search(r"^own data +ce .*lr=", printed.out, re.M)
    assert re.search(r"^own data +focal\(gamma=1\|2\) .*[+-]\d+\.\d\d ± ", printed.out, re.M)
    assert "trial 6 of 6" in printed.err
    assert "result 4 of 4" in printed.err
    found = json.loads(path.read_text())
    assert [len(row["tuning"]) for row in found["rows"]] == [2, 4]
    assert [trial["loss_opt"] for trial in found["rows"][1]["tuning"]] == 2 * [{"gamma": 1}] + 2 * [{"gamma": 2}]
    assert re.search(r"^own data +ce +2 +lr=\S+\*", printed.out, re.M)  # of two rates, each is at an edge
    assert "wider range" in printed.out
    assert all(0 <= trial["top3"] <= 100 for row in found["rows"] for trial in row["tuning"])
    assert "results are on test" in found["splits"]
    runs = [json.loads(line)["flags"] for line in path.with_suffix(".runs.jsonl").read_text().splitlines()]
    assert {(flags["val_split"], flags["seed"]) for flags in runs} == {("validation", 1000), ("test", 0), ("test", 1)}
    monkeypatch.setattr(runner, "Trainer", None)
    assert main(command) == 0
    assert json.loads(path.read_text()) == found


def test_a_dry_run_lists_the_trials_and_trains_nothing(tmp_path, capsys):
    path = tmp_path / "out.json"
    command = ["compare", "--losses", "ce", "--seeds", "3", "--dry-run", "--output", str(path)]
    assert main([*command, *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("  trial  ce lr=") == 6
    assert "6 trials (0 already done) and 3 runs of results" in printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--losses", "focal(2)"], "expected NAME"),
        (["--losses", "ce", "ce"], "ce is listed twice"),
        (["--losses", "focal(gamm=2)"], "no option 'gamm'"),
        (["--losses", "ce", "--rates", "1", "0.1"], "must be above 0 and increase"),
        (["--losses", "ce", "--loss", "ce"], "pass --losses"),
        (["--losses", "ce", "--epoch", "3"], "did you mean '--epochs'"),
        (["--losses", "ce", "--eval-metric", "top8"], "top8 of 8 classes"),
        (["--losses", "ce", "--eval-metric", "best"], "--eval-metric must be"),
        (["--losses", "ce", "--data-dir", "/no/such/place", "--dataset", "topk/folder"], "does not exist"),
        (["--losses", "ce", "--data-dir", ".", "--dataset", ""], "of image folder in '.': . has no"),
        (["--losses", "ce", "--test-split", "tset"], "of topk/hierarchy: split must be one of"),
        (["--losses", "ce", "--output", "/no/such/place/x.json"], "there is no folder"),
        (["--losses", "ce", "--output", "."], "--output . is a folder"),
    ],
)
def test_what_cannot_be_compared_is_a_line_before_anything_is_trained(tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    own_data = [flag for flag in SMALL if not flag.startswith(("size", "super", "fine", "eval_size"))]
    own_data = own_data[:2] + own_data[3:] if "topk/folder" in flags else SMALL
    try:
        status = main(["compare", *own_data, *flags])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert words in (error := capsys.readouterr().err)
    assert "topk/parts" not in error  # but the user's data set
    assert not list(tmp_path.iterdir())


def test_an_interrupted_comparison_says_how_to_continue(tmp_path, capsys, monkeypatch):
    def interrupted(flags):
        if flags["lr"] > 0.01:
            raise KeyboardInterrupt
        return {"top3": 1.0}

    monkeypatch.setattr(runner.Runs.__init__, "__defaults__", (interrupted, print, 1, ""))
    command = ["compare", "--losses", "ce", "--rates", "0.001", "0.1", "--trials", "2", *SMALL]
    assert main([*command, "--output", str(tmp_path / "out.json")]) == 130
    printed = capsys.readouterr().err
    assert "1 runs are kept" in printed
    assert "topk-registry study compare --losses ce" in printed


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """The layout of CIFAR-100 with 10 training and 2 test images per class; torchvision checks its digests."""
    place = tmp_path / "cifar-100-python"
    place.mkdir()
    rng = np.random.default_rng(0)
    for name, count in (("train", 10), ("test", 2)):
        labels = np.arange(100).repeat(count).tolist()
        images = rng.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
        (place / name).write_bytes(pickle.dumps({"data": images, "fine_labels": labels}))
    (place / "meta").write_bytes(pickle.dumps({"fine_label_names": CLASSES}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    return tmp_path


def test_cifar_100_is_as_published():
    """Against the coarse label of each fine label as the data set's own files have it."""
    coarse = [4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7]
    coarse += [6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10]
    coarse += [16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16]
    coarse += [12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13]
    assert coarse == SUPERCLASSES
    assert list(FAMILIES) == sorted(FAMILIES)
    assert (CLASSES[0], CLASSES[-1]) == ("apple", "worm")


def test_cifar100_with_noise_within_superclasses(cifar, monkeypatch, capsys):
    path = cifar / "out.json"
    seen = []

    def train(flags):
        config = TrainConfig(**flags)
        parts = [
            open_dataset(config.dataset, split, config.data_dir, **config.dataset_opt)
            for split in ("train", config.val_split)
        ]
        seen.append((config.dataset_opt["noise"], *parts))
        return {"top1": 1.0, "top5": float(config.seed)}

    monkeypatch.setattr(runner.Runs.__init__, "__defaults__", (train, print, 1, ""))
    monkeypatch.setattr("topk_studies.command.check", lambda study, runs: None)
    assert main(["cifar100", "--data-dir", str(cifar), "--seeds", "1", "--output", str(path)]) == 0
    assert len(seen) == 6 * 2 * (4 + 1)
    for noise, train_part, evaluated in seen:
        family = np.asarray(train_part.superclasses)
        wrong = train_part.targets != train_part.true_targets
        assert (family[train_part.targets] == family[train_part.true_targets]).all()
        assert wrong.mean() == pytest.approx(0.8 * noise, abs=0.05)  # a fifth is redrawn as itself
        assert len(train_part) == 900
        assert len(evaluated) in (100, 200)
        assert (evaluated.targets == evaluated.true_targets).all()
    assert [row["condition"] for row in json.loads(path.read_text())["rows"]][::2] == [
        f"label noise {p}" for p in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    assert "label noise 0.4" in capsys.readouterr().out


def test_cifar100_needs_its_folder_and_sets_the_rates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for flags, words in (([], "--data-dir DIR"), (["--lr", "0.1"], "sets --lr")):
        with pytest.raises(SystemExit):
            main(["cifar100", *flags])
        assert words in capsys.readouterr().err
    assert main(["cifar100", "--data-dir", "."]) == 2
    assert "of torch/cifar100 in '.': Dataset not found" in capsys.readouterr().err


@pytest.mark.slow
def test_cifar100_trains(cifar, monkeypatch):
    study = replace(STUDIES["cifar100"], conditions={"label noise 0.4": {"noise": 0.4}}, trials=1)
    monkeypatch.setitem(STUDIES, "cifar100", study)
    path = cifar / "out.json"
    flags = ["--model", "topk_convnet", "--epochs", "1", "--img-size", "32", "--workers", "0", "--batch-size", "300"]
    flags += ["--device", "cpu", "--warmup-epochs", "0", "--seeds", "1", "--output", str(path)]
    assert main(["cifar100", "--data-dir", str(cifar), *flags]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["loss"] for row in rows] == ["ce", "smooth_topk_svm(tau=1.0)"]
    assert all(0 < row["top5"]["mean"] < 100 for row in rows)
