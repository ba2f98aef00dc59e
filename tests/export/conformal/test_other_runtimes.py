"""The calibrated file gives the same numbers in OpenVINO and in a browser as in onnxruntime."""

import http.server
import os
import threading
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

from tests.browser import chromium, complaints
from tests.conformal.rows import model_rows
from tests.export.colours import COLOURS, exported
from topk_export import Predictor
from topk_export.calibration.graph import add_sets, set_model
from topk_export.calibration.plan import Plan
from topk_export.calibration.run import calibrate_file
from topk_export.errors import ExportError
from topk_export.samples import open_folder
from topk_export.serve.site import find_runtime, write_site
from topk_registry.conformal import PredictionSets, Thresholds, create_score

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-4  # of each output, relative to its largest value
SETS = {
    "lac": PredictionSets(create_score("lac"), Thresholds(0.9437)),
    "raps": PredictionSets(create_score("raps", penalty=0.05, k_reg=2), Thresholds(0.9571), 1.7),
    "saps": PredictionSets(create_score("saps", weight=0.11), Thresholds(0.7737)),
    "topk": PredictionSets(create_score("topk"), Thresholds(4.5)),
    "log_odds": PredictionSets(create_score("log_odds", k=5), Thresholds(1.2345), allow_empty=True),
    "pas": PredictionSets(create_score("pas", prior=(0.06,) * 8 + (0.13,) * 4), Thresholds(-0.61237)),
    "per class": PredictionSets(create_score("aps"), Thresholds(np.r_[np.linspace(0.8, 0.97, 11), np.inf])),
    "rc3p": PredictionSets(create_score("aps"), Thresholds(np.linspace(0.8, 0.97, 12), np.arange(12) % 4 + 1)),
}


def assert_close(got, expected):
    for name, value in expected.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(got[name], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SETS)
def test_openvino(colours_file, name):
    """The heads on rows of logits, one dominant class among them. Ties are left out: OpenVINO ranks them otherwise."""
    openvino = pytest.importorskip("openvino")
    model = set_model(add_sets(onnx.load(str(colours_file)), SETS[name], 12, max_size=12))
    logits = model_rows(20, 12)[0].astype(np.float32)
    logits[-1, 3] = 60.0
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    expected = dict(zip(names, session.run(names, {"logits": logits}), strict=True))
    core = openvino.Core()
    # single precision, as onnxruntime: OpenVINO may take half of it on some processors
    compiled = core.compile_model(
        core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    result = compiled({"logits": logits})
    assert_close({output: result[output] for output in names}, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openvino_runs_the_whole_file(colours_file, held_out, tmp_path):
    openvino = pytest.importorskip("openvino")
    samples = open_folder(held_out, tuple(COLOURS))
    calibrate_file(colours_file, tmp_path / "model.onnx", samples, Plan("raps"), device="cpu")
    predictor = Predictor(tmp_path / "model.onnx", device="cpu")
    x = predictor.preprocess(samples.images[::40])
    expected = predictor.run(x)
    core = openvino.Core()
    compiled = core.compile_model(str(tmp_path / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    result = compiled([x])
    assert_close({name: result[name] for name in expected}, expected)


@pytest.fixture(scope="module")
def runtime():
    """The folder of onnxruntime-web: $ONNXRUNTIME_WEB, or node_modules of the checkout."""
    folder = os.environ.get("ONNXRUNTIME_WEB") or ROOT
    try:
        return find_runtime(folder)
    except ExportError:
        (pytest.fail if "ONNXRUNTIME_WEB" in os.environ else pytest.skip)(f"no onnxruntime-web in {folder}")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, without a line for each; browsers take modules of this type alone."""

    extensions_map: ClassVar[dict[str, str]] = {
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".html": "text/html",
        "": "application/json",
    }

    def log_message(self, format, *args):
        pass


@pytest.fixture
def served(tmp_path):
    """A folder that a web server on this machine gives out, and its address."""
    folder = tmp_path / "www"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(60)


def test_the_browser(runtime, held_out, tmp_path, served):
    folder, url = served
    rng = np.random.default_rng(0)
    images = [tmp_path / f"{i}.png" for i in range(3)]
    for path, size in zip(images, ((61, 87), (32, 40), (9, 120)), strict=True):  # shrunk, kept, enlarged
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)
    with chromium() as browser:
        for preprocess in ("metadata", "in-graph"):
            model = exported(
                tmp_path / preprocess / "colours.onnx", preprocess=preprocess, external_data=preprocess == "in-graph"
            )
            calibrated = tmp_path / preprocess / "sets.onnx"
            calibrate_file(model, calibrated, open_folder(held_out, tuple(COLOURS)), Plan("raps"), device="cpu")
            write_site(calibrated, folder / preprocess, runtime)
            browser.get(f"{url}/{preprocess}/index.html")
            assert_page_agrees(browser, Predictor(calibrated, device="cpu"), images)
        assert complaints(browser) == []


def assert_page_agrees(browser, predictor, images):
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, 60, poll_frequency=0.05)
    wait.until(lambda b: "loading" not in b.find_element("id", "about").text)
    assert "12 classes" in browser.find_element("id", "about").text
    for path in images:
        browser.execute_script("window.outputs = null")
        browser.find_element("id", "file").send_keys(str(path))
        got = wait.until(lambda b: b.execute_script("return window.outputs"))
        expected = predictor.run(predictor.preprocess([path]))
        assert_close({name: np.reshape(got[name], value.shape) for name, value in expected.items()}, expected)
        (prediction,) = predictor([path])
        shown = ", ".join(ranked.name for ranked in prediction.set)
        assert browser.find_element("id", "set").text == f"Prediction set of {prediction.set_size}: {shown}"


def test_a_runtime_that_is_not_there_is_told(colours_file, tmp_path):
    with pytest.raises(ExportError, match="npm install onnxruntime-web, and name its node_modules folder"):
        write_site(colours_file, tmp_path / "site", tmp_path)
