"""Runs small enough that a whole training takes a second."""

import csv
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from topk_registry.cli.main import main
from topk_registry.train import checkpoint, report

TINY = (
    *("--dataset", "topk/hierarchy", "--dataset-opt", "size=96", "superclasses=4", "fine=3"),
    *("--model", "topk_convnet", "--model-kwargs", "width=4", "-b", "16", "-j", "0", "--no-aug", "--device", "cpu"),
    *("--epochs", "2", "--opt", "adamw", "--lr", "0.01", "--warmup-epochs", "0", "--smoothing", "0"),
)


@dataclass
class Finished:
    """A run that has ended: its exit status, its folder, and what it printed."""

    status: int
    folder: Path
    out: str
    err: str

    @property
    def summary(self):
        with open(self.folder / "summary.csv") as file:
            return list(csv.DictReader(file))

    def checkpoint(self, name="last.pth.tar"):
        return checkpoint.read_checkpoint(self.folder / name)


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """All these runs are too small to share."""


@pytest.fixture
def train(tmp_path, capsys, monkeypatch):
    """``train("--loss", ..., name="run")``: a tiny run of ``timm train`` in this process, without curves."""
    monkeypatch.setattr(report, "draw", lambda title, history: "<svg/>")

    def run(*argv, name="run", tiny=TINY):
        capsys.readouterr()
        status = main(["train", *tiny, "--output", str(tmp_path), "--experiment", name, *map(str, argv)])
        printed = capsys.readouterr()
        return Finished(status, tmp_path / name, printed.out, printed.err)

    return run


@pytest.fixture
def start(tmp_path):
    """Start ``timm train`` as a process of its own; the environment is this one's with one thread."""
    started = []

    def run(*argv, launcher=(), name="run", tiny=TINY):
        words = [sys.executable, *(launcher or ("-m",)), "topk_registry", "train", *tiny, "--output", str(tmp_path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words += ["--experiment", name, *map(str, argv)]
        process = subprocess.Popen(words, env=environment, start_new_session=True, **pipes)
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def folder(tmp_path):
    """A folder of images with splits and three classes that colors tell apart."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("validation", 4)):
        for c, name in enumerate(("blue", "green", "red")):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (40, 40, 3), dtype=np.uint8)
                pixels[..., 2 - c] += 120
                Image.fromarray(pixels).save(place / f"{i}.png")
    return tmp_path / "images"
