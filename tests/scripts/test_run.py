"""Other people's training scripts, in miniature, train with a registered loss, or stop."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from topk_registry import registry
from topk_registry.cli.main import main
from topk_registry.errors import TrainError
from topk_registry.train.scripts.patch import Patch

SCRIPTS = Path(__file__).with_name("copies")
CURRENT = str(SCRIPTS / "timm_current.py")
OLD = str(SCRIPTS / "timm_before_tasks.py")
TORCHVISION = str(SCRIPTS / "torchvision_reference.py")


def unclosed_files(test):
    """timm's reader leaves the closing of image files to the garbage collector, which warns of each."""
    for warning in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        test = pytest.mark.filterwarnings(f"ignore::{warning}")(test)
    return test


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    """Five classes with 8 training and 6 validation images each, 24 x 24."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("validation", 6)):
        for c in range(5):
            folder = root / split / f"class{c}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(rng.normal(60 + 40 * c, 20, (24, 24, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    (root / "val").symlink_to("validation")  # torchvision's name
    return root


class Seen(torch.nn.Module):
    """A loss that remembers what it was built with and called on."""

    last: "Seen"

    def __init__(self, k=1, num_classes=0, class_counts=(), label_smoothing=0.0, soft_targets=None):
        super().__init__()
        self.built = {"k": k, "num_classes": num_classes, "class_counts": list(class_counts)}
        self.built |= {"label_smoothing": label_smoothing, "soft_targets": soft_targets}
        self.epochs, self.kinds = [], set()
        Seen.last = self

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def forward(self, logits, target):
        self.kinds.add(target.dtype)
        return torch.nn.functional.cross_entropy(logits, target)


@pytest.fixture(autouse=True)
def _seen():
    registry.register_loss("seen")(Seen)
    yield
    registry.losses._registered.pop("seen")


@unclosed_files
def test_timms_current_script(image_folder, tmp_path, capsys):
    flags = ["--data-dir", str(image_folder), "--num-classes", "5", "--epochs", "2"]
    flags += ["--args-file", str(tmp_path / "args.yaml")]
    before = (sys.argv, list(sys.path))
    assert main(["run", CURRENT, "--loss", "seen", "--loss-opt", "k=3", *flags]) == 0
    assert (sys.argv, sys.path) == before
    assert "epoch 1" in capsys.readouterr().out
    built = {"k": 3, "num_classes": 5, "class_counts": [8] * 5, "label_smoothing": 0.1, "soft_targets": False}
    assert Seen.last.built == built
    assert Seen.last.epochs == [0, 1]
    record = yaml.safe_load((tmp_path / "args.yaml").read_text())["loss_record"]
    assert record["name"] == "seen"
    assert record["options"] == {"k": 3}


@unclosed_files
def test_mixup_reaches_the_loss_unsmoothed(image_folder, tmp_path):
    flags = ["--data-dir", str(image_folder), "--num-classes", "5", "--mixup", "0.3"]
    assert main(["run", CURRENT, "--loss", "seen", *flags, "--args-file", str(tmp_path / "args.yaml")]) == 0
    assert Seen.last.built["soft_targets"] is True
    assert Seen.last.built["label_smoothing"] == 0.0
    assert Seen.last.kinds == {torch.float32}


@unclosed_files
def test_timms_script_before_tasks(image_folder, capsys):
    flags = ["--data-dir", str(image_folder), "--num-classes", "5"]
    assert main(["run", OLD, "--loss", "seen", *flags]) == 0
    assert Seen.last.built["class_counts"] == [8] * 5
    assert capsys.readouterr().out.count("step") == 5


@unclosed_files
@pytest.mark.parametrize("step", [0, 2])
def test_the_tripwire_stops_a_script_that_trains_another_loss(image_folder, capsys, step):
    flags = ["--data-dir", str(image_folder), "--num-classes", "5", "--own-loss-from", str(step)]
    assert main(["run", OLD, "--loss", "seen", *flags]) == 1
    printed = capsys.readouterr()
    assert "without a gradient of loss 'seen'" in printed.err
    assert printed.out.count("step") == step  # and not one more


@unclosed_files
def test_without_a_loss_the_script_is_left_alone(image_folder, capsys):
    flags = ["--data-dir", str(image_folder), "--num-classes", "5", "--own-loss-from", "0"]
    assert main(["run", OLD, *flags]) == 0
    assert capsys.readouterr().out.count("step") == 5


def test_torchvisions_script(image_folder, capsys):
    flags = [TORCHVISION, "--loss", "seen", "--loss-opt", "k=2", "--data-path", str(image_folder)]
    assert main(["run", *flags, "--label-smoothing", "0.2", "--epochs", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("trained with Seen") == 2
    assert printed.count("evaluated with CrossEntropyLoss") == 2
    built = {"k": 2, "num_classes": 5, "class_counts": [8] * 5, "label_smoothing": 0.2, "soft_targets": False}
    assert Seen.last.built == built
    assert Seen.last.epochs == [0, 1]


def test_torchvisions_criterion_smooths_mixed_targets_too(image_folder):
    flags = [TORCHVISION, "--loss", "seen", "--data-path", str(image_folder), "--mixup-alpha", "0.2"]
    assert main(["run", *flags, "--label-smoothing", "0.1"]) == 0
    assert (Seen.last.built["soft_targets"], Seen.last.built["label_smoothing"]) == (True, 0.1)
    assert Seen.last.kinds == {torch.float32}


@unclosed_files
def test_a_script_with_an_older_timm_beside_it(image_folder, monkeypatch):
    """timm 1.0.15 has no MultiLabelTarget, which the trainer imports."""
    monkeypatch.delattr("timm.data.MultiLabelTarget")
    monkeypatch.delitem(sys.modules, "topk_registry.train.data", raising=False)
    assert main(["run", OLD, "--loss", "seen", "--data-dir", str(image_folder), "--num-classes", "5"]) == 0


def test_evaluation_alone_trips_nothing(image_folder):
    flags = [TORCHVISION, "--loss", "seen", "--data-path", str(image_folder), "--test-only"]
    assert main(["run", *flags]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "/no/such/train.py", "--loss", "seen"], "got '/no/such/train.py'"),
        (["run", "--loss", "seen"], "expected the path of a training script"),
        (["run", CURRENT, "--loss", "sene"], "no loss is called 'sene'"),
        (["run", str(SCRIPTS / "neighbour.py"), "--loss", "seen"], "no train_one_epoch"),
        (["run", str(SCRIPTS / "neighbour.py")], "no main() or no argument parser"),
        (["run", CURRENT, "--loss-opt", "k=3"], "need --loss"),
    ],
)
def test_what_cannot_work_says_why(argv, message, capsys):
    try:
        status = main(argv)
    except SystemExit as stopped:  # of the argument parser
        status = stopped.code
    assert status
    assert message in capsys.readouterr().err


def test_a_bad_option_is_refused_before_the_first_step(image_folder, capsys):
    flags = [TORCHVISION, "--loss", "smooth_topk_svm", "--data-path", str(image_folder)]
    assert main(["run", *flags, "--loss-opt", "k=9"]) == 1
    printed = capsys.readouterr()
    assert "k must be below the number of classes" in printed.err
    assert "trained" not in printed.out


@unclosed_files
def test_a_model_with_other_classes_than_the_data_is_refused(image_folder, tmp_path, capsys):
    """timm's script takes the model's own number, 1000, where none is given."""
    flags = ["--data-dir", str(image_folder), "--args-file", str(tmp_path / "args.yaml")]
    assert main(["run", CURRENT, "--loss", "seen", *flags]) == 1
    assert "pass --num-classes 5" in capsys.readouterr().err


SMALL = "--model resnet18 -b 16 -j 0 --epochs 2 --lr 0.01 --device cpu"
TIMMS = "--num-classes 5 --input-size 3 32 32 --warmup-epochs 0 --output OUT --data-dir"
TORCHVISIONS = "--val-resize-size 36 --val-crop-size 32 --train-crop-size 32 --output-dir OUT --data-path"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["smooth_topk_svm", "acme"])
@pytest.mark.parametrize(
    ("script", "flags"), [("TIMM_TRAIN_SCRIPT", TIMMS), ("TORCHVISION_TRAIN_SCRIPT", TORCHVISIONS)]
)
def test_the_real_scripts_train_two_epochs(site, image_folder, tmp_path, script, flags, loss):
    """With a loss of ours and with one of a distribution that is installed beside it."""
    if script not in os.environ:
        pytest.skip(f"pip installs no training script: set {script}")
    site.module("acme_losses", "import torch\ndef acme(k=1):\n    return torch.nn.CrossEntropyLoss()\n")
    site.distribution("acme-losses", {"acme": "acme_losses:acme"})
    flags = [str(tmp_path / "out") if flag == "OUT" else flag for flag in f"{SMALL} {flags}".split()]
    words = [sys.executable, "-m", "topk_registry", "run", os.environ[script], "--loss", loss, "--loss-opt", "k=2"]
    environment = {**os.environ, "PYTHONPATH": str(site.root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*words, *flags, str(image_folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"training with {loss} k=2" in done.stderr
    assert list((tmp_path / "out").rglob("*.pth*"))


def test_the_copies_that_jsd_compares_are_those_of_the_script():
    patch = Patch("jsd", {})
    patch.note_arguments(Namespace(num_classes=5, aug_splits=3))
    assert patch.criterion(None, "cpu").num_splits == 3
    without = Patch("jsd", {"jsd_splits": 2})
    without.note_arguments(Namespace(num_classes=5))
    with pytest.raises(TrainError, match="compares augmented copies of each image: pass --aug-splits"):
        without.criterion(None, "cpu")
