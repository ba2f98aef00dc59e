"""``timm validate``: a checkpoint of a run gives the run's own metrics again."""

import csv
import json

import pytest
import timm
import torch
from PIL import Image

from topk_registry.cli.main import main
from topk_registry.train.config.validate_flags import create_parser
from topk_registry.train.validate import config_of

from .conftest import TINY, unclosed_files

# those of timm 1.0.31's validate.py
TIMM_FLAGS = [
    "--data-dir",
    "--dataset",
    "--split",
    "--num-samples",
    "--dataset-download",
    "--class-map",
    "--input-key",
    "--input-img-mode",
    "--target-key",
    "--dataset-trust-remote-code",
    "--model",
    "-m",
    "--pretrained",
    "-j",
    "--workers",
    "-b",
    "--batch-size",
    "--img-size",
    "--in-chans",
    "--input-size",
    "--use-train-size",
    "--crop-pct",
    "--crop-mode",
    "--crop-border-pixels",
    "--mean",
    "--std",
    "--interpolation",
    "--num-classes",
    "--gp",
    "--log-freq",
    "--checkpoint",
    "--num-gpu",
    "--test-pool",
    "--no-prefetcher",
    "--pin-mem",
    "--channels-last",
    "--device",
    "--amp",
    "--amp-dtype",
    "--model-dtype",
    "--tf-preprocessing",
    "--use-ema",
    "--fuser",
    "--fast-norm",
    "--reparam",
    "--model-kwargs",
    "--torchcompile-mode",
    "--torchscript",
    "--torchcompile",
    "--aot-autograd",
    "--results-file",
    "--results-format",
    "--real-labels",
    "--valid-labels",
    "--retry",
    "--seed",
    "--metrics-avg",
    "--naflex-loader",
    "--naflex-max-seq-len",
]

CPU = ("--device", "cpu", "-j", "0", "-b", "32")


@pytest.fixture
def validate(capsys):
    def run(*argv):
        capsys.readouterr()
        status = main(["validate", *map(str, argv), *CPU])
        printed = capsys.readouterr()
        return status, json.loads(printed.out.partition("--result\n")[2] or "null"), printed.err

    return run


def assert_agrees(results, row):
    for name, value in row.items():
        if name.startswith("eval_"):
            assert results[name.removeprefix("eval_")] == pytest.approx(value, abs=1e-4), name


@pytest.mark.parametrize(
    "flags",
    [
        ["--loss", "smooth_topk_svm"],
        ["--val-split", "0.25", "--long-tail", "exp", "--imbalance-factor", "8", "--eval-metric", "few-top1"],
        ["--normalize-classifier", "20", "--learn-scale"],
    ],
    ids=["plain", "held out, long tail", "cosine classifier"],
)
def test_a_checkpoint_tells_all_there_is_to_know(train, validate, flags):
    run = train(*flags)
    status, results, err = validate("--checkpoint", run.folder / "last.pth.tar")
    assert status == 0, err
    assert_agrees(results, run.summary[-1])
    assert results["model"] == "topk_convnet"
    assert results["top1_err"] == pytest.approx(100 - results["top1"], abs=1e-3)


def test_a_default_that_has_changed_since_is_the_runs(train, register):
    class Tempered(torch.nn.Module):
        def __init__(self, tau=2.0):
            super().__init__()
            self.tau = tau

        def forward(self, logits, target):
            return torch.nn.functional.cross_entropy(logits / self.tau, target)

    def options(*argv):
        return config_of(create_parser().parse_args(["--checkpoint", str(checkpoint), *argv])).loss_opt

    register("tempered", Tempered)
    checkpoint = train("--loss", "tempered", "--epochs", "1").folder / "last.pth.tar"
    assert options() == {}
    Tempered.__init__.__defaults__ = (0.25,)
    assert options() == {"tau": 2.0}
    assert options("--loss-opt", "tau=0.5") == {"tau": 0.5}
    assert options("--loss", "ce") == {}


def test_the_moving_average_is_asked_for(train, validate):
    run = train("--model-ema", "--model-ema-decay", "0.5")
    _, averaged, _ = validate("--checkpoint", run.folder / "last.pth.tar", "--use-ema")
    _, plain, _ = validate("--checkpoint", run.folder / "last.pth.tar")
    assert_agrees(averaged, run.summary[-1])
    assert plain["nll"] != averaged["nll"]


def test_other_sizes_other_data_and_crops(train, validate):
    run = train("--loss", "topk_nll", "--loss-opt", "k=3", "--epochs", "4")
    checkpoint = ("--checkpoint", run.folder / "last.pth.tar")
    _, results, _ = validate(*checkpoint, "--topk", "2", "3")
    assert results["top1"] <= results["top2"] <= results["top3"] <= results["top5"]
    _, trained, _ = validate(*checkpoint, "--split", "train")
    assert trained["nll"] < results["nll"]
    status, crops, err = validate(*checkpoint, "--multi-crop", "10")
    assert status == 0, err
    assert crops["top1"] > 100 / 12
    assert crops["top5"] != results["top5"] or crops["nll"] != results["nll"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--torchcompile", "eager", "--torchcompile-mode", "default"],
        ["--torchscript"],
        ["--reparam", "--test-pool", "--log-freq", "1", "--retry"],
        ["--crop-mode", "squash", "--crop-border-pixels", "0", "--aot-autograd"],
    ],
    ids=" ".join,
)
@pytest.mark.filterwarnings(*(f"ignore::{kind}:torch.jit.*" for kind in ("UserWarning", "FutureWarning")))
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:The TorchScript type system:UserWarning")
def test_timms_ways_to_run_a_model_give_the_same_metrics(train, validate, flags):
    run = train("--epochs", "1")
    status, results, err = validate("--checkpoint", run.folder / "last.pth.tar", *flags)
    assert status == 0, err
    assert_agrees(results, run.summary[-1])


@unclosed_files
def test_labels_of_another_file(image_folder, tmp_path, validate):
    """Real labels replace top-1 and top-5; valid labels keep some of the scores, which labels then count."""
    root = tmp_path / "validation"
    for i in range(6):
        target = root / f"class{i % 2}" / f"ILSVRC2012_val_{i + 1:08d}.JPEG"
        target.parent.mkdir(parents=True, exist_ok=True)
        source = image_folder / "validation" / f"class{i % 4}" / "0.png"
        Image.open(source).save(target, format="PNG")
    (tmp_path / "real.json").write_text(json.dumps([list(range(5)), [], *[[5, 6, 7, 8, 9]] * 4]))
    (tmp_path / "valid.txt").write_text("7\n3\n")
    model = ["--model", "topk_convnet", "--model-kwargs", "width=4", "--num-classes", "10", "--data-dir", root]
    torch.manual_seed(0)
    timm.create_model("topk_convnet", width=4, num_classes=10)
    state = timm.create_model("topk_convnet", width=4, num_classes=10).state_dict()
    state = {name: torch.zeros_like(value) for name, value in state.items()}
    state["fc.bias"] = torch.arange(10).float()  # the scores of every image: 9 is the best, then 8, 7, 6, 5
    torch.save(state, tmp_path / "model.pth")
    model += ["--checkpoint", tmp_path / "model.pth"]
    status, results, err = validate(*model, "--real-labels", tmp_path / "real.json", "--metrics-avg", "macro")
    assert status == 0, err
    assert (results["top1"], results["top5"]) == (80.0, 80.0)  # five images have labels, the first none of 5 to 9
    assert results["macro_recall"] == 0
    status, results, err = validate(*model, "--valid-labels", tmp_path / "valid.txt")
    assert status == 0, err
    assert results["top1"] == 50.0  # of classes 7 and 3, the first is always the best: three of six images
    assert "--real-labels" in validate(*model, "--real-labels", tmp_path / "none.json")[2]


@unclosed_files
def test_batches_of_patches(image_folder, tmp_path, validate):
    sizes = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    model = timm.create_model("naflexvit_base_patch16_gap", num_classes=8, **sizes)
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = -torch.arange(8.0)  # class 0 is the best of every image, which six of 24 are
    torch.save(model.state_dict(), tmp_path / "model.pth")
    (tmp_path / "classes.txt").write_text("class0\nclass1\nclass2\nclass3\n")
    flags = ["--model", "naflexvit_base_patch16_gap", "--num-classes", "8", "--checkpoint", tmp_path / "model.pth"]
    flags += ["--model-kwargs", *(f"{name}={value}" for name, value in sizes.items()), "--data-dir", image_folder]
    status, results, err = validate(*flags, "--naflex-loader", "--naflex-max-seq-len", "16")
    assert status == 0, err
    assert (results["top1"], results["top5"]) == (25.0, 100.0)


def test_a_folder_of_checkpoints_is_a_list_best_first(train, validate):
    run = train("--epochs", "2")
    status, results, err = validate("--checkpoint", run.folder)
    assert status == 0, err
    assert len(results) == 4  # two epochs, the best, the last
    assert [each["top1"] for each in results] == sorted((each["top1"] for each in results), reverse=True)


def test_running_out_of_memory_tries_a_smaller_batch(monkeypatch):
    from argparse import Namespace

    from topk_registry.train import validate as module

    asked = []

    def full(args):
        asked.append(args.batch_size)
        if args.batch_size > 30:
            raise RuntimeError("CUDA out of memory")
        return {"top1": 1.0}

    monkeypatch.setattr(module, "validate", full)
    assert module.retrying(Namespace(batch_size=64)) == {"top1": 1.0}
    assert asked == [64, 48, 32, 24]


def test_timms_flags_are_all_there():
    flags = {option for action in create_parser()._actions for option in action.option_strings}
    assert set(TIMM_FLAGS) <= flags


def test_another_loss_than_the_checkpoints_does_not_get_its_options(train, validate):
    run = train("--epochs", "1", "--loss", "topk_nll", "--loss-opt", "k=3", "tau=2.0")
    status, _, err = validate("--checkpoint", run.folder / "last.pth.tar", "--loss", "ldam")
    assert status == 0
    assert "timm validate: --loss ldam in the place of 'topk_nll', whose options are left out: k=3 tau=2.0\n" in err
    assert "ranked by their scores alone" not in err  # as where a loss cannot be built


@pytest.mark.parametrize("form", ["csv", "json"])
def test_results_file(train, validate, tmp_path, form):
    run = train("--epochs", "1")
    path = tmp_path / "results"
    _, results, _ = validate(
        "--checkpoint", run.folder / "last.pth.tar", "--results-file", path, "--results-format", form
    )
    written = json.loads(path.read_text()) if form == "json" else next(csv.DictReader(path.read_text().splitlines()))
    assert float(written["top1"]) == results["top1"]


def test_a_missing_plug_in_is_said_and_scores_rank(train, register, validate):
    import torch

    register("gone", torch.nn.CrossEntropyLoss)
    run = train("--loss", "gone", "--epochs", "1")
    from topk_registry import registry

    registry.losses.unregister("gone")
    status, results, err = validate("--checkpoint", run.folder / "last.pth.tar")
    registry.register_loss("gone")(torch.nn.CrossEntropyLoss)
    assert status == 0
    assert "ranked by their scores alone" in err
    assert_agrees(results, run.summary[-1])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--checkpoint", "/no/such.pth.tar"], "there is no checkpoint"),
        (["--model", "topk_convnet"], "name the data"),
        (["--model", "topk_convnet", "--data-dir", "/no/such/place"], "does not exist"),
    ],
)
def test_what_cannot_be_validated_says_why(validate, argv, message):
    status, _, err = validate(*argv)
    assert status == 2
    assert message in err


def test_a_checkpoint_of_another_model_is_refused(train, validate):
    run = train("--epochs", "1")
    status, _, err = validate("--checkpoint", run.folder / "last.pth.tar", "--model-kwargs", "width=6")
    assert status == 2
    assert "cannot load" in err


@pytest.mark.parametrize("score", ["raps", "log-odds"])
def test_prediction_sets(train, validate, score):
    options = () if score == "raps" else ("--sets-opt", "k=3")
    run = train("--epochs", "1")
    data = ("--dataset-opt", "superclasses=4", "fine=3", "pixel_noise=1.0", "eval_size=400")
    checkpoint = ("--checkpoint", run.folder / "last.pth.tar", *data)
    status, results, err = validate(*checkpoint, "--sets", score, "--alpha", "0.2", *options)
    assert status == 0, err
    # calibrated and measured on about 180 each: five standard deviations of the difference are 0.2
    assert 60 < results["set_coverage"] <= 100
    assert results["set_coverage_low"] <= results["set_coverage"] <= results["set_coverage_high"]
    assert 1 <= results["set_mean_size"] <= 12
    assert ("set_penalty" in results) == (score == "raps")
    _, plain, _ = validate(*checkpoint)
    assert plain["top1"] == results["top1"]
    assert not [name for name in plain if name.startswith("set_")]


@unclosed_files
def test_sets_along_a_tree_and_by_group(image_folder, train, validate, tmp_path):
    run = train("--epochs", "1", "--data-dir", image_folder, "--img-size", "24", tiny=TINY[7:])
    assert run.status == 0, run.err
    checkpoint = ("--checkpoint", run.folder / "last.pth.tar")
    tree, table = tmp_path / "tree.csv", tmp_path / "groups.csv"
    tree.write_text('genus,species\n"a, ""b""",class0\n"a, ""b""",class1\nc,class2\nc,class3\n')
    images = sorted((image_folder / "validation").rglob("*.png"))
    names = [path.relative_to(image_folder / "validation") for path in images]
    lines = [f"{name},{'ü & 1' if i % 3 else 'rare'}" for i, name in enumerate(names)]
    table.write_text("\n".join(["image,time of day", *lines]) + "\n", encoding="utf-8")
    report = tmp_path / "out.csv"
    flags = ("--tree", tree, "--max-nodes", "2", "--alpha", "0.2", "--groups", table, "--group-column", "time of day")
    status, results, err = validate(*checkpoint, *flags, "--results-file", report)
    assert status == 0, err
    assert 1 <= results["set_mean_nodes"] <= results["set_nodes"] == 2
    groups = results["set_by_group"]
    assert [row["group"] for row in groups] == ["rare", "ü & 1"]
    assert sum(row["calibration_samples"] + row["samples"] for row in groups) == 24
    assert sum(row["samples"] for row in results["set_by_size"]) == 12
    with report.open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["set_mean_nodes"]) == results["set_mean_nodes"]
    assert "set_by_group" not in row
    status, results, err = validate(*checkpoint, *flags, "--alpha", "0.1")  # 24 images are few for two groups
    assert status == 0, err
    for each in results["set_by_group"]:
        if each["missing"]:
            assert f"group {each['group']} has {each['calibration_samples']} calibration samples, " in err
    assert "so its sets hold all classes" in err
    for wrong, message in (
        (("--sets", "tree"), "score tree needs the tree of the classes: pass --tree FILE"),
        (("--sets", "lac", "--tree", tree), "--tree is of score tree, got --sets lac"),
        (("--sets", "lac", "--max-nodes", "2"), "--max-nodes is of score tree, got --sets lac"),
        (("--groups", table), "name their score by --sets"),
        (("--sets", "lac", "--groups", table), "expected a column 'group', got image, time of day"),
        (("--sets", "lac", "--group-column", "x"), "--group-column is a column of --groups FILE, which is not given"),
        (("--sets", "lac", "--groups", tmp_path / "none.csv"), "none.csv"),
        (("--tree", tmp_path / "none.csv"), "none.csv"),
        (("--tree", table), "--tree: "),
    ):
        status, _, err = validate(*checkpoint, *wrong)
        assert (status, message in err) == (2, True), err
    table.write_text("\n".join(["image,group", *lines[:-2]]), encoding="utf-8")
    status, _, err = validate(*checkpoint, "--sets", "lac", "--groups", table)
    assert status == 2
    assert "2 of 24 images have no row: class3/4.png, class3/5.png" in err


def test_groups_of_a_data_set_are_in_its_order(train, validate, tmp_path):
    run = train("--epochs", "1")
    options = ("--dataset-opt", "superclasses=4", "fine=3", "eval_size=60")
    checkpoint = ("--checkpoint", run.folder / "last.pth.tar", *options)
    table = tmp_path / "groups.csv"
    table.write_text("group\n" + "".join(f"{'ab'[i % 2]}\n" for i in range(60)))
    status, results, err = validate(*checkpoint, "--sets", "lac", "--alpha", "0.2", "--groups", table)
    assert status == 0, err
    assert [row["group"] for row in results["set_by_group"]] == ["a", "b"]
    table.write_text("group\na\n")
    status, _, err = validate(*checkpoint, "--sets", "lac", "--groups", table)
    assert status == 2
    assert "expected a row for each of 60 samples, got 1" in err


def test_sets_that_cannot_be_say_why(train, validate):
    run = train("--epochs", "1")
    checkpoint = ("--checkpoint", run.folder / "last.pth.tar")
    for flags, message in (
        (("--sets", "rasp"), "no score is called 'rasp'"),
        (("--sets", "lac", "--alpha", "0.0001"), "too few for alpha = 0.0001: it takes 9999"),
    ):
        status, _, err = validate(*checkpoint, *flags)
        assert status == 2
        assert message in err
