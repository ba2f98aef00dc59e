"""Runs small enough that a whole training takes a second."""

import csv
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from topk_registry import registry
from topk_registry.cli.main import main
from topk_registry.train.engine.signals import StopRequest
from topk_registry.train.report import console

TINY = (
    *("--dataset", "topk/hierarchy", "--dataset-opt", "size=96", "superclasses=4", "fine=3", "pixel_noise=1.0"),
    *("--model", "topk_convnet", "--model-kwargs", "width=4", "-b", "16", "-j", "0", "--no-aug", "--device", "cpu"),
    *("--epochs", "2", "--opt", "adamw", "--lr", "0.01", "--warmup-epochs", "0", "--smoothing", "0"),
)


def unclosed_files(test):
    """timm's reader leaves the closing of image files to the garbage collector, which warns of each."""
    for warning in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        test = pytest.mark.filterwarnings(f"ignore::{warning}")(test)
    return test


def rows(path):
    """The rows of a summary; a value that is missing is NaN."""
    with open(path) as file:
        return [{name: float(value or "nan") for name, value in row.items()} for row in csv.DictReader(file)]


def stops_at(monkeypatch, at):
    """Ask the run to stop when it asks the ``at``-th time whether it should."""
    asked = []
    monkeypatch.setattr(StopRequest, "__bool__", lambda self: asked.append(1) or len(asked) == at)
    monkeypatch.setattr(StopRequest, "signum", signal.SIGTERM, raising=False)


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

    def checkpoint(self, name="last.pth.tar"):
        from timm.utils.checkpoint_saver import load_checkpoint_metadata

        return load_checkpoint_metadata(self.folder / name)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """All these runs are too small to share."""


@pytest.fixture
def train(tmp_path, capsys, monkeypatch):
    """``train("--loss", ..., name="run")``: a tiny run of ``timm train`` in this process, its picture not drawn."""
    monkeypatch.setattr(console, "draw", lambda title, panels: "<svg/>")

    def run(*argv, name="run", tiny=TINY):
        capsys.readouterr()
        status = main(["train", *tiny, "--output", str(tmp_path), "--experiment", name, *map(str, argv)])
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
