"""topk-predict, the distribution without torch: what it brings, and that it runs alone."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from zipfile import ZipFile

import pytest

from tests.installing import OFFLINE, PIP, ROOT, run
from topk_export.commands import main

ALONE = """
import sys
folder, *argv = sys.argv[1:]
sys.path.insert(0, folder)
for name in ("torch", "torchvision", "timm", "topk_plugins", "topk_studies", "topk_registry.train"):
    sys.modules[name] = None  # importing it fails
from topk_export.commands import main
assert main.__file__.startswith(folder), main.__file__
sys.exit(main.main(argv))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", folder, ROOT / "export")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def alone(wheel, tmp_path_factory):
    """``alone(command, ...)`` runs a command of the unpacked wheel in a process where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("alone")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)

    def call(*argv: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", ALONE, folder, *argv]
        return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, cwd=folder)

    return call


def test_it_brings_no_torch_and_nothing_that_needs_it(wheel):
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    needed = {
        re.split(r"[^\w-]", line.split()[1])[0] for line in metadata.splitlines() if line.startswith("Requires-D")
    }
    assert needed == {
        *("numpy", "pillow", "onnx", "onnxruntime", "onnxruntime-gpu"),
        *("fsspec", "pyarrow", "ray", "tqdm"),
        *("fastapi", "prometheus-client", "python-multipart", "uvicorn"),
    }
    modules = [name for name in names if name.endswith(".py")]
    assert "topk_export/serve/page.html" in names
    assert {name.split("/")[1] for name in modules if name.startswith("topk_registry/")} == {
        "__init__.py",
        "cli",
        "executors",
        "folders",
        "registry",
    }
    assert not [name for name in modules if "conversion" in name or "calibrat" in name]


def test_it_predicts_and_verifies_alone(alone, model_file, picture):
    result = alone("predict", model_file, picture("turquoise"), "--device", "cpu", "--csv")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1].split(",")[3] == "turquoise"
    result = alone("verify", model_file, "--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout


@pytest.mark.slow
def test_it_scores_alone(alone, model_file, picture, tmp_path):
    result = alone("score", model_file, picture("turquoise").parent, "-o", tmp_path / "scores", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert "1 images in 1 files" in result.stdout


@pytest.mark.slow
def test_its_commands_are_listed_and_others_refused(alone):
    listed = alone("--help").stdout
    for command in ("predict", "score", "serve", "bench", "verify"):
        assert re.search(rf"^  {command} ", listed, re.MULTILINE)
        shown = alone(command, "--help")
        assert shown.returncode == 0, shown.stderr
    refused = alone("train")
    assert refused.returncode == 2
    told, *_, line = refused.stderr.splitlines()
    assert line == "topk-predict: no command 'train'; there are predict, score, serve, bench, verify"
    assert told.startswith("warning: topk-predict")  # the environment of the tests has topk-registry


@pytest.mark.parametrize("twins", [("topk-predict",), ("topk-predict", "topk-registry")])
def test_both_distributions_at_once_are_a_warning(monkeypatch, capsys, twins):
    def version(name):
        if name in twins:
            return "9.9"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(main, "version", version)
    assert main.main(["--help"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: topk-predict 9.9 and topk-registry 9.9 install the same files") == (len(twins) == 2)
