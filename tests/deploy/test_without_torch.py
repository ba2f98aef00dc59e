"""An environment that the two commands of docs/install.md make, without PyTorch: from a foreign file to the service."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests import checkout
from tests.export.foreign import TAILS, WEIGHT, N, classifier

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(1).standard_normal((400, 4)).astype(np.float32)
MEGABYTES = 400


def commands_of_the_page() -> list[str]:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    section = page.split("## Without PyTorch")[1]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0].splitlines()


@pytest.fixture(scope="module")
def slim(tmp_path_factory):
    """Folder of a new environment, in which the two commands have been run from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("slim")
    checkout.copy_to(folder / "source")
    venv.create(folder / "env", with_pip=True)
    path = {"PATH": f"{folder / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for line in commands_of_the_page():
        done = subprocess.run(line, shell=True, cwd=folder / "source", env=os.environ | path, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    return folder / "env"


@pytest.fixture(scope="module")
def run(slim, tmp_path_factory):
    def command(*arguments, status=0):
        program = [slim / "bin" / "python", "-m", "topk_registry", *map(str, arguments)]
        done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path_factory.getbasetemp())
        assert done.returncode == status, done.stderr
        return done

    return command


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the environment has no folder bin")
def test_from_a_foreign_file_to_the_service(slim, run, tmp_path):
    source, made, sets = tmp_path / "m.onnx", tmp_path / "o.onnx", tmp_path / "sets.onnx"
    onnx.save(classifier(TAILS["softmax"]), str(source))
    labels = (X @ WEIGHT + np.random.default_rng(2).gumbel(size=(len(X), N))).argmax(-1)
    np.savez(tmp_path / "x.npz", x=X)
    np.save(tmp_path / "y.npy", labels)
    probe = "import importlib.util as u; print([n for n in ('torch', 'timm', 'torchvision') if u.find_spec(n)])"
    installed = subprocess.run([slim / "bin" / "python", "-c", probe], capture_output=True, text=True)
    assert installed.stdout.strip() == "[]"
    assert sum(file.stat().st_size for file in slim.rglob("*") if not file.is_symlink()) < MEGABYTES * 1e6

    run("attach", source, made, "-k", 2)
    run("calibrate", made, "--inputs", tmp_path / "x.npz", "--labels", tmp_path / "y.npy", "-o", sets)
    assert "ok   prediction sets" in run("verify", sets).stdout
    rows = run("predict", sets, "--inputs", tmp_path / "x.npz", "--json", "-").stdout.splitlines()
    tops = [json.loads(row)["top"][0]["index"] for row in rows]
    assert tops == (X @ WEIGHT).argmax(-1).tolist()
    run("triton", sets, tmp_path / "models")
    assert "without torch and timm: only attach, calibrate" in run("doctor").stdout
    assert "train needs torch, which is not installed" in run("train", status=2).stderr

    command = [slim / "bin" / "python", "-m", "topk_registry", "serve", str(sets), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = re.search(r":(\d+)/", server.stderr.readline())
        assert found
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/healthz", timeout=10)
                break
            except OSError:
                time.sleep(0.1)
        body = json.dumps({"inputs": {"x": X[:3].tolist()}}).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{found[1]}/predict", body, {"Content-Type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(asked, timeout=60))
        assert [each["top"][0]["index"] for each in answer["predictions"]] == tops[:3]
    finally:
        server.kill()
        server.communicate()


def test_the_page_has_two_commands():
    assert commands_of_the_page() == ["pip install --no-deps .", "pip install -r export/requirements.txt"]
