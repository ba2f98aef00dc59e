"""A file with sets on onnxruntime-web, in Node.js: the results of onnxruntime, and what `allowed` and `alpha` need."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests import needs
from tests.export.test_webgpu import head
from topk_export.runtime.session import open_session

pytestmark = pytest.mark.nightly

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
PROGRAM = """
import * as ort from "onnxruntime-web";
import fs from "node:fs";
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create("model.onnx");
const feeds = {};
for (const [name, [type, dims, data]] of Object.entries(JSON.parse(fs.readFileSync("feeds.json"))))
  feeds[name] = new ort.Tensor(type, data, dims);
const results = {};
for (const [name, tensor] of Object.entries(await session.run(feeds)))
  results[name] = [tensor.dims, Array.from(tensor.data, Number)];
console.log(JSON.stringify(results));
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """``node(model, feeds)``: the outputs of a model in Node.js."""
    if shutil.which("npm") is None:
        needs.lack("needs Node.js and npm")
    folder = tmp_path_factory.mktemp("web")
    (folder / "package.json").write_text('{"private": true}')
    subprocess.run(["npm", "install", "--ignore-scripts", "onnxruntime-web@1"], cwd=folder, check=True, timeout=300)
    (folder / "run.mjs").write_text(PROGRAM)
    kinds = {"float32": "float32", "bool": "bool"}

    def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        onnx.save(model, str(folder / "model.onnx"))
        content = {name: [kinds[str(x.dtype)], x.shape, x.ravel().tolist()] for name, x in feeds.items()}
        (folder / "feeds.json").write_text(json.dumps(content))
        command = ["node", "run.mjs"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return {name: np.reshape(data, dims) for name, (dims, data) in json.loads(done.stdout).items()}

    return run


def expected(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = open_session(model.SerializeToString(), device="cpu")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def compare(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values.astype(np.float64), rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("n", "k"), [(10, 1), (10, 3), (1000, 5)])
def test_without_the_optional_inputs(node, n, k):
    model = head(n, k)
    feeds = {"input": np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)}
    compare(node(model, feeds), expected(model, feeds))


def test_the_program_of_the_page_makes_the_optional_inputs_usable(node, tmp_path, monkeypatch):
    n, model = 10, head(10, 3)
    feeds = {
        "input": np.random.default_rng(0).standard_normal((2, n)).astype(np.float32),
        "allowed": np.arange(2 * n).reshape(2, n) % 7 > 0,
        "alpha": np.asarray([0.2, 0.1], np.float32),
    }
    with pytest.raises(RuntimeError, match="invalid input 'al"):
        node(model, feeds)
    monkeypatch.chdir(tmp_path)
    onnx.save(model, "model.onnx")
    (program,) = re.findall(r"```python\n(import onnx\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(program)
    compare(node(onnx.load("model-web.onnx"), feeds), expected(model, feeds))
