"""The service: answers, limits, hostile input, many clients, and a drain that loses nothing."""

import asyncio
import base64
import io
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest

from tests.deploy.files import COLORS, NAMES, png, write_file
from tests.deploy.service import PATIENCE, Process, form, predict, request, served, wait_until
from tests.export.colours import png_of
from tests.export.foreign import TAILS, WEIGHT, classifier
from topk_export import Predictor, attach
from topk_export.commands.serve import main
from topk_export.serve.app import DECODERS
from topk_export.serve.batching import Batcher

JSON = "application/json"


@pytest.fixture(scope="module")
def port(predictor):
    with served(predictor) as number:
        yield number


def first(answer):
    return answer["predictions"][0]


def name_of(answer):
    return first(answer)["top"][0]["name"]


def metric(text, name):
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[-1])


@pytest.mark.parametrize("color", ["red", "blue", NAMES[-1]])
def test_an_answer_is_the_predictors_own(port, predictor, color):
    status, answer = predict(port, png(COLORS[color]))
    (expected,) = predictor.predict([png(COLORS[color])])
    assert status == 200
    assert name_of(answer) == color
    assert first(answer)["top"][0]["marginal"] == pytest.approx(expected.top[0].marginal, rel=1e-5)
    assert [entry["index"] for entry in first(answer)["set"]] == [entry.index for entry in expected.set]
    assert first(answer)["set_size"] == expected.set_size


def test_images_come_as_body_form_or_json(port):
    colors = ["red", "green", "white"]
    images = [png(COLORS[color]) for color in colors]
    for body, kind in (form(images), (in_json(images), JSON)):
        status, answer = predict(port, body, kind=kind)
        assert status == 200
        assert [entry["top"][0]["name"] for entry in answer["predictions"]] == colors
    assert name_of(predict(port, images[1], kind="application/octet-stream")[1]) == "green"


def test_class_lists_and_alpha(port, predictor):
    x = png((120, 110, 60))
    (small,) = predictor.predict([x], alpha=0.5)
    (large,) = predictor.predict([x], alpha=0.005)
    assert small.set_size < large.set_size
    text = json.dumps({"images": [base64.b64encode(x).decode()], "alpha": 0.005, "allow": ["red", "pink"]}).encode()
    for body, kind, query in ((x, "image/png", "?alpha=0.005"), (*form([x], alpha="0.005"), "")):
        assert first(predict(port, body, query, kind)[1])["set_size"] == large.set_size
    for body, kind, query in (
        (x, "image/png", "?allow=red&allow=pink&alpha=0.005"),
        (*form([x], allow="red\r\n pink \n", alpha="0.005"), ""),
        (text, JSON, ""),
    ):
        answer = first(predict(port, body, query, kind)[1])
        assert {entry["name"] for entry in [*answer["top"], *answer["set"]]} <= {"red", "pink"}
        assert sum(entry["marginal"] for entry in answer["top"]) <= 1
    assert len(first(predict(port, x, "?alpha=0.005&max_set=1")[1])["set"]) == 1


def test_requests_of_different_alpha_and_lists_share_the_model(port, predictor):
    """Batches mix requests; each gets its own level and its own class list."""
    rng = np.random.default_rng(0)
    wanted = []
    for i in range(48):
        image, alpha = png(rng.integers(0, 256, 3)), (0.01, 0.1, 0.4)[i % 3]
        names = ["red", "blue", NAMES[i % 8]] if i % 2 else None
        wanted.append((image, alpha, names, predictor.predict([image], alpha=alpha, allowed=names)[0]))

    def ask(image, alpha, names, expected):
        fields = {"alpha": str(alpha)} | ({"allow": "\n".join(names)} if names else {})
        body, kind = form([image], **fields)
        answer = first(predict(port, body, kind=kind)[1])
        assert [entry["index"] for entry in answer["set"]] == [entry.index for entry in expected.set]

    with ThreadPoolExecutor(len(wanted)) as clients:
        list(clients.map(ask, *zip(*wanted, strict=True)))  # which raises what one of them raised


def test_health_page_metrics_and_model(port, set_file):
    for path in ("/", "/healthz"):
        status, _, headers = request(port, "HEAD", path)
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
    page = request(port, "GET", "/")[1]
    assert "<script>" in page
    assert "http://" not in page
    model = request(port, "GET", "/model")[1]
    assert model["class_names"] == list(NAMES)
    assert model["sets"]["guarantee"]
    assert str(set_file.parent) not in json.dumps(model)
    before = request(port, "GET", "/metrics")[1]
    predict(port, png(COLORS["red"]))
    after = request(port, "GET", "/metrics")[1]
    for name in ("topk_predict_seconds_count", "topk_images_total", 'topk_predict_seconds_bucket{le="60.0"}'):
        assert metric(after, name) == metric(before, name) + 1
    assert metric(after, "topk_predict_seconds_sum") > metric(before, "topk_predict_seconds_sum")
    assert metric(after, 'topk_requests_total{route="/predict",status="200"}') >= 1


PIXEL = png(COLORS["red"])
PART, PART_KIND = form([PIXEL])


def in_json(images):
    return json.dumps({"images": [base64.b64encode(image).decode() for image in images]}).encode()


def zip_bomb():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(20_000_000))
    return buffer.getvalue()


HOSTILE = {
    "empty body": (b"", "image/png", "", 400, "known format"),
    "no image": (b"hello", "image/png", "", 400, "known format"),
    "truncated image": (PIXEL[:45], "image/png", "", 400, "decoded"),
    "largest header": (png_of(2**31 - 1, 2**31 - 1), "image/png", "", 413, "pixels"),
    "PNG bomb": (png_of(30_000, 30_000, bytes(10**7)), "image/png", "", 413, "pixels"),
    "zip bomb": (zip_bomb(), "image/png", "", 400, "known format"),
    "no type": (PIXEL, "", "", 415, "none"),
    "type that begins as another": (PIXEL, "application/octet-stream-2", "", 415, "image/*"),
    "form without an image": (*form([], allow="red"), "", 400, "1 to 32"),
    "form with another field": (*form([PIXEL], other="x"), "", 400, "other"),
    "form with too many fields": (*form([PIXEL], **{f"field{i}": "x" for i in range(9)}), "", 400, "fields is 8"),
    "form with a text as the image": (*form([PIXEL], image="red.png"), "", 400, "files in fields named 'image'"),
    "form with a file in another field": (PART.replace(b'"image"', b'"file"'), PART_KIND, "", 400, "'file'"),
    "form without a boundary": (PIXEL, "multipart/form-data", "", 400, "form"),
    "form that is none": (b"\x00" * 100, "multipart/form-data; boundary=line", "", 400, ""),
    "too many images": (*form([PIXEL] * 33), "", 400, ""),
    "JSON of another shape": (b"[1, 2]", JSON, "", 400, "images"),
    "deep JSON": (b"[" * 100_000, JSON, "", 400, "expected application/json"),
    "JSON of nested objects": (b'{"a":' * 40 + b"1" + b"}" * 40, JSON, "", 400, "images"),
    "not base64": (b'{"images": ["%%%"]}', JSON, "", 400, "base64"),
    "unknown key": (b'{"images": [], "group": 1}', JSON, "", 400, "keys"),
    "allow of another type": (b'{"images": ["aaaa"], "allow": [1]}', JSON, "", 400, "allow"),
    "unknown class": (*form([PIXEL], allow="pnik"), "", 400, "'pnik'"),
    "empty list": (*form([PIXEL], allow="\n"), "", 400, "empty"),
    "alpha outside": (PIXEL, "image/png", "?alpha=0.7", 400, "0.005 to 0.5"),
    "alpha of another type": (PIXEL, "image/png", "?alpha=x", 400, "number"),
    "alpha beyond floats": (b'{"images": ["aaaa"], "alpha": 1%s}' % (b"0" * 400), JSON, "", 400, "number"),
    "alpha that is no number": (PIXEL, "image/png", "?alpha=nan", 400, "0.005 to 0.5"),
    "max_set": (PIXEL, "image/png", "?max_set=0", 400, "1 to 1000"),
    "max_set between integers": (PIXEL, "image/png", "?max_set=2.5", 400, "integer"),
    "unknown parameter": (PIXEL, "image/png", "?alpa=0.1", 400, "alpha, allow, max_set"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_or_wrong_input_is_a_clear_4xx(port, case):
    body, kind, query, status, word = HOSTILE[case]
    got, answer = predict(port, body, query, kind)
    assert (got, case) == (status, case)
    assert word in answer["detail"]
    assert predict(port, PIXEL)[0] == 200  # and the service goes on


@pytest.mark.parametrize("name", ["../../etc/passwd", "<script>alert(1)</script>.png", "a\u202eb.png", "x" * 1000])
def test_file_names_have_no_effect(port, name):
    body, kind = form([PIXEL], filename=name)
    assert name_of(predict(port, body, kind=kind)[1]) == "red"
    body, kind = form([b"no image"], filename=name)
    status, answer = predict(port, body, kind=kind)
    assert status == 400
    assert name not in json.dumps(answer)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "word"),
    [
        ("GET", "/nothing", {}, 404, ""),
        ("GET", "/predict", {}, 405, ""),
        ("GET", "/model", {"Host": "evil.example"}, 400, "--allowed-host"),
        ("GET", "/model", {"Host": "[::1"}, 400, "host"),
        ("POST", "/predict", {"Origin": "http://evil.example"}, 403, "other sites"),
        ("POST", "/predict", {"Origin": "http://["}, 403, "other sites"),
        ("POST", "/predict", {"Origin": "null"}, 403, "other sites"),
        ("POST", "/predict", {"Content-Encoding": "gzip", "Content-Type": "image/png"}, 415, "gzip"),
    ],
)
def test_requests_that_are_not_answered(port, method, path, headers, status, word):
    got, answer, _ = request(port, method, path, b"x" if method == "POST" else None, headers)
    assert got == status
    assert word in answer["detail"]


def test_hosts_of_loopback(port):
    for host in ("localhost:1", "LOCALHOST", f"127.0.0.1:{port}", "[::1]:80"):
        assert request(port, "HEAD", "/", headers={"Host": host})[0] == 200
    assert request(port, "GET", "/healthz", headers={"Host": "10.1.2.3:8000"})[0] == 200  # as orchestrators ask


def test_the_limits_in_force_are_cited(set_file):
    predictor = Predictor(set_file, device="cpu", threads=1, max_pixels=500)
    with served(predictor, body_bytes=1000, images=4) as port:
        assert "1000 bytes" in predict(port, b"x" * 1001)[1]["detail"]
        status, answer = predict(port, png(COLORS["red"], (30, 30)))
        assert (status, "500" in answer["detail"]) == (413, True)
        assert "1 to 4 images, got 5" in predict(port, in_json([PIXEL] * 5), kind=JSON)[1]["detail"]


def test_a_body_of_unknown_length_is_counted(port):
    def endless():
        for _ in range(200):
            yield b"x" * 100_000

    status, answer, _ = request(port, "POST", "/predict", endless(), {"Content-Type": "image/png"})
    assert status == 413
    assert "10000000 bytes" in answer["detail"]


class Gate:
    """A predictor whose runs wait after the first one."""

    def __init__(self, predictor):
        self._inner, self.open, self.runs = predictor, threading.Event(), 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def run(self, *args, **options):
        self.runs += 1
        assert self.runs == 1 or self.open.wait(PATIENCE)
        return self._inner.run(*args, **options)


def test_a_full_queue_is_503_and_health_stays_200(predictor):
    gate = Gate(predictor)
    with served(gate, queue=4, images=4, batch=2) as port:
        clients = ThreadPoolExecutor(4)
        answers = [clients.submit(predict, port, PIXEL) for _ in range(4)]
        wait_until(lambda: "topk_images_in_progress 4.0" in request(port, "GET", "/metrics")[1])
        status, answer, headers = request(port, "POST", "/predict", PIXEL, {"Content-Type": "image/png"})
        assert status == 503
        assert "limit is 4" in answer["detail"]
        assert headers["retry-after"] == "1"
        assert request(port, "GET", "/healthz")[0] == 200
        gate.open.set()
        found = [answer.result(PATIENCE) for answer in answers]
        assert [(status, name_of(answer)) for status, answer in found] == [(200, "red")] * 4
        wait_until(lambda: "topk_images_in_progress 0.0" in request(port, "GET", "/metrics")[1])


class SlowDecoder:
    """A predictor that cannot read its first image, and waits while it reads the others."""

    def __init__(self, predictor):
        self._inner = predictor
        self.open = threading.Event()
        self.read = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def input_of(self, image):
        self.read.append(image)
        assert image == b"broken" or self.open.wait(PATIENCE)
        return self._inner.input_of(image)


def test_an_error_of_one_image_ends_the_work_on_the_others_of_the_request(predictor):
    """Otherwise images of answered requests fill the queue of the decoders, and no limit counts them."""
    slow = SlowDecoder(predictor)
    with served(slow, images=32) as port:
        body, kind = form([b"broken"] + [PIXEL] * 31)
        assert predict(port, body, kind=kind)[0] == 400
        slow.open.set()
    assert len(slow.read) <= 1 + DECODERS


def test_a_request_in_progress_is_answered_before_the_server_stops(predictor):
    gate = Gate(predictor)
    with ThreadPoolExecutor(1) as clients, served(gate) as port:
        answer = clients.submit(predict, port, PIXEL)
        wait_until(lambda: "topk_images_in_progress 1.0" in request(port, "GET", "/metrics")[1])
        threading.Timer(0.3, gate.open.set).start()
    status, content = answer.result()
    assert (status, name_of(content)) == (200, "red")


def test_a_late_answer_is_503(predictor):
    gate = Gate(predictor)
    with served(gate, request_seconds=0.3) as port:
        status, answer = predict(port, PIXEL)
        assert (status, "0.3 s" in answer["detail"]) == (503, True)
        gate.open.set()
        wait_until(lambda: "topk_images_in_progress 0.0" in request(port, "GET", "/metrics")[1])
        assert predict(port, PIXEL)[0] == 200


def test_a_file_without_sets_or_lists(tmp_path):
    bare = Predictor(write_file(tmp_path / "bare.onnx", lists=False), device="cpu", threads=1)
    with served(bare) as port:
        answer = first(predict(port, PIXEL)[1])
        assert answer["set"] is None
        assert "calibrate" in predict(port, PIXEL, "?alpha=0.1")[1]["detail"]
        status, answer = predict(port, PIXEL, "?allow=red")
        assert status == 400
        assert "class lists" in answer["detail"]


def test_a_host_that_is_not_loopback_needs_names(set_file, capsys):
    with pytest.raises(SystemExit) as error:
        main([str(set_file), "--host", "0.0.0.0"])
    assert error.value.code == 2
    assert "--allowed-host" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_stays_bounded_and_no_file_is_written_under_hostile_input(set_file, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Process(set_file) as service:
        predict(service.port, PIXEL)
        before = service.memory()
        for _ in range(3):
            for body, kind, query, status, _word in HOSTILE.values():
                assert predict(service.port, body, query, kind)[0] == status
        assert service.memory() - before < 150_000_000
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    """A service of a file that takes arrays, without sets."""
    folder = tmp_path_factory.mktemp("arrays")
    onnx.save(classifier(TAILS["softmax"]), str(folder / "m.onnx"))
    with served(Predictor(attach(folder / "m.onnx", folder / "o.onnx", k=2), device="cpu"), images=8) as port:
        yield port


def ask(port, content, kind=JSON):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    status, answer, _ = request(port, "POST", "/predict", body, {"Content-Type": kind})
    return status, answer


def test_rows_of_arrays(arrays):
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    status, answer = ask(arrays, {"inputs": {"x": x.tolist()}, "allow": ["1", "2", "3"]})
    assert status == 200
    best = (x @ WEIGHT)[:, 1:4].argmax(-1) + 1
    assert [row["top"][0]["index"] for row in answer["predictions"]] == best.tolist()


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ({"inputs": {"x": [[1, 2, 3]]}}, 400, "takes tensor(float) ['batch', 4], got int64 [1, 3]"),
        ({"inputs": {"y": [[1, 2, 3, 4]]}}, 400, "takes the inputs x, got y"),
        ({"inputs": [[1, 2, 3, 4]]}, 400, "by name: x"),
        ({"inputs": {"x": [[1, 2, 3, "a"]]}}, 400, "the input x takes"),
        ({"inputs": {"x": [[1, 2], [3]]}}, 400, "expected application/json with 'inputs'"),
        ({"images": []}, 400, "not an object with these keys"),
        ({"inputs": {"x": [[1, 2, 3, 4]] * 9}}, 400, "expected 1 to 8 rows, got 9"),
        ({"inputs": {"x": []}}, 400, "the input x takes"),
        (b"{", 400, "expected application/json"),
    ],
)
def test_arrays_that_do_not_fit(arrays, content, status, message):
    got, answer = ask(arrays, content)
    assert got == status
    assert message in answer["detail"]


def test_a_wrong_row_does_not_fail_the_other_rows_of_its_batch(tmp_path):
    """The operator Gather rejects an index outside of its table, and with it the whole run."""
    model = classifier([("Gather", ["table", "z"], ["y"], {})], axes=["b"])
    model.graph.node[0].CopyFrom(onnx.helper.make_node("Identity", ["x"], ["z"]))
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["b", 7]))
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(5 * np.eye(7, dtype=np.float32) - 1, "table"))
    onnx.save(model, str(tmp_path / "m.onnx"))
    rows = np.arange(7)
    predictor = Predictor(attach(tmp_path / "m.onnx", tmp_path / "o.onnx", k=2, inputs={"x": rows}), device="cpu")

    async def ask_all():
        batcher = Batcher(predictor, 16, 10)
        asked = [batcher({"x": x}) for x in np.array([3, 99, 5])]
        try:
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await batcher.stop()

    first, wrong, last = asyncio.run(ask_all())
    assert (first.top[0].index, last.top[0].index) == (3, 5)
    assert "indices element out of data bounds" in str(wrong)


def test_a_model_of_arrays_has_no_page_and_takes_no_images(arrays):
    assert request(arrays, "GET", "/")[0] == 404
    assert ask(arrays, b"x", "image/png")[0] == 415
    status, facts, _ = request(arrays, "GET", "/model")
    assert status == 200
    assert facts["inputs"] == {"x": ["tensor(float)", ["b", 4]]}
