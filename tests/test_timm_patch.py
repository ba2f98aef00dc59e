"""The patch of docs/timm_proposal.md: timm's own factory builds losses of installed distributions."""

import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import timm

from tests import needs

ROOT = Path(__file__).parents[1]
PATCH = ROOT / "docs" / "timm_loss_registry.patch"

# What timm's train.py does with --loss: choices from LOSS_TYPES, then a task with criterion_kwargs.
SCRIPT = """
import argparse, sys, torch
sys.path.insert(0, sys.argv[1])
import timm
from timm.loss import LOSS_TYPES
from timm.task import ClassificationTask

parser = argparse.ArgumentParser()
parser.add_argument("--loss", choices=LOSS_TYPES)
parser.add_argument("--smoothing", type=float, default=0.1)
for name in sys.argv[2:]:
    args = parser.parse_args(["--loss", name])
    model = timm.create_model("test_vit", num_classes=7)
    kwargs = dict(loss_type=args.loss, smoothing=args.smoothing)
    task = ClassificationTask(model, criterion_kwargs=kwargs, device=torch.device("cpu"), verbose=False)
    loss = task(torch.randn(2, 3, 160, 160), torch.tensor([1, 6]))["loss"]
    loss.backward()
    print(type(task.criterion).__name__, getattr(task.criterion, "label_smoothing", None), loss.isfinite().item())
"""


@pytest.mark.slow
def test_timm_builds_it_by_name_and_refuses_an_unknown_name(tmp_path):
    """A patched copy of timm, and metadata that declares our losses in the group timm.losses."""
    if shutil.which("patch") is None:
        needs.lack("needs the program patch")
    shutil.copytree(Path(timm.__file__).parent, tmp_path / "timm", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["patch", "-s", "-p1", "-d", str(tmp_path), "-i", str(PATCH)], check=True)
    info = tmp_path / "ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    lines = [f"{entry.name} = {entry.value}" for entry in entry_points(group="topk_registry.losses")]
    (info / "entry_points.txt").write_text("\n".join(["[timm.losses]", *lines]) + "\n")

    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "smooth_topk_svm", "ce", "smooth_topk_svn"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["SmoothTopKSVM 0.1 True", "LabelSmoothingCrossEntropy None True"], done.stderr
    assert done.returncode == 2
    assert "smooth_topk_svm" in done.stderr


def test_the_patch_is_short():
    assert len(PATCH.read_text().splitlines()) <= 120
