"""The HTTP service: answers, limits, errors, batching, metrics, shutdown."""

import itertools
import json
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.export.colours import COLOURS, K, encoded, noise, png, png_of
from tests.export.serve.service import Held, Service, batches, form, predict, request, served, wait_until
from topk_export.commands import bench
from topk_export.serve import loadtest
from topk_export.serve.server import listen


def test_health_readiness_and_the_model(service):
    assert request(service.port, "GET", "/healthz")[:2] == (200, {"status": "ok"})
    assert request(service.port, "GET", "/readyz")[:2] == (200, {"status": "ready"})
    status, model, headers = request(service.port, "GET", "/model")
    assert status == 200
    assert (model["k"], model["device"], model["class_names"]) == (K, "cpu", list(COLOURS))
    assert headers["x-content-type-options"] == "nosniff"


def test_it_answers_as_the_predictor_does(service, predictor):
    image = encoded(Image.fromarray(noise(80, 90)), "JPEG")
    status, answer = predict(service.port, image, query="?softmax_mass=0.8", kind="image/jpeg")
    assert status == 200
    (expected,) = predictor([image], softmax_mass=0.8)
    assert answer["k"] == K
    for ours, theirs in ((answer["top"], expected.top), (answer["softmax_set"], expected.softmax_set)):
        assert [r["name"] for r in ours] == [r.name for r in theirs]
        assert np.allclose([r["marginal"] for r in ours], [r.marginal for r in theirs], rtol=1e-5)
        assert np.allclose([r["softmax"] for r in ours], [r.softmax for r in theirs], rtol=1e-5)


def test_a_form_is_as_good_as_a_body(service):
    status, answer, _ = request(service.port, "POST", "/predict", *form(png("pink")))
    assert status == 200
    assert answer["top"][0]["name"] == "pink"
    assert answer["softmax_set"] is None


def test_concurrent_requests_get_their_own_answers_and_share_batches(service):
    colours = list(COLOURS) * 8

    def share():
        before = batches(service.port)
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda colour: predict(service.port, png(colour)), colours))
        assert [(status, answer["top"][0]["name"]) for status, answer in answers] == [(200, c) for c in colours]
        runs, inputs = (after - earlier for after, earlier in zip(batches(service.port), before, strict=True))
        assert inputs == len(colours)
        return runs < inputs

    wait_until(share)  # where the clients' process gets little time, a request may be answered before the next comes


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"", "image/png", 400, "the body is empty"),
        (b"hello", "image/png", 400, "is not an image of a known format"),
        (png("red")[:70], "image/png", 400, "cannot be decoded"),
        (png_of(3000, 3000), "image/png", 413, "3000 x 3000 pixels, and more than 4500000 are not decoded"),
        (png_of(50_000, 50_000), "image/png", 413, "too many pixels"),
        (png_of(1, 3_000_000, bytes(6_000_000)), "image/png", 413, "too long a strip"),
        (png("red"), "text/plain", 415, "send an image (image/*), a form or JSON"),
        (png("red"), "", 415, "not 'nothing'"),
        (b"--line--", "multipart/form-data", 400, "Missing boundary"),
        (b"nonsense", "multipart/form-data; boundary=line", 400, "Invalid multipart"),
        (form(png("red"), "picture")[0], "multipart/form-data; boundary=line", 400, "no file in the field 'image'"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" not in value else "",
)
def test_bad_images_are_the_clients_fault(service, body, kind, status, message):
    headers = {"Content-Type": kind} if kind else {}
    got, answer, _ = request(service.port, "POST", "/predict", body, headers)
    assert got == status, answer
    assert message in answer["detail"]


@pytest.mark.parametrize("coverage", ["0", "1.5", "nan", "much"])
def test_a_coverage_out_of_range_is_refused(service, coverage):
    assert predict(service.port, png("red"), query=f"?softmax_mass={coverage}")[0] == 422


def test_unknown_routes_and_methods_are_refused(service):
    assert request(service.port, "GET", "/nowhere")[0] == 404
    assert request(service.port, "GET", "/predict")[0] == 405


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long_is_cut_off(predictor, declared):
    with served(predictor, body_bytes=1000) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        body = bytes(1001) if declared else (bytes(500) for _ in range(3))  # an iterable is sent in chunks
        status, answer, _ = request(port, "POST", "/predict", body, {"Content-Type": "image/png"})
        assert (status, answer["detail"]) == (413, "the body is longer than 1000 bytes")
        assert predict(port, png("red"))[0] == 200


def test_a_slow_body_is_cut_off_and_a_client_that_goes_away_harms_nobody(predictor):
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\n"
    with served(predictor, body_seconds=0.2) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        with socket.create_connection(("127.0.0.1", port), 20) as slow:
            slow.sendall(head)
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", port), 20) as gone:
            gone.sendall(head)
        wait_until(lambda: predict(port, png("red"))[0] == 200)  # 408 where this test is held up for that long


def test_too_many_requests_are_told_to_come_back(predictor):
    held = Held(predictor)
    with served(held, queue=2, batch=1, delay_seconds=0.0) as port, ThreadPoolExecutor(2) as pool:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        held.hold = True
        first = [pool.submit(predict, port, png("blue")) for _ in range(2)]
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 503)
        status, answer, headers = request(port, "POST", "/predict", png("red"), {"Content-Type": "image/png"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert answer["detail"] == "2 requests are in progress already"
        assert request(port, "GET", "/healthz")[0] == 200
        held.gate.set()
        assert [future.result()[0] for future in first] == [200, 200]
        assert predict(port, png("red"))[0] == 200


def test_it_is_not_ready_before_the_model_has_run(predictor):
    held = Held(predictor)
    held.hold = True
    with served(held) as port:
        wait_until(lambda: held.runs == 1)
        assert request(port, "GET", "/readyz")[:2] == (503, {"detail": "the model is warming up"})
        assert request(port, "GET", "/healthz")[0] == 200
        assert predict(port, png("red"))[0] == 503
        held.gate.set()
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)


def test_a_model_that_does_not_run_is_never_ready(predictor):
    with served(Held(predictor, RuntimeError("out of memory"))) as port:
        answer = {"detail": "the model does not run: out of memory"}
        wait_until(lambda: request(port, "GET", "/readyz")[:2] == (503, answer))
        assert request(port, "GET", "/healthz")[0] == 200


def test_a_failing_run_is_the_servers_fault_and_counted(predictor):
    held = Held(predictor)
    with served(held) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        held.error = RuntimeError("broken")
        assert request(port, "POST", "/predict", png("red"), {"Content-Type": "image/png"})[0] == 500
        held.error = None
        assert predict(port, png("red"))[0] == 200
        text = request(port, "GET", "/metrics")[1]
        assert 'topk_requests_total{route="/predict",status="500"} 1.0' in text
        assert 'topk_requests_total{route="/predict",status="200"} 1.0' in text
        assert "topk_predict_seconds_count 1.0" in text
        assert "topk_queue_length 0.0" in text


def test_the_interface_is_described(service):
    status, schema, _ = request(service.port, "GET", "/openapi.json")
    assert status == 200
    assert {"/predict", "/predictions", "/healthz", "/readyz", "/model", "/v2"} <= set(schema["paths"])
    post = schema["paths"]["/predict"]["post"]
    assert set(post["requestBody"]["content"]) == {"image/*", "multipart/form-data", "application/json"}
    assert {"200", "400", "408", "413", "415", "422", "503"} <= set(post["responses"])
    answer = schema["components"]["schemas"]["Answer"]["properties"]
    sets = {"set", "set_size", "set_nodes", "softmax_set", "softmax_set_size"}
    assert set(answer) == {"k", "top", *sets, "milliseconds"}
    assert f"exact top-{K} probabilities" in schema["info"]["description"]
    status, page, _ = request(service.port, "GET", "/docs")
    assert status == 200
    assert all(f"<code>POST {path}</code>" in page for path in ("/predict", "/predictions"))
    assert "http" not in re.sub(r"'http://HOST[^']*'", "", page)  # it needs no other server


@pytest.mark.slow
def test_sigterm_lets_a_request_finish(model_file, tmp_path):
    with Service(model_file, tmp_path / "log", "--max-delay", "1000") as running, ThreadPoolExecutor(1) as pool:
        answers = []

        def waits():
            if not answers or answers[-1].done():  # on a busy machine its second may pass between two looks
                answers.append(pool.submit(predict, running.port, png("purple")))
            return "topk_queue_length 1.0" in request(running.port, "GET", "/metrics")[1]

        wait_until(waits)
        status = running.stop()
        assert [answer.result()[0] for answer in answers] == [200] * len(answers)
    assert answers[-1].result()[1]["top"][0]["name"] == "purple"
    assert status in (0, -15)  # uvicorn ends by the signal once it has cleaned up
    assert "Traceback" not in running.log
    assert "Error" not in running.log


def test_a_taken_port_is_one_line(model_file, capsys):
    from topk_export.commands import serve

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main([str(model_file), "--device", "cpu", "--port", str(port)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert message.count("\n") == 1


def test_answers_leave_at_once():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_missing_framework_is_named(model_file, capsys, monkeypatch):
    from topk_export.commands import serve

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "topk_export.serve.server")
    assert serve.main([str(model_file)]) == 1
    assert "pip install 'topk-registry[serve]'" in capsys.readouterr().err


def test_the_load_test_is_bounded_in_count(service, capsys):
    assert bench.main([service.url, "--repeats", "40", "--concurrency", "4", "--seconds", "60", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"] == 40
    assert result["statuses"] == {"200": 40}


def test_the_load_test_is_bounded_in_time(monkeypatch):
    clock = itertools.count()  # each request takes a second of it, and each look at it another one
    monkeypatch.setattr(loadtest, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(loadtest, "_post", lambda *_: (200, next(clock)))
    result = loadtest.run("http://127.0.0.1:1", b"", requests=1000, concurrency=1, seconds=10)
    assert result["requests"] == 5
    assert result["statuses"] == {200: 5}
    assert result["p50_ms"] <= result["p95_ms"] <= result["p99_ms"]


def test_the_load_test_tells_failures(service, tmp_path, capsys):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    assert bench.main([service.url, "--image", str(broken), "--repeats", "3"]) == 1
    assert "statuses  {400: 3}" in capsys.readouterr().out
    assert bench.main([service.url, "--image", str(Path(tmp_path / "gone"))]) == 1


@pytest.mark.parametrize("url", ["http://192.0.2.1:80", "https://127.0.0.1", "http://0.0.0.0:1"])
def test_the_load_test_stays_on_this_machine(url, capsys):
    assert bench.main([url]) == 1
    assert "error: " in capsys.readouterr().err
