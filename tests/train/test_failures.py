"""Every failure ends in a message, an exit status, and nothing lost."""

import errno
import os
import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from timm.utils import CheckpointSaver

from topk_registry.train.report import console as report

from .conftest import TINY, unclosed_files

FOLDER = (
    *("--model", "topk_convnet", "--model-kwargs", "width=4", "--num-classes", "4", "-b", "8", "-j", "0", "--no-aug"),
    *("--device", "cpu", "--epochs", "3", "--opt", "adamw", "--warmup-epochs", "0"),
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "smooth_topk_svm", "--loss-opt", "k=0"], "k must be an integer of at least 1"),
        (["--loss", "smooth_topk_svm", "--loss-opt", "tua=1"], "did you mean 'tau'"),
        (["--loss", "smooth_topk_svm", "--loss-opt", "k=12"], "k must be below the number of classes"),
        (["--loss", "smooth_topk_svm", "--loss-opt", "reduction=none"], "expected one floating-point number"),
        (["--model", "resnet5000"], "timm has no model 'resnet5000'; did you mean resnet50"),
        (["--opt", "gradient_ascent"], "timm has no optimizer 'gradient_ascent'"),
        (["--opt", "adamww"], "timm has no optimizer 'adamww'; did you mean adamw"),
        (["--eval-metric", "top_five"], "--eval-metric must be"),
        (["--eval-metric", "top0"], "--eval-metric must be"),
        (["--label-noise", "1.5"], "--label-noise must be in [0, 1]"),
        (["--subset", "0"], "--subset must be in (0, 1]"),
        (["--val-split", "1.5"], "fractional --val-split must be in (0, 1)"),
        (["--val-split", "0.2", "--val-fold", "5"], "--val-split 0.2 has 5 parts, --val-fold 0 to 4, got 5"),
        (["--val-fold", "1"], "--val-fold needs a fractional --val-split"),
        (["--long-tail", "exp", "--imbalance-factor", "0.5"], "--imbalance-factor must be at least 1"),
        (["--dataset", "", "--data-dir", "/no/such/place"], "'/no/such/place' does not exist"),
        (["--dataset", "wds/x", "--data-dir", "/no/such/place", "--subset", "0.5"], "is a stream"),
        (["--num-classes", "5"], "the data has label 11, expected labels in [0, 4]"),
        (["--eval-metric", "many-top5"], "no class is many-shot"),
        (["--opt-kwargs", "no_such=1"], "cannot create optimizer 'adamw'"),
        (["--sched", "plateau", "--sched-on-updates"], "cannot create schedule 'plateau'"),
        (["--dataset-opt", "szie=3"], "did you mean 'size'"),
        (["--device", "gpu"], "--device gpu: torch knows no such device"),
        (["--device", "cuda:99"], "--device cuda:99: there are"),
        (["--torchcompile", "inductr"], "--torchcompile inductr: torch has no such backend; there are"),
        (["--eval-metric", "top12"], "--eval-metric top12: the label is always among so many of 12 classes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused_before_training(train, flags, message):
    run = train(*flags)
    assert run.status == 2
    assert message in run.err
    assert not run.folder.exists()


@pytest.mark.parametrize("flags", [["--aa", "rnd"], ["--train-crop-mode", "square"]], ids=" ".join)
def test_transforms_that_cannot_be_made_are_told_by_their_flags(train, flags):
    run = train(*flags, tiny=[flag for flag in TINY if flag != "--no-aug"])
    assert run.status == 2
    assert "timm cannot make the transforms of training images from --aa, --train-crop-mode" in run.err
    assert not run.folder.exists()


@pytest.mark.parametrize("flag", ["--naflex-loader", "--kd-model-name=resnet18", "--torchscript"])
def test_modes_of_timms_own_script_say_where_they_are(train, flag, capsys):
    with pytest.raises(SystemExit) as stop:
        train(flag)
    assert stop.value.code == 2
    assert "--train-script" in capsys.readouterr().err


def test_an_unknown_loss_is_refused_without_importing_torch(train):
    run = train("--loss", "smooth_topk_smv")
    assert run.status == 1
    assert "smooth_topk_svm" in run.err


def test_nan_stops_with_the_batch_saved_and_the_weights_unharmed(train, register):
    class Failing(torch.nn.Module):
        calls = 0

        def forward(self, logits, target):
            if len(logits) == 16:
                Failing.calls += 1
            loss = torch.nn.functional.cross_entropy(logits, target)
            return loss * float("nan") if Failing.calls == 9 else loss

    register("failing", Failing)
    run = train("--loss", "failing")
    assert run.status == 1
    assert "the loss of epoch 2, batch 3 of 6 is nan" in run.err
    saved = torch.load(run.folder / "nonfinite-batch-rank0.pth", weights_only=True)
    assert saved["images"].shape == (16, 3, 32, 32)
    assert saved["target"].shape == (16,)
    assert saved["output"].shape == (16, 12)
    assert all(bool(value.isfinite().all()) for value in saved["state_dict"].values())
    assert saved["loss_record"]["name"] == "failing"
    assert run.checkpoint()["epoch"] == 0  # the epoch before is there to go on from


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("file write failed")])
def test_a_full_disk_keeps_the_last_good_checkpoint(train, monkeypatch, error):
    save, saves = torch.save, []

    def full(obj, path, *args, **kwargs):
        saves.append(path)
        if len(saves) == 2:
            save({"half": torch.zeros(3)}, path)  # what a full disk leaves of a file
            raise error
        save(obj, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1 << 20))
    run = train("--epochs", "3")
    assert run.status == 1
    assert str(error) in run.err
    assert "the checkpoint before it is whole" in run.err
    assert "the disk is full, 1 MiB are free" in run.err
    assert f"--resume {run.folder}/last.pth.tar" in run.err
    assert not list(run.folder.glob("tmp*"))
    assert run.checkpoint()["epoch"] == 0
    monkeypatch.undo()
    resumed = train("--epochs", "3", "--resume", "auto")
    assert resumed.status == 0
    assert [row["epoch"] for row in resumed.summary] == [1, 2, 3]


def test_a_report_that_cannot_be_written_stops_the_run(train, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report.os, "replace", full)
    run = train()
    assert run.status == 2  # args.yaml is the first
    assert "No space left on device" in run.err
    assert not list(run.folder.glob("*.tmp"))


@unclosed_files
def test_a_vanished_data_directory_saves_and_says_so(train, image_folder, tmp_path, monkeypatch):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    close = CheckpointSaver.save_checkpoint

    def vanish(self, epoch, metric=None):
        result = close(self, epoch, metric)
        shutil.rmtree(data)
        return result

    monkeypatch.setattr(CheckpointSaver, "save_checkpoint", vanish)
    run = train("--data-dir", data, *FOLDER, tiny=())
    assert run.status == 1
    assert f"the data directory {data} has vanished" in run.err
    assert "--resume" in run.err
    monkeypatch.undo()
    shutil.copytree(image_folder, data)
    resumed = train("--data-dir", data, *FOLDER, "--resume", "auto", tiny=())
    assert resumed.status == 0, resumed.err
    assert [row["epoch"] for row in resumed.summary] == [1, 2, 3]


@unclosed_files
def test_vanished_evaluation_data_is_waited_for(train, image_folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    for path in (data / "validation").rglob("*.png"):
        path.write_bytes(b"this is no image")
    run = train("--data-dir", data, *FOLDER, tiny=())
    assert run.status == 1
    first = data / "validation" / "class0" / "0.png"
    assert f"10 images in a row cannot be read, {first} to " in run.err
    assert "which are all 6 of class 'class0'" in run.err
    assert "in epoch 1, after 6 of 6 batches" in run.err
    shutil.rmtree(data)
    shutil.copytree(image_folder, data)
    resumed = train("--data-dir", data, *FOLDER, "--resume", "auto", tiny=())
    whole = train("--data-dir", data, *FOLDER, tiny=(), name="whole")
    assert resumed.summary == whole.summary


@unclosed_files
def test_a_corrupt_image_is_passed_over_with_a_warning(train, image_folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    path = data / "train" / "class1" / "3.png"
    path.write_bytes(b"this is no image")
    run = train("--data-dir", data, *FOLDER, tiny=())
    assert run.status == 0, run.err
    assert run.err.count(f"cannot read {path}: cannot identify image file") == 1
    line = f"1 training image could not be read, and a neighbour was used instead: {path}"
    assert run.out.count(line) == len(run.summary)
    strict = train("--data-dir", data, *FOLDER, "--strict-data", "-j", "1", tiny=(), name="strict")
    assert strict.status == 1
    assert f"timm train: cannot read {path}: cannot identify image file" in strict.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--val-split", "nope"], "has no split 'nope'; it holds train, validation"),
        (["--train-split", "trian"], "has no split 'trian'"),
        (["--val-split", "test"], "has no split 'test'"),
        (["train"], "has no folders of splits, so evaluation would read the training images"),
        (["--dataset", "torch/cifar10", "--val-split", "nope"], "there are train and test"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_split_that_is_not_there_is_refused(train, image_folder, flags, message):
    root = image_folder / "train" if flags == ["train"] else image_folder
    run = train("--data-dir", root, *FOLDER, *(flag for flag in flags if flag != "train"), tiny=())
    assert run.status == 2
    assert message in run.err


@pytest.mark.slow
def test_one_class_is_refused_before_training(train, image_folder, tmp_path):
    for split in ("train", "validation"):
        one = next(path for path in sorted((image_folder / split).iterdir()) if path.is_dir())
        shutil.copytree(one, tmp_path / "data" / split / one.name)
    run = train("--data-dir", tmp_path / "data", "--model", "topk_convnet", "-j", "0", "--epochs", "1", tiny=())
    assert run.status == 2
    assert "has one class, of which nothing can be learned" in run.err


@unclosed_files
def test_an_image_of_16_bits_is_not_cut_to_white(train, image_folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    path = data / "train" / "class1" / "3.png"
    Image.fromarray(np.full((32, 32), 40_000, np.uint16)).save(path)
    run = train("--data-dir", data, *FOLDER, "--strict-data", tiny=())
    assert run.status == 1
    assert f"cannot read {path}: its values reach from 40000 to 40000 (mode I;16)" in run.err
    Image.fromarray(np.full((32, 32), 200, np.uint16)).save(path)
    assert train("--data-dir", data, *FOLDER, "--strict-data", tiny=(), name="within").status == 0


@unclosed_files
@pytest.mark.slow
def test_data_that_cannot_be_read_at_all_stops_the_run(train, image_folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    for path in (data / "train").rglob("*.png"):
        path.write_bytes(b"this is no image")
    run = train("--data-dir", data, *FOLDER, tiny=())
    assert run.status == 1
    assert "10 images in a row cannot be read" in run.err


def test_a_folder_that_cannot_be_made_is_refused(train, tmp_path):
    (tmp_path / "run").write_text("in the way")
    run = train()
    assert run.status == 2
    assert "cannot open the run's folder" in run.err
    assert os.listdir(tmp_path) == ["run"]
