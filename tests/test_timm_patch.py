"""The patch of docs/timm_proposal.md: timm's own factory builds losses of installed distributions."""

import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import timm

ROOT = Path(__file__).parents[1]
PATCH = ROOT / "docs" / "timm_loss_registry.patch"

# What timm's train.py does with --loss: choices from LOSS_TYPES, then a task with criterion_kwargs.
SCRIPT = """
import argparse, torch, timm
from timm.loss import LOSS_TYPES
from timm.task import ClassificationTask

parser = argparse.ArgumentParser()
parser.add_argument("--loss", choices=LOSS_TYPES)
parser.add_argument("--smoothing", type=float, default=0.1)
args = parser.parse_args()
model = timm.create_model("test_vit", num_classes=7)
kwargs = dict(loss_type=args.loss, smoothing=args.smoothing)
task = ClassificationTask(model, criterion_kwargs=kwargs, device=torch.device("cpu"), verbose=False)
loss = task(torch.randn(2, 3, 160, 160), torch.tensor([1, 6]))["loss"]
loss.backward()
print(type(task.criterion).__name__, getattr(task.criterion, "label_smoothing", None), loss.isfinite().item())
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A folder with a patched copy of timm, and metadata that declares our losses in the group timm.losses."""
    if shutil.which("patch") is None:
        pytest.skip("needs the program patch")
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(Path(timm.__file__).parent, folder / "timm", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["patch", "-s", "-p1", "-d", str(folder), "-i", str(PATCH)], check=True)
    info = folder / "ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    lines = [f"{entry.name} = {entry.value}" for entry in entry_points(group="topk_registry.losses")]
    (info / "entry_points.txt").write_text("\n".join(["[timm.losses]", *lines]) + "\n")
    return folder


def run(patched, *arguments):
    path = f"import sys; sys.path.insert(0, {str(patched)!r})\n"
    return subprocess.run([sys.executable, "-c", path + SCRIPT, *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "printed"), [("smooth_topk_svm", "SmoothTopKSVM 0.1"), ("ce", "LabelSmoothing")])
def test_timm_builds_it_by_name(patched, name, printed):
    done = run(patched, "--loss", name)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert done.stdout.strip().endswith("True")


@pytest.mark.slow
def test_an_unknown_name_is_refused(patched):
    done = run(patched, "--loss", "smooth_topk_svn")
    assert done.returncode == 2
    assert "smooth_topk_svm" in done.stderr


def test_the_patch_is_short():
    assert len(PATCH.read_text().splitlines()) <= 120
