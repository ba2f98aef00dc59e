"""The trips in docs/architecture.md are those that commands make through the files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.export.colours import colours_by, png

ROOT = Path(__file__).parents[1]
TRAIN = (
    *("train", "--loss", "focal", "--dataset", "topk/hierarchy"),
    *("--dataset-opt", "size=48", "superclasses=4", "fine=3", "--model", "topk_convnet", "--model-kwargs", "width=2"),
    *("-b", "16", "-j", "0", "--no-aug", "--device", "cpu", "--epochs", "1", "--lr", "0.01", "--smoothing", "0"),
)
FOLDERS = {
    "loss": ("topk_registry/", "plugins/"),
    "train": ("topk_registry/cli/", "topk_registry/train/", "plugins/"),
    "predict": ("topk_registry/cli/", "export/topk_export/"),
}


def documented(trip: str) -> list[str]:
    text = (ROOT / "docs/architecture.md").read_text()
    match = re.search(rf"<!-- trip: {trip} -->\n(.*?)<!-- /trip -->", text, re.DOTALL)
    assert match, f"docs/architecture.md has no trip {trip!r}"
    return re.findall(r"^\| `(.+?)` \|", match[1], re.MULTILINE)


def entered(trip: str, argv: list[str]) -> list[str]:
    environment = {**os.environ, "TOPK_REGISTRY_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.trip", str(ROOT), *argv]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.endswith(".py") and line.startswith(FOLDERS[trip])]


LOSS = """
import sys, torch, topk_registry
from tests.trip import entrances
loss, logits, target = topk_registry.create_loss("smooth_topk_svm"), torch.randn(8, 20), torch.arange(8)
loss(logits, target)
for caller, file in entrances(sys.argv[1], lambda: loss(logits, target))[0]:
    print(caller or "-", file)
"""
DOWN = 7  # files on the way to the kernel


def test_the_trip_of_a_loss():
    command = [sys.executable, "-c", LOSS, str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    calls = [tuple(line.split()) for line in done.stdout.splitlines()]
    files = [file for _, file in calls if file.startswith(FOLDERS["loss"])]
    asked = documented("asked")
    assert documented("loss") == [file for file in files if file not in asked], "each is entered once"
    assert len(documented("loss")) <= DOWN
    assert asked == list(dict.fromkeys(file for file in files if file in asked))
    assert not {caller for caller, _ in calls} & set(asked), "a file that is asked calls another one"


@pytest.mark.slow
def test_the_trip_of_a_training_run(tmp_path):
    found = entered("train", [*TRAIN, "--output", str(tmp_path), "--experiment", "run"])
    assert documented("train") == found


@pytest.mark.slow
def test_the_trip_of_an_image(made_once, tmp_path):
    image = tmp_path / "image.png"
    image.write_bytes(png("red"))
    found = entered("predict", ["predict", str(colours_by(made_once)), str(image), "--device", "cpu"])
    assert documented("predict") == found
