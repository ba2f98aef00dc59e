"""The programs of docs/programs run: those that need torch alone in the gate, the others at night."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "docs" / "programs"
NEEDS = {
    "own_loop": (),
    "torchvision_loop": ("torchvision",),
    "lightning_loop": ("lightning",),
    "accelerate_loop": ("accelerate",),
    "transformers_trainer": ("transformers", "accelerate"),
    "fastai_learner": ("fastai",),
}
OTHERS = {"make_folder", "make_digits", "ray_score"}  # run here, by docs/transcripts.py, and in a test with Ray
FOLDER = {"torchvision_loop", "fastai_learner"}  # take a folder of images


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
        pytest.param(name, marks=pytest.mark.slow if name in ("own_loop", "torchvision_loop") else pytest.mark.nightly)
        for name in NEEDS
    ],
)
def test_program(name, tmp_path):
    missing = [package for package in NEEDS[name] if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    if name in FOLDER:
        run(tmp_path, "make_folder", "images", "8", "10")
    printed = run(tmp_path, name, *["images"] * (name in FOLDER))
    assert "epoch 2" in printed
