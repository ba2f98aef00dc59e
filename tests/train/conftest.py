"""Runs small enough that a whole training takes a second."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from topk_registry import registry
from topk_registry.cli.main import main
from topk_registry.train import TrainConfig

SETTINGS = {
    "dataset": "topk/hierarchy",
    "dataset_opt": {"size": 96, "superclasses": 4, "fine": 3, "pixel_noise": 1.0},
    "model": "topk_convnet",
    "model_kwargs": {"width": 4},
    "batch_size": 16,
    "workers": 0,
    "no_aug": True,
    "device": "cpu",
    "epochs": 2,
    "opt": "adamw",
    "lr": 0.01,
    "warmup_epochs": 0,
    "smoothing": 0.0,
}
TINY = (
    *("--dataset", "topk/hierarchy", "--dataset-opt", "size=96", "superclasses=4", "fine=3", "pixel_noise=1.0"),
    *("--model", "topk_convnet", "--model-kwargs", "width=4", "-b", "16", "-j", "0", "--no-aug", "--device", "cpu"),
    *("--epochs", "2", "--opt", "adamw", "--lr", "0.01", "--warmup-epochs", "0", "--smoothing", "0"),
)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """All these runs are too small to share."""


@pytest.fixture
def config(tmp_path):
    """``config(epochs=1)``: the settings of a tiny run in a folder of its own."""
    return lambda **changes: TrainConfig(**{**SETTINGS, "output": str(tmp_path), "experiment": "run", **changes})


def rows(path):
    """The rows of a summary; a value that is missing is NaN."""
    with open(path) as file:
        return [{name: float(value or "nan") for name, value in row.items()} for row in csv.DictReader(file)]


def weights(folder, name="last.pth.tar"):
    return torch.load(Path(folder, name), map_location="cpu", weights_only=False)["state_dict"]


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@dataclass
class Finished:
    """A run that has ended: its exit status, its folder, and what it printed."""

    status: int
    folder: Path
    out: str
    err: str

    @property
    def summary(self):
        return rows(self.folder / "summary.csv")


@pytest.fixture
def train(tmp_path, capsys):
    """``train("--loss", ..., name="run")``: a tiny run of ``timm train`` in this process."""

    def run(*argv, name="run", tiny=TINY):
        capsys.readouterr()
        try:
            status = main(["train", *tiny, "--output", str(tmp_path), "--experiment", name, *map(str, argv)])
        except SystemExit as exit:  # of the parser
            status = exit.code
        printed = capsys.readouterr()
        return Finished(status, tmp_path / name, printed.out, printed.err)

    return run


@pytest.fixture
def register():
    """Register a loss for one test."""
    names = []

    def add(name, factory):
        registry.register_loss(name)(factory)
        names.append(name)

    yield add
    for name in names:
        registry.losses.unregister(name)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """An image folder of 4 classes, 12 training and 6 validation images each, 24 x 24."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("validation", 6)):
        for c in range(4):
            folder = root / split / f"class{c}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(rng.normal(60 + 40 * c, 20, (24, 24, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root
