"""The service gives several labels, and its page shows them."""

import http.server
import json
import threading
from functools import partial

import numpy as np
import pytest

from tests.browser import chromium, complaints
from tests.export.colours import encoded
from tests.export.serve.service import form, predict, request, served, wait_until
from topk_export import Predictor
from topk_export.serve.site import RUNTIME, write_site

pytest.importorskip("fastapi")


@pytest.fixture
def image(held_out):
    from PIL import Image

    return encoded(Image.fromarray(held_out.images[1]))


def test_answers(calibrated_labels, image, tmp_path):
    predictor = Predictor(calibrated_labels[0], device="cpu", threads=1)
    (expected,) = predictor([image])
    with served(predictor, log=str(tmp_path / "log")) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        status, answer = predict(port, image)
        assert status == 200
        assert set(answer) == {"k", "top", "labels", "set", "set_size", "milliseconds"}
        for name in ("top", "labels", "set"):
            assert [ranked["name"] for ranked in answer[name]] == [ranked.name for ranked in getattr(expected, name)]
        assert answer["top"][0]["probability"] == pytest.approx(expected.top[0].probability)
        body, headers = form(image)
        status, several, _ = request(port, "POST", "/predictions?max_set=1", body, headers)
        assert status == 200
        assert [len(found["set"]) for found in several["predictions"]] == [min(1, expected.set_size)]
        for route, content in (("/predict", image), ("/predictions", body)):
            kind = {"Content-Type": "image/png"} if route == "/predict" else headers
            status, refused, _ = request(port, "POST", f"{route}?softmax_mass=0.9", content, kind)
            assert status == 400
            assert "a softmax mass is of files with one label an image" in refused["detail"]
        _, model, _ = request(port, "GET", "/model")
        assert model["task"] == "multilabel"
        assert model["labels"]["thresholds"] == predictor.metadata.labels["thresholds"]
        _, schema, _ = request(port, "GET", "/openapi.json")
        assert "labels" in schema["components"]["schemas"]["LabelsAnswer"]["properties"]
        assert schema["info"]["description"] == "Channels of 7 classes, several an image."
        _, found, _ = request(port, "GET", f"/v2/models/{predictor.name}")
        assert tuple(output["name"] for output in found["outputs"]) == predictor.output_names
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["size"] for line in lines] == [expected.set_size] * 2


@pytest.mark.slow
def test_the_page(calibrated_labels, held_out, tmp_path):
    from PIL import Image

    picture = tmp_path / "a.png"
    Image.fromarray(held_out.images[1]).save(picture)
    predictor = Predictor(calibrated_labels[0], device="cpu", threads=1)
    (expected,) = predictor([picture])
    with served(predictor) as port, chromium() as browser:
        from selenium.webdriver.support.ui import WebDriverWait

        browser.get(f"http://127.0.0.1:{port}/")
        browser.find_element("id", "file").send_keys(str(picture))
        wait = WebDriverWait(browser, 20, poll_frequency=0.05)
        shown = wait.until(lambda b: b.find_element("id", "labels").text)
        assert shown == "Labels: " + (", ".join(ranked.name for ranked in expected.labels) or "none")
        assert browser.find_element("id", "set").text == "Set: " + ", ".join(ranked.name for ranked in expected.set)
        assert "at most 0.1 in expectation" in browser.find_element("id", "promise").text
        assert browser.find_element("tag name", "h1").text == "Several labels"
        assert not browser.find_element("id", "mass").is_displayed()
        rows = browser.find_elements("css selector", "#rows tr")
        assert [row.find_element("tag name", "th").text for row in rows] == [ranked.name for ranked in expected.top]
        assert complaints(browser) == []


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


# stands for onnxruntime-web: it gives the outputs of a run that was made before
STUB = """
export const env = { wasm: {} };
export class Tensor { constructor(type, data, dims) { Object.assign(this, { type, data, dims }); } }
const outputs = OUTPUTS;
export const InferenceSession = { create: async () => ({ inputNames: ["input"], run: async () => outputs }) };
"""


@pytest.mark.slow
def test_the_page_for_browsers_alone(calibrated_labels, held_out, tmp_path):
    from PIL import Image

    picture = tmp_path / "a.png"
    Image.fromarray(held_out.images[1]).save(picture)
    predictor = Predictor(calibrated_labels[0], device="cpu", threads=1)
    outputs = predictor.run(predictor.preprocess([picture]))
    (expected,) = predictor([picture])
    runtime = tmp_path / "onnxruntime-web"
    runtime.mkdir()
    for name in RUNTIME:
        (runtime / name).write_text("")
    values = {name: {"data": np.asarray(value).ravel().tolist()} for name, value in outputs.items()}
    (runtime / RUNTIME[0]).write_text(STUB.replace("OUTPUTS", json.dumps(values)))
    write_site(calibrated_labels[0], tmp_path / "www", runtime)
    handler = partial(Quiet, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        from selenium.webdriver.support.ui import WebDriverWait

        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.get(f"http://127.0.0.1:{server.server_port}/index.html")
            wait = WebDriverWait(browser, 60, poll_frequency=0.05)
            wait.until(lambda b: "loading" not in b.find_element("id", "about").text)
            assert "Guarantee of the sets: the share of an image's" in browser.find_element("id", "about").text
            browser.find_element("id", "file").send_keys(str(picture))
            shown = wait.until(lambda b: b.find_element("id", "labels").text)
            assert shown == "Labels: " + (", ".join(ranked.name for ranked in expected.labels) or "none")
            names = ", ".join(ranked.name for ranked in expected.set) or "none"
            assert browser.find_element("id", "set").text == f"Set of {expected.set_size}: {names}"
            assert browser.find_element("id", "share").text == "Probability"
            rows = [row.text.split() for row in browser.find_elements("css selector", "#rows tr")]
            assert rows == [[ranked.name, f"{ranked.probability:.4f}"] for ranked in expected.top]
            assert complaints(browser) == []
        finally:
            server.shutdown()
            thread.join(60)
