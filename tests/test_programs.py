"""The programs of docs/programs run: the one that needs torchvision alone in the gate, the others at night."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from topk_export import Predictor

PROGRAMS = Path(__file__).parents[1] / "docs" / "programs"
NEEDS = {
    "torchvision_loop": ("torchvision",),
    "lightning_loop": ("lightning",),
    "accelerate_loop": ("accelerate",),
    "transformers_trainer": ("transformers", "accelerate"),
    "fastai_learner": ("fastai",),
}
# run here, by docs/transcripts.py, and in a test with Ray; folder_loaders is imported by other programs
OTHERS = {"own_loop", "make_folder", "make_digits", "imagenet_onnx", "ray_score", "folder_loaders"}
ARGUMENTS = {  # a folder of images, and a small model with random weights
    "torchvision_loop": ("images",),
    "lightning_loop": ("images", "test_resnet", "no"),
    "accelerate_loop": ("images", "test_resnet", "no"),
    "fastai_learner": ("images", "test_resnet", "no"),
    "transformers_trainer": ("images", "tiny"),
}


def run(folder, name, *arguments):
    """Run a program in a folder, and return what it prints."""
    command = [sys.executable, str(PROGRAMS / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_program_is_known():
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {*NEEDS, *OTHERS}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "torchvision_loop" else pytest.mark.nightly)
        for name in NEEDS
    ],
)
def test_program(name, tmp_path):
    missing = [package for package in NEEDS[name] if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    run(tmp_path, "make_folder", "images", "8", "10")
    if name == "transformers_trainer":
        save_tiny_model(tmp_path / "tiny")
    printed = run(tmp_path, name, *ARGUMENTS[name])
    assert "epoch 2" in printed
    for file in tmp_path.glob("*.onnx"):
        assert Predictor(file, device="cpu").metadata.temperature == 3  # k tau of the loss
    if name == "transformers_trainer":
        assert Predictor(tmp_path / "transformers.onnx", device="cpu").metadata.preprocess.interpolation == "bicubic"
    assert len(list(tmp_path.glob("*.onnx"))) == (name != "torchvision_loop")


def save_tiny_model(folder):
    """Save a small network and its preprocessing in the format of Hugging Face."""
    from transformers import ConvNextImageProcessor, ResNetConfig, ResNetForImageClassification

    shape = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic"}
    ResNetForImageClassification(ResNetConfig(num_labels=20, **shape)).save_pretrained(folder)
    ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.875).save_pretrained(folder)
