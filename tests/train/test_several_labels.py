"""``timm train --task multilabel``: targets, losses, metrics, checkpoints; short runs on tiny data."""

import re

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score
from timm.loss import compute_class_weights

from topk_registry.cli.main import main
from topk_registry.data.labels import k_hot_of
from topk_registry.registry import timm_losses
from topk_registry.testing import check_dataset
from topk_registry.train import TrainConfig, Trainer
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.errors import ConfigError, TrainError
from topk_registry.train.setup.datasets import open_split
from topk_registry.train.validate import create_parser, validate

from .conftest import stops_at
from .ranked import assert_same

TINY = (
    *("--task", "multilabel", "--dataset", "topk/several", "--dataset-opt", "size=96", "things=6", "pixel_noise=1.0"),
    *("--model", "topk_convnet", "--model-kwargs", "width=4", "-b", "16", "-j", "0", "--no-aug", "--device", "cpu"),
    *("--epochs", "2", "--opt", "adamw", "--lr", "0.01", "--warmup-epochs", "0"),
)
METRICS = ("map", "micro_f1", "macro_f1", "sample_f1", "exact_match", "top1_recall", "top5_recall", "bce")


@pytest.fixture
def several(train):
    """``several("--loss", ...)``: a tiny run of several labels."""
    return lambda *argv, **options: train(*argv, tiny=TINY, **options)


def config_of(*argv):
    return parse_args([*TINY, *map(str, argv)])


def test_a_run_records_its_task_and_measures_every_metric(several):
    run = several()
    assert run.status == 0, run.err
    assert set(run.summary[-1]) == {"epoch", "train_loss", "lr", *(f"eval_{name}" for name in METRICS)}
    args = yaml.safe_load((run.folder / "args.yaml").read_text())
    assert (args["task"], args["loss"], args["eval_metric"], args["smoothing"]) == ("multilabel", "bce", "map", 0.0)
    saved = run.checkpoint()
    assert saved["args"].task == "multilabel"
    assert saved["args"].num_classes == 6
    assert (run.folder / "classes.txt").read_text().split("\n")[:2] == ["thing 00", "thing 01"]
    assert "labels an image" in run.out
    assert "mAP" in run.out


def test_numbers_are_those_of_scikit_learn_on_the_models_scores(tmp_path):
    trainer = Trainer(config_of("--output", tmp_path, "--multilabel-threshold", 0.3), quiet=True)
    result = trainer.fit()
    data = trainer.run.data.validation
    loader = trainer.run.evaluator.loader
    with torch.inference_mode():
        scores = torch.cat([result.model(images) for images, _ in loader])
    truth, claimed = k_hot_of(data), (scores.sigmoid() >= 0.3).numpy()
    row = result.history[-1]
    wanted = average_precision_score(truth, scores.numpy(), average="macro")
    assert row["eval_map"] == pytest.approx(100 * wanted)
    for name, average in (("micro_f1", "micro"), ("macro_f1", "macro"), ("sample_f1", "samples")):
        assert row[f"eval_{name}"] == pytest.approx(100 * f1_score(truth, claimed, average=average, zero_division=0))


@pytest.mark.parametrize("loss", sorted({*timm_losses.TAKE_K_HOT, "ksubset_nll"}))
def test_every_loss_of_k_hot_targets_trains(several, loss):
    run = several("--loss", loss, "--epochs", 1)
    assert run.status == 0, run.err
    assert np.isfinite(run.summary[-1]["train_loss"])


def test_the_task_is_learned(several):
    run = several("--epochs", 8, "--dataset-opt", "size=512", "things=4", "--model-kwargs", "width=8", "--lr", "0.005")
    assert run.summary[-1]["eval_map"] > run.summary[0]["eval_map"] + 10
    best = max(range(8), key=lambda i: run.summary[i]["eval_map"])
    assert run.checkpoint("model_best.pth.tar")["epoch"] == best


NO_DATA = TINY[:2] + TINY[8:]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Images with a red, a green and a blue part where they have that label, and two CSV files."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    rows, flags = ["image,labels,split"], ["image,red,green,blue"]
    for i in range(60):
        pixels, has = rng.integers(0, 60, (24, 24, 3)), rng.random(3) < 0.5
        for c in np.flatnonzero(has):
            pixels[:, 8 * c : 8 * c + 8, c] += 180
        name = f"images/{i}.png"
        (root / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(root / name)
        labels = ";".join(np.array(["red", "green", "blue"])[has])
        rows.append(f"{name},{labels},{'train' if i < 40 else 'val'}")
        flags.append(f"{name},{','.join(map(str, has.astype(int)))}")
    (root / "labels.csv").write_text("\n".join(rows))
    (root / "flags.csv").write_text("\n".join(flags))
    return root


def test_targets_from_a_file_with_splits(several, train, pictures):
    csv = ("--labels-csv", pictures / "labels.csv", "--img-size", 24)
    run = train(*csv, "--epochs", 6, tiny=NO_DATA)
    assert run.status == 0, run.err
    assert "40 to train, 20 to evaluate, 3 classes" in run.out
    assert "names in column 'labels' with ';' between them" in run.out
    assert (run.folder / "classes.txt").read_text().split() == ["blue", "green", "red"]
    assert run.summary[-1]["eval_map"] > 80
    args = yaml.safe_load((run.folder / "args.yaml").read_text())
    assert set(args["label_files"]) == {"train", "validation"}
    assert run.summary[-1]["eval_map"] == pytest.approx(validated(run)["map"], abs=1e-3)


def test_a_part_is_held_out_at_random(pictures):
    config = parse_args([*NO_DATA, "--labels-csv", f"{pictures}/flags.csv", "--val-split", "0.2"])
    data = Trainer(config, quiet=True).run.data
    assert (len(data.train), len(data.validation), data.class_names) == (48, 12, ["red", "green", "blue"])
    both = [data.train.dataset.filename(i) for part in (data.train, data.validation) for i in part.indices]
    assert len(set(both)) == 60
    np.testing.assert_array_equal(np.stack([np.asarray(target) for _, target in untransformed(data.validation)]),
                                  data.validation.targets)  # fmt: skip
    assert data.counts == data.train.targets.sum(0).tolist()


def untransformed(data):
    data.transform = None
    return [data[i] for i in range(len(data))]


def test_a_file_for_each_split_is_aligned_by_name(pictures, tmp_path):
    rows = [line.rsplit(",", 1)[0] for line in (pictures / "labels.csv").read_text().splitlines()[1:]]
    for split, some in (("train", rows[:40]), ("validation", rows[40:])):
        kept = [row for row in some if split == "train" or "blue" not in row]  # evaluation lacks the first class
        (tmp_path / f"{split}.csv").write_text("\n".join(["image,labels", *kept]))
    flags = ("--data-dir", pictures, "--labels-csv", tmp_path / "{split}.csv")
    data = Trainer(parse_args([*NO_DATA, *map(str, flags)]), quiet=True).run.data
    assert data.class_names == ["blue", "green", "red"]
    assert data.validation.classes == data.class_names
    assert data.validation.targets.shape[1] == 3
    assert data.validation.targets[:, 0].sum() == 0
    assert any("no evaluation images of 1 class: blue" in note for note in data.notes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--labels-csv", "{root}/flags.csv"), "has no column `split`"),
        (("--labels-csv", "{root}/none.csv"), "there is no file"),
        (("--labels-csv", "{root}/empty.csv"), "expected a line of column names and a row for each image, got 0 rows"),
        (("--labels-csv", "{root}/latin.csv"), "is not in UTF-8"),
        (("--data-dir", "{root}"), "names one label an image; --labels-csv FILE"),
        (("--labels-csv", "{root}/flags.csv", "--data-dir", "{root}/images", "--val-split", "0.2"), "60 of 60 images"),
    ],
    ids=["no split", "no file", "empty", "encoding", "folder", "missing"],
)
def test_files_that_do_not_serve_are_refused(train, pictures, flags, message):
    (pictures / "empty.csv").write_text("")
    (pictures / "latin.csv").write_bytes("image,labels\n1.png,für\n".encode("latin-1"))
    run = train(*(flag.format(root=pictures) for flag in flags), tiny=NO_DATA)
    assert run.status == 2
    assert message in run.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--label-noise", "0.1"), "--label-noise is for one label an image"),
        (("--long-tail", "exp"), "--long-tail is for one label"),
        (("--label-file", "x.pt"), "--label-file is for one label"),
        (("--subset", "0.5"), "--subset is for one label"),
        (("--exclude", "x.csv"), "leave the rows out of the file of labels"),
        (("--multi-crop", "5"), "--multi-crop is for one label"),
        (("--class-parallel",), "--class-parallel is for one label"),
        (("--sampler", "class_balanced"), "draws images by their one label"),
        (("--retrain-head", "x.pth"), "which --retrain-head brings"),
        (("--multilabel-threshold", "1"), r"must be in \(0, 1\)"),
        (("--labels-csv", "x.csv"), "leave one out"),
        (("--task", "classification", "--target-format", "multihot"), "--target-format multihot is for several labels"),
    ],
    ids=str,
)
def test_flags_of_one_label_are_refused_with_a_reason(flags, message, capsys):
    with pytest.raises(SystemExit):
        config_of(*flags)
    assert re.search(message, capsys.readouterr().err)


def test_losses_of_one_label_are_refused_with_a_list(several, register):
    run = several("--loss", "smooth_topk_svm")
    assert run.status == 2
    assert "does not say that it takes k-hot targets" in run.err
    for name in ("asl", "bce", "db", "ksubset_nll", "poly", "twoway", "zlpr"):
        assert name in run.err
    register("mine", lambda: torch.nn.functional.binary_cross_entropy_with_logits)
    assert several("--loss", "mine").status == 2


def test_a_loss_of_ones_own_says_that_it_takes_them(several, register):
    class Mine(torch.nn.Module):
        takes_k_hot = True

        def forward(self, logits, target):
            return torch.nn.functional.binary_cross_entropy_with_logits(logits, target)

    register("mine", Mine)
    run = several("--loss", "mine", name="mine")
    assert run.status == 0, run.err
    assert run.summary == several(name="bce").summary


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dataset", "topk/hierarchy", "--dataset-opt", "size=96", "--eval-metric", "map"), "one label an image"),
        (("--task", "classification", "--eval-metric", "top1"), "--task multilabel trains on them"),
        (("--eval-metric", "top1"), "with --task multilabel --eval-metric must be map"),
    ],
    ids=["one label", "several", "metric"],
)
def test_data_and_metrics_of_the_other_task_are_refused(train, flags, message):
    tiny = [flag for flag in TINY if flag not in ("things=6", "pixel_noise=1.0")]
    run = train(*flags, tiny=tiny)
    assert run.status == 2
    assert message in run.err


def test_mixup_and_smoothing_are_timms(several):
    mixed = ("--mixup", 0.4, "--cutmix", 1.0, "--smoothing", 0.1)
    for more in ((), ("--no-prefetcher",)):
        run = several(*mixed, *more, "--overwrite")
        assert run.status == 0, run.err
    trainer = Trainer(config_of(*mixed), quiet=True)
    _, target = next(iter(trainer.run.loader.pass_of(0)))
    assert target.shape == (16, 6)
    assert 0.05 <= target.min() < 0.051  # each label moves towards 0.5
    assert several("--loss", "ksubset_nll", *mixed, "--overwrite").status == 0
    refused = several("--loss", "zlpr", *mixed, "--overwrite")
    assert refused.status == 2
    assert "requires binary targets" in refused.err


@pytest.mark.parametrize("loss", ["bce", "asl"])
def test_weights_are_timms_over_samples(loss):

    run = Trainer(
        config_of("--loss", loss, "--class-weight", "inv_freq", "--loss-pos-weight", "neg_pos"), quiet=True
    ).run
    counts = k_hot_of(run.data.train).sum(0)
    for method in ("inv_freq", "neg_pos"):
        kind, wanted = compute_class_weights(torch.tensor(counts), len(run.data.train), method=method)
        own = getattr(run.task.criterion, "weight" if kind == "class_weight" else kind)
        assert own.tolist() == pytest.approx(wanted.tolist())
        assert run.task.loss[kind] == pytest.approx(wanted.tolist())


def test_weights_of_ksubset_are_of_its_labels_and_others_are_refused(several):
    assert several("--loss", "ksubset_nll", "--class-weight", "1,1,1,1,2,2").status == 0
    refused = several("--loss", "poly", "--class-weight", "inv_freq", "--overwrite")
    assert refused.status == 2
    assert "takes no class weights" in refused.err


def validated(run, *flags):
    path = str(run.folder / "last.pth.tar")
    return validate(create_parser().parse_args(["--checkpoint", path, "--device", "cpu", "-j", "0", *flags]))


def test_validate_measures_what_training_measured(several, capsys):
    run = several("--multilabel-threshold", 0.3)
    found = validated(run)
    for name in METRICS:
        assert found[name] == pytest.approx(run.summary[-1][f"eval_{name}"], abs=1e-3), name
    assert "top1_err" not in found
    assert validated(run, "--multilabel-threshold", "0.9")["sample_f1"] != found["sample_f1"]
    for flag in (("--metrics-avg", "macro"), ("--report", "x.html")):
        with pytest.raises(TrainError, match=f"{flag[0]} measures one label"):
            validated(run, *flag)


@pytest.mark.parametrize("command", ["compare", "report", "labels"])
def test_commands_of_one_label_refuse_the_checkpoint(several, command, capsys):
    run = several("--epochs", 1)
    files = [str(run.folder / "last.pth.tar")] * (2 if command == "compare" else 1)
    if command == "compare":
        files[1] = str(run.folder / "model_best.pth.tar")
    assert main([command, *files, "--no-cache"]) != 0
    assert "is of --task multilabel" in capsys.readouterr().err


def test_a_stopped_run_goes_on_bit_for_bit(several, train, monkeypatch):
    flags = ("--model-ema", "--model-ema-decay", 0.7, "--mixup", 0.2, "--loss", "asl", "--clip-grad", 0.5)
    whole = several(*flags, name="whole")
    with monkeypatch.context() as patch:
        stops_at(patch, 3)
        stopped = several(*flags, name="stopped")
    assert stopped.status != 0
    again = several(*flags, "--resume", stopped.folder / "last.pth.tar", name="stopped")
    assert again.status == 0, again.err
    assert again.summary == whole.summary
    for key in ("state_dict", "state_dict_ema"):
        assert_same(again.checkpoint()[key], whole.checkpoint()[key])


def test_a_caller_may_bring_loaders():
    config = config_of("--output", "")
    data = [open_split(config, split, training=False) for split in ("train", "validation")]
    from torchvision.transforms import ToTensor

    for each in data:
        each.transform = ToTensor()
    loaders = [torch.utils.data.DataLoader(each, batch_size=16) for each in data]
    trainer = Trainer(config, train_loader=loaders[0], eval_loader=loaders[1], quiet=True)
    assert trainer.run.data.counts == k_hot_of(data[0]).sum(0).tolist()
    assert trainer.run.config.num_classes == 6


def test_loaders_of_one_label_are_refused():
    data = torch.utils.data.TensorDataset(torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64))
    data.targets = [0] * 4
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    with pytest.raises(ValueError, match=r"needs targets \[N, n\]"):
        Trainer(config_of(), train_loader=loader, quiet=True).run  # noqa: B018


def test_the_folder_of_a_file_is_the_data():
    assert TrainConfig(task="multilabel", labels_csv="photos/{split}/labels.csv").data_dir == "photos"
    assert TrainConfig(task="multilabel", labels_csv="labels.csv").data_dir == "."


def test_the_plan_of_a_dry_run(several):
    run = several("--dry-run")
    assert run.status == 0
    assert "k-hot targets [16, 6]" in run.out


def test_defaults_of_the_task():
    config = TrainConfig(task="multilabel")
    assert (config.dataset, config.loss, config.smoothing, config.eval_metric) == ("topk/several", "bce", 0.0, "map")
    assert TrainConfig().task == "classification"
    assert TrainConfig.from_dict({"task": "multilabel", "smoothing": 0.1, "loss": "asl"}).smoothing == 0.1
    with pytest.raises(ConfigError, match="--task must be one of classification, multilabel"):
        TrainConfig(task="several")


def test_the_kit_checks_the_built_in_data_set():
    check_dataset("several", options={"size": 100, "things": 8}, samples=16)
