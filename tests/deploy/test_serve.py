"""The service: answers, limits, hostile input, many clients, and a drain that loses nothing."""

import base64
import contextlib
import http.client
import io
import itertools
import json
import socket
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from PIL import Image

from tests.deploy.files import COLORS, NAMES, png, write_file
from tests.deploy.service import PATIENCE, Process, form, predict, read, request, served, wait_until
from tests.export.colours import png_of
from tests.export.foreign import TAILS, WEIGHT, classifier
from topk_export import Predictor, attach
from topk_export.commands.serve import main

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
    encoded = json.dumps({"images": [base64.b64encode(image).decode() for image in images]}).encode()
    for body, kind in (form(images), (encoded, JSON)):
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


def zip_bomb():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(20_000_000))
    return buffer.getvalue()


HOSTILE = {
    "empty body": (b"", "image/png", "", 400, "image 1 of 1 is empty"),
    "no image": (b"hello", "image/png", "", 400, "known format"),
    "truncated image": (PIXEL[:45], "image/png", "", 400, "decoded"),
    "largest header": (png_of(2**31 - 1, 2**31 - 1), "image/png", "", 413, "pixels"),
    "PNG bomb": (png_of(30_000, 30_000, bytes(10**7)), "image/png", "", 413, "25000000"),
    "images that are too large together": (*form([png_of(4900, 4900)] * 5), "", 413, "together"),
    "zip bomb": (zip_bomb(), "image/png", "", 400, "known format"),
    "zip as a form": (zip_bomb(), "application/zip", "", 415, "Content-Type"),
    "no type": (PIXEL, "", "", 415, "none"),
    "form without an image": (*form([], allow="red"), "", 400, "1 to 32"),
    "form with another field": (*form([PIXEL], other="x"), "", 400, "other"),
    "form without a boundary": (PIXEL, "multipart/form-data", "", 400, "form"),
    "form that is none": (b"\x00" * 100, "multipart/form-data; boundary=line", "", 400, ""),
    "too many images": (*form([PIXEL] * 33), "", 400, ""),
    "too many images in JSON": (json.dumps({"images": ["aa=="] * 33}).encode(), JSON, "", 400, "1 to 32"),
    "JSON of another shape": (b"[1, 2]", JSON, "", 400, "images"),
    "deep JSON": (b"[" * 100_000, JSON, "", 400, "32 images"),
    "JSON of nested objects": (b'{"a":' * 40 + b"1" + b"}" * 40, JSON, "", 400, "images"),
    "not base64": (b'{"images": ["%%%"]}', JSON, "", 400, "base64"),
    "unknown key": (b'{"images": [], "group": 1}', JSON, "", 400, "keys"),
    "allow of another type": (b'{"images": ["aaaa"], "allow": [1]}', JSON, "", 400, "allow"),
    "unknown class": (*form([PIXEL], allow="pnik"), "", 400, "'pnik'"),
    "unknown class of great length": (*form([PIXEL], allow="x" * 1000), "", 400, "'xxx"),
    "more names than classes": (*form([PIXEL], allow="red\n" * 9), "", 400, "8 classes"),
    "a list of great length": (*form([PIXEL], allow="x\n" * 1_000_000), "", 400, "8 classes"),
    "many values in JSON": (b'{"images": ["aaaa"], "allow": [%s1]}' % (b"1," * 100), JSON, "", 400, "8 class names"),
    "empty list": (*form([PIXEL], allow="\n"), "", 400, "empty"),
    "alpha outside": (PIXEL, "image/png", "?alpha=0.7", 400, "0.005 to 0.5"),
    "alpha of another type": (PIXEL, "image/png", "?alpha=x", 400, "number"),
    "alpha beyond floats": (b'{"images": ["aaaa"], "alpha": 1%s}' % (b"0" * 400), JSON, "", 400, "number"),
    "alpha that is no number": (PIXEL, "image/png", "?alpha=nan", 400, "number"),
    "max_set": (PIXEL, "image/png", "?max_set=0", 400, "1 to 1000"),
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
        ("GET", "/healthz?verbose=1", {}, 400, "none"),
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


def test_the_limits_in_force_are_cited(predictor):
    with served(predictor, body_bytes=1000, pixels=500, request_pixels=900, images=4, header_seconds=0.5) as port:
        assert "1000 bytes" in predict(port, b"x" * 1001)[1]["detail"]
        assert "500" in predict(port, png(COLORS["red"], (30, 30)))[1]["detail"]
        status, answer = predict(port, form([png(COLORS["red"], (20, 20))] * 3)[0], kind=form([])[1])
        assert (status, "900" in answer["detail"]) == (413, True)


def test_a_gigabyte_that_is_announced_is_not_awaited(port):
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000000000\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert " 413 " in answer.splitlines()[0]
    assert "10000000 bytes" in answer


def test_a_body_of_unknown_length_is_counted(port):
    def endless():
        for _ in range(200):
            yield b"x" * 100_000

    status, answer, _ = request(port, "POST", "/predict", endless(), {"Content-Type": "image/png"})
    assert status == 413
    assert "10000000 bytes" in answer["detail"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/predict", {"Content-Type": "image/png"}, 413),
        ("/predict", {"Content-Type": "image/png", "Origin": "http://evil.example"}, 403),
        ("/predict", {"Host": "evil.example"}, 400),
        ("/nothing", {}, 404),
    ],
)
def test_a_client_that_sends_a_long_body_gets_the_answer(port, path, headers, status):
    """In place of a reset connection: ``http.client`` reads the answer after it has sent the whole body."""
    got, answer, _ = request(port, "POST", path, b"x" * 12_000_000, headers)
    assert got == status
    assert answer["detail"]


def test_a_client_that_goes_away_while_its_body_is_discarded_stops_nothing(port):
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000000\r\n\r\nabc")
        assert b" 413 " in connection.recv(65536)
    assert predict(port, PIXEL)[0] == 200


def test_slow_clients_are_disconnected(predictor):
    with served(predictor, header_seconds=0.4, body_seconds=0.4) as port:
        for sent, status in (
            (b"", None),
            (b"GET /healthz HTTP/1.1\r\nHost: loc", None),
            (
                b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 9\r\n\r\nx",
                408,
            ),
            (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),  # idle after its answer
        ):
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(sent)
                content = b""
                while chunk := connection.recv(65536):
                    content += chunk
            assert (f" {status} " in content.decode()) if status else not content


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


def test_a_late_answer_is_503(predictor):
    gate = Gate(predictor)
    with served(gate, request_seconds=0.3) as port:
        status, answer = predict(port, PIXEL)
        assert (status, "0.3 s" in answer["detail"]) == (503, True)
        gate.open.set()
        wait_until(lambda: "topk_images_in_progress 0.0" in request(port, "GET", "/metrics")[1])
        assert predict(port, PIXEL)[0] == 200


def test_bodies_in_memory_are_limited(predictor):
    with served(predictor, total_bytes=100, body_bytes=1000) as port:
        status, answer = predict(port, b"x" * 200)
        assert (status, "bodies" in answer["detail"]) == (503, True)
        assert predict(port, b"x" * 50)[0] == 400  # the budget was returned


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


def one_bit_png(width, height):
    """A black image in 1-bit PNG: 25 million pixels in 4 kB."""
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def in_json(images, **options):
    return json.dumps({"images": [base64.b64encode(image).decode() for image in images], **options}).encode()


SMALL_ATTACKS = {
    "strips": lambda: in_json([one_bit_png(1, 380)] * 4),
    "strips across": lambda: in_json([one_bit_png(380, 1)] * 4),
    "bombs": lambda: in_json([one_bit_png(4990, 4990)] * 4),
    "single bombs": lambda: in_json([one_bit_png(4990, 4990)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", SMALL_ATTACKS)
def test_an_ordinary_request_is_fast_while_tiny_requests_arrive_that_are_expensive(attack, tmp_path):
    body = SMALL_ATTACKS[attack]()
    assert len(body) < 30_000
    picture = png((200, 20, 20), (640, 480))
    with Process(write_file(tmp_path / "large.onnx", side=224)) as service:
        predict(service.port, picture)
        ask = threading.Event()

        def send():
            with contextlib.suppress(OSError, http.client.HTTPException):  # the service ends before it answers all
                predict(service.port, body, kind=JSON)

        def flood():
            while not ask.wait(0.1):
                threading.Thread(target=send, daemon=True).start()

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            time.sleep(2)  # the queue fills
            for _ in range(10):
                start = time.perf_counter()
                status, answer = predict(service.port, picture)
                assert (status, name_of(answer)) == (200, "red")
                assert time.perf_counter() - start < 1
                time.sleep(0.1)
        finally:
            ask.set()
            thread.join()
        assert service.memory() < 1_500_000_000


LONG_BODIES = {
    "names": lambda: b'{"images": ["aaaa"], "allow": [%s"red"]}' % (b'"red",' * 1_500_000),
    "lists": lambda: b'{"images": [%s[]]}' % (b"[]," * 3_000_000),
    "objects": lambda: b'{"images": [%s{}]}' % (b"{}," * 3_000_000),
    "base64": lambda: b'{"images": ["%s"]}' % (b"aaaa" * 2_250_000),
    "lines": lambda: b'{"images": ["aaaa"], "allow": ["%s"]}' % (b"a\\n" * 3_000_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG_BODIES)
def test_bodies_of_9_megabytes_do_not_block_the_event_loop(kind, set_file):
    body = LONG_BODIES[kind]()
    with Process(set_file) as service, ThreadPoolExecutor(4) as clients:
        request(service.port, "GET", "/healthz")
        answers = [clients.submit(predict, service.port, body, "", JSON) for _ in range(4)]
        slowest, count = 0.0, 0
        while count < 10 or not all(answer.done() for answer in answers):
            start = time.perf_counter()
            assert request(service.port, "GET", "/healthz")[0] == 200
            slowest, count = max(slowest, time.perf_counter() - start), count + 1
        assert {answer.result()[0] for answer in answers} == {400}
        assert slowest < 1


def keep_asking(port, color, seconds, tally):
    """Ask on one connection after another; count right and wrong answers, refusals, and lost requests."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            connection.connect()
        except OSError:
            tally["refused"] += 1
            return
        with contextlib.closing(connection):
            for number in itertools.count():
                try:
                    connection.request("POST", "/predict", png(COLORS[color]), {"Content-Type": "image/png"})
                    status, answer, headers = read(connection.getresponse())
                except (OSError, http.client.HTTPException):
                    # a first request may be on a connection that waited in the listener's queue: it was not accepted
                    tally["lost" if number else "refused"] += 1
                    return
                right = status == 200 and name_of(answer) == color
                tally["right" if right else "busy" if status == 503 else "wrong"] += 1
                if headers.get("connection") == "close" or time.monotonic() > end:
                    break


def crowd(port, seconds, clients=32):
    tallies = [dict.fromkeys(("right", "wrong", "busy", "refused", "lost"), 0) for _ in range(clients)]
    colors = [name for name in COLORS if name != "black"]
    threads = [
        threading.Thread(target=keep_asking, args=(port, colors[i % len(colors)], seconds, tally))
        for i, tally in enumerate(tallies)
    ]
    for thread in threads:
        thread.start()
    return threads, tallies


def total(tallies, name):
    return sum(tally[name] for tally in tallies)


@pytest.mark.slow
def test_32_clients_get_their_own_answers(set_file):
    with Process(set_file) as service:
        threads, tallies = crowd(service.port, 8)
        for thread in threads:
            thread.join(PATIENCE)
        assert total(tallies, "wrong") == total(tallies, "lost") == total(tallies, "refused") == 0
        assert all(tally["right"] > 0 for tally in tallies)


@pytest.mark.slow
def test_sigterm_under_load_loses_no_accepted_request(set_file):
    with Process(set_file) as service:
        threads, tallies = crowd(service.port, 20)
        wait_until(lambda: total(tallies, "right") > 200)
        idle = socket.create_connection(("127.0.0.1", service.port))
        service.terminate()
        assert service.process.wait(PATIENCE) == 0
        for thread in threads:
            thread.join(PATIENCE)
        assert total(tallies, "lost") == total(tallies, "wrong") == 0
        assert total(tallies, "right") > 200
        assert total(tallies, "refused") <= len(tallies)
        assert idle.recv(1) == b""
        idle.close()


def test_uploads_stay_in_memory(port, monkeypatch):
    """No file in a folder that other users share."""
    import tempfile

    def fail(*_):
        raise AssertionError("a file was written")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", fail)
    rng = np.random.default_rng(0)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (1000, 1000, 3), np.uint8)).save(buffer, "PNG")
    assert len(buffer.getvalue()) > 2**21
    body, kind = form([buffer.getvalue()])
    assert predict(port, body, kind=kind)[0] == 200


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    """A service of a file that takes arrays, without sets."""
    folder = tmp_path_factory.mktemp("arrays")
    onnx.save(classifier(TAILS["softmax"]), str(folder / "m.onnx"))
    with served(
        Predictor(attach(folder / "m.onnx", folder / "o.onnx", k=2), device="cpu"), images=8, values=100
    ) as port:
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
        ({"inputs": {"x": [[1, 2, 3]]}}, 400, "takes tensor(float) ['batch', 4], got float32 [1, 3]"),
        ({"inputs": {"y": [[1, 2, 3, 4]]}}, 400, "takes the inputs x, got y"),
        ({"inputs": [[1, 2, 3, 4]]}, 400, "by name: x"),
        ({"inputs": {"x": [[1, 2, 3, "a"]]}}, 400, "the input x takes"),
        ({"inputs": {"x": [[1, 2], [3]]}}, 400, "expected application/json with 'inputs'"),
        ({"images": []}, 400, "not an object with these keys"),
        ({"inputs": {"x": [[1, 2, 3, 4]] * 9}}, 400, "expected 1 to 8 rows, got 9"),
        ({"inputs": {"x": []}}, 400, "the input x takes"),
        ({"inputs": {"x": [[1, 2, 3, 4]] * 30}}, 413, "more than 100 values"),
        (b"{", 400, "expected application/json"),
    ],
)
def test_arrays_that_do_not_fit(arrays, content, status, message):
    got, answer = ask(arrays, content)
    assert got == status
    assert message in answer["detail"]


def test_a_model_of_arrays_has_no_page_and_takes_no_images(arrays):
    assert request(arrays, "GET", "/")[0] == 404
    assert ask(arrays, b"x", "image/png")[0] == 415
    status, facts, _ = request(arrays, "GET", "/model")
    assert status == 200
    assert facts["inputs"] == {"x": ["tensor(float)", ["b", 4]]}
