"""Distributions as a user gets them: a pure wheel that works without the checkout, and metadata that tools accept."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests import checkout, needs
from topk_registry.cli import new_plugin

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Wheel and source distribution, built from the files that git knows or would add."""
    needs.package("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    checkout.copy_to(source)
    for target in ("wheel", "sdist"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder / "dist")]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
    return folder / "dist"


def test_the_wheel_is_pure_and_whole(dist):
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for package in ("topk_registry", "topk_plugins", "topk_export"):
        assert f"{package}/__init__.py" in names
    assert any(name.endswith("page.html") for name in names)
    assert any(name.startswith("topk_registry/_template/") for name in names)
    assert not any(name.endswith((".so", ".pyc")) or name.startswith(("tests/", "topk_studies/")) for name in names)


def test_the_source_distribution_has_what_the_tests_need(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"README.md", "pyproject.toml", "tests/oracles.py", "plugins/template/pyproject.toml"} <= names


def test_twine_accepts_both(dist):
    needs.package("twine", extra="lint")
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())])
    assert done.returncode == 0


def test_the_wheel_works_in_a_fresh_environment(dist, tmp_path):
    """With the dependencies of this environment and none of its checkout."""
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as opened:  # what an installer does with a pure wheel
        opened.extractall(site)
    dependencies = [path for path in sys.path if "site-packages" in path]
    code = (
        f"import sys; sys.path.extend({dependencies!r})\n"
        "import torch, topk_registry as tr, topk_registry\n"
        "assert str(topk_registry.__file__).startswith(sys.argv[1]), topk_registry.__file__\n"
        "import topk_registry.ops.ksubset.cpu.labels\n"
        "loss = tr.create_loss('smooth_topk_svm', k=2)\n"
        "s = torch.randn(4, 9, requires_grad=True)\n"
        "loss(s, torch.arange(4)).backward()\n"
        "assert s.grad.isfinite().all() and len(tr.list_losses()) >= 38\n"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean["TOPK_REGISTRY_BACKEND"] = "torch"  # kernels would compile again
    subprocess.run([python, "-c", code, str(tmp_path)], check=True, cwd=tmp_path, env=clean)


def test_a_loss_of_an_installed_plugin_trains(tmp_path):
    """A wheel of a distribution with an entry point, installed by pip, and its loss by name in a process of its own."""
    pip = [sys.executable, "-m", "pip"]  # find_spec("pip") makes setuptools use distutils of the standard library
    needs.package("hatchling")
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        needs.lack("needs pip")
    new_plugin.make(tmp_path / "source", name="their-losses", loss="their_loss")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", *offline, "-w", str(tmp_path), str(tmp_path / "source")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", *offline, "--target", str(tmp_path / "site"), str(wheel)], check=True)
    shutil.rmtree(tmp_path / "source")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "topk_registry", "train", "--loss", "their_loss", "--epochs", "1"]
    command += ["--dataset-opt", "size=64", "eval_size=64", "--workers", "0", "--output", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    summaries = {path.parent.name[-len("their_loss") :]: path for path in (tmp_path / "runs").rglob("summary.csv")}
    assert len(summaries) == 2  # the loss, and cross-entropy for comparison
    assert len(summaries["their_loss"].read_text().splitlines()) == 2
