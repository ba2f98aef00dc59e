"""Runtimes that an exported file may meet: each takes a file and an input, and gives the file's outputs.

``MissingError``: the runtime is not installed. One that cannot run a file raises what it likes.
"""

import base64
import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("run.mjs")
SECONDS = 300  # a run that takes longer counts as failed
Outputs = dict[str, np.ndarray]
Run = Callable[[Path, np.ndarray], Outputs]


class MissingError(Exception):
    """The runtime is not installed."""


def load(package: str) -> Any:
    """Import a package, or raise ``MissingError``."""
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingError(f"not installed ({error})") from error


@contextlib.contextmanager
def onnxruntime() -> Iterator[tuple[str, Run]]:
    ort = load("onnxruntime")

    def run(path: Path, x: np.ndarray) -> Outputs:
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, {session.get_inputs()[0].name: x}), strict=True))

    yield ort.__version__, run


@contextlib.contextmanager
def openvino() -> Iterator[tuple[str, Run]]:
    core = load("openvino").Core()

    def run(path: Path, x: np.ndarray) -> Outputs:
        # single precision as everywhere: OpenVINO may take half of it on some processors
        compiled = core.compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        result = compiled([x])
        return {output.any_name: result[output] for output in compiled.outputs}

    yield version("openvino"), run


@contextlib.contextmanager
def tract() -> Iterator[tuple[str, Run]]:
    package = load("tract")

    def run(path: Path, x: np.ndarray) -> Outputs:
        import onnx

        names = [output.name for output in onnx.load(str(path)).graph.output]
        outputs = package.onnx().load(str(path)).into_model().into_runnable().run([x])
        return {name: value.to_numpy() for name, value in zip(names, outputs, strict=True)}

    yield version("tract"), run


@contextlib.contextmanager
def mnn() -> Iterator[tuple[str, Run]]:
    load("MNN")
    converter = shutil.which("mnnconvert", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if converter is None:
        raise MissingError("MNN is installed without mnnconvert")

    def run(path: Path, x: np.ndarray) -> Outputs:
        import onnx

        expr, nn = load("MNN.expr"), load("MNN.nn")
        graph, target = onnx.load(str(path)).graph, path.with_suffix(".mnn")
        names, kinds = [v.name for v in graph.output], [v.type.tensor_type.elem_type for v in graph.output]
        command = [converter, "-f", "ONNX", "--modelFile", path, "--MNNModel", target, "--bizCode", "topk"]
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
        module = nn.load_module_from_file(str(target), [graph.input[0].name], names)
        values = module.forward([expr.const(x.ravel().tolist(), list(x.shape), expr.NCHW)])
        return {
            name: np.array(
                expr.convert(value, expr.NCHW).read(), np.int64 if kind == onnx.TensorProto.INT64 else np.float32
            ).reshape(value.shape)
            for name, value, kind in zip(names, values, kinds, strict=True)
        }

    yield version("MNN"), run


@contextlib.contextmanager
def onnx2torch() -> Iterator[tuple[str, Run]]:
    package = load("onnx2torch")

    def run(path: Path, x: np.ndarray) -> Outputs:
        import onnx
        import torch

        names = [output.name for output in onnx.load(str(path)).graph.output]
        with torch.no_grad():
            found = package.convert(str(path))(torch.from_numpy(x))
        found = found if isinstance(found, (list, tuple)) else [found]
        return {name: value.numpy() for name, value in zip(names, found, strict=True)}

    yield version("onnx2torch"), run


def modules() -> Path:
    """Return npm's folder of packages: that of $NODE_MODULES, or of the checkout."""
    folder = Path(os.environ.get("NODE_MODULES", ROOT / "node_modules"))
    if not folder.is_dir():
        raise MissingError(f"no folder {folder}: npm install onnxruntime-node onnxruntime-web, and set NODE_MODULES")
    return folder


def npm(package: str) -> tuple[Path, str]:
    """Return the folder and the version of a package of npm."""
    folder = modules() / package
    if not folder.is_dir():
        raise MissingError(f"no {package} in {folder.parent}")
    return folder, json.loads((folder / "package.json").read_text())["version"]


def task(path: Path, x: np.ndarray, **more: Any) -> dict[str, Any]:
    model = base64.b64encode(path.read_bytes()).decode()
    return {"model": model, "dims": x.shape, "input": base64.b64encode(x.tobytes()).decode(), **more}


def outputs(answer: dict[str, Any]) -> Outputs:
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return {
        name: np.frombuffer(base64.b64decode(value["data"]), value["type"]).reshape(value["dims"])
        for name, value in answer.items()
    }


@contextlib.contextmanager
def node(package: str, file: str, *, providers: list[str] | None = None) -> Iterator[tuple[str, Run]]:
    """One file of a package in Node."""
    if (program := shutil.which("node")) is None:
        raise MissingError("no node")
    folder, number = npm(package)

    def run(path: Path, x: np.ndarray) -> Outputs:
        content = json.dumps(task(path, x, module=(folder / file).as_uri(), providers=providers))
        done = subprocess.run(
            [program, str(SCRIPT)], input=content, capture_output=True, text=True, timeout=SECONDS, check=True
        )
        return outputs(json.loads(done.stdout))

    yield number, run


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, without a line for each; browsers take modules of this type alone."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def guess_type(self, path: Any) -> str:
        kinds = {".mjs": "text/javascript", ".wasm": "application/wasm", ".html": "text/html"}
        return kinds.get(Path(str(path)).suffix, "application/octet-stream")


@contextlib.contextmanager
def browser(build: str, provider: str = "wasm") -> Iterator[tuple[str, Run]]:
    """One build of onnxruntime-web in a headless Chromium."""
    from tests.browser import BROWSERS, chromium

    if not shutil.which("chromedriver") or not any(map(shutil.which, BROWSERS)):
        raise MissingError("no Chromium with its driver")
    load("selenium")
    folder, number = npm("onnxruntime-web")
    with chromium() as page, served(folder / "dist") as address:
        page.set_script_timeout(SECONDS)
        page.get(f"{address}/index.html")

        def run(path: Path, x: np.ndarray) -> Outputs:
            content = task(path, x, module=f"/{build}", providers=[provider])
            return outputs(page.execute_async_script(IN_PAGE, content))

        yield f"{number}, Chromium {page.capabilities['browserVersion'].partition('.')[0]}", run


IN_PAGE = """
const [{module, ...task}, done] = arguments;
(async () => {
  const [loaded, {run}] = await Promise.all([import(module), import('/run.mjs')]);
  const ort = loaded.default ?? loaded;
  ort.env.wasm.numThreads = 1;
  return run(ort, task);
})().then(done, (error) => done({error: String(error.message ?? error)}));
"""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder, the script and an empty page on this machine; yield their address."""

    class Files(Quiet):
        def translate_path(self, path: str) -> str:
            return str(SCRIPT) if path == "/run.mjs" else super().translate_path(path)

        def do_GET(self) -> None:
            if self.path != "/index.html":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>runtimes</title>")
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


WEB_BUILDS = ("ort.min.mjs", "ort.all.min.mjs", "ort.wasm.min.mjs", "ort.webgpu.min.mjs", "ort.jspi.min.mjs")
RUNTIMES: dict[str, Callable[[], contextlib.AbstractContextManager[tuple[str, Run]]]] = {
    "onnxruntime": onnxruntime,
    "OpenVINO": openvino,
    "tract": tract,
    "MNN": mnn,
    "onnx2torch": onnx2torch,
    "onnxruntime-node": partial(node, "onnxruntime-node", "dist/index.js"),
    "onnxruntime-web in Node": partial(node, "onnxruntime-web", "dist/ort.node.min.mjs", providers=["wasm"]),
    **{f"onnxruntime-web {build}": partial(browser, build) for build in WEB_BUILDS},
    "onnxruntime-web ort.webgl.min.mjs, WebGL": partial(browser, "ort.webgl.min.mjs", "webgl"),
    "onnxruntime-web ort.all.min.mjs, WebGL": partial(browser, "ort.all.min.mjs", "webgl"),
    "onnxruntime-web ort.webgpu.min.mjs, WebGPU": partial(browser, "ort.webgpu.min.mjs", "webgpu"),
}
