"""No client takes the service from the others: silent connections, large images, large answers, slow runs."""

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.export.colours import COLOURS, png, png_of
from tests.export.serve.service import PATIENCE, Held, attempt, predict, request, served, wait_until
from topk_export import ModelFileError, Prediction, Predictor
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.ranking import rank_rows
from topk_export.serve.app import create_app
from topk_export.serve.decoding import LARGE

HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\n"


def ready(port: int) -> None:
    wait_until(lambda: attempt(lambda: request(port, "GET", "/readyz")[0] == 200))


def answered(connect: Callable[[], socket.socket]) -> socket.socket:
    """A connection that has asked and got its answer before it was closed for its silence."""
    found: list[socket.socket] = []

    def asked() -> bool:
        found.append(connect())
        found[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return found[-1].recv(1000).startswith(b"HTTP/1.1 200 ")

    wait_until(lambda: attempt(asked))
    return found[-1]


def ended(connection: socket.socket) -> bool:
    """Whether the other side has closed; what it sent before is read."""
    connection.settimeout(PATIENCE)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTT"], ids=["nothing", "half a header"])
def test_512_silent_connections_harm_nobody(service, sent):
    with contextlib.ExitStack() as stack:
        for _ in range(512):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), 20))
            silent.sendall(sent)
        assert request(service.port, "GET", "/healthz")[0] == 200
        assert predict(service.port, png("green"))[0] == 200


def test_silent_connections_are_closed_in_time(predictor):
    with served(predictor, idle_seconds=0.3) as port, contextlib.ExitStack() as stack:
        ready(port)

        def connect():
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))

        silent, dripping = connect(), connect()
        with contextlib.suppress(ConnectionError):  # where this test is held up for longer than a silent one may live
            dripping.sendall(b"GET /heal")
        kept = answered(connect)
        assert ended(silent)
        assert ended(dripping)
        assert ended(kept)


def test_the_connection_that_was_silent_longest_gives_way(predictor):
    with served(predictor, client_connections=3, idle_seconds=600.0) as port:
        ready(port)
        with contextlib.ExitStack() as stack:
            first, *others = (stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(4))
            assert ended(first)
            others[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert others[-1].recv(1000).startswith(b"HTTP/1.1 200 ")


def test_one_client_has_a_share_of_the_requests(predictor):
    limits = {"client_requests": 2, "body_seconds": 600.0, "request_seconds": 600.0}
    with served(predictor, **limits) as port, contextlib.ExitStack() as stack:
        ready(port)
        for _ in range(2):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            slow.sendall(HEAD)
        wait_until(lambda: predict(port, png("red"))[0] == 429)
        status, answer, headers = request(port, "POST", "/predict", png("red"), {"Content-Type": "image/png"})
        assert (status, headers["retry-after"]) == (429, "1")
        assert answer["detail"] == "2 requests from this address are in progress already"
        assert request(port, "GET", "/healthz")[0] == 200


def test_a_request_that_takes_too_long_is_a_503(predictor):
    held = Held(predictor)
    with served(held, request_seconds=0.3) as port:
        ready(port)
        held.hold = True
        status, answer, headers = request(port, "POST", "/predict", png("red"), {"Content-Type": "image/png"})
        held.gate.set()
        assert (status, answer, headers["retry-after"]) == (503, {"detail": "no answer within 0.3 s"}, "1")


def test_large_images_do_not_hold_up_small_ones(predictor):
    """All threads for large images are taken, and as many more wait: a small one is answered all the same."""

    class Slow:
        gate, large = threading.Event(), 0

        def __getattr__(self, name):
            return getattr(predictor, name)

        def preprocess(self, images):
            if len(images[0]) > 10_000:
                self.large += 1
                assert self.gate.wait(60)
            return predictor.preprocess(images)

    slow = Slow()
    slow.gate.clear()
    big = png_of(2100, 2000, bytes(2101 * 2000))
    big += bytes(10_001 - min(len(big), 10_001))  # bytes after the end of a PNG are ignored
    assert LARGE < 2100 * 2000
    with served(slow, decoders=2) as port, ThreadPoolExecutor(4) as pool:
        ready(port)
        waiting = [pool.submit(predict, port, big) for _ in range(4)]
        wait_until(lambda: slow.large >= 1)
        assert predict(port, png("blue"))[0] == 200
        slow.gate.set()
        assert [future.result()[0] for future in waiting] == [200] * 4


def test_images_of_a_small_file_and_many_pixels_are_refused(model_file, tmp_path):
    from topk_export.commands.serve import PIXELS, _parser

    assert _parser().parse_args([str(model_file)]).max_pixels == PIXELS < 30_000_000


def test_sets_are_cut_to_what_the_service_allows(predictor):
    with served(predictor, max_set=4) as port:
        ready(port)
        status, answer = predict(port, png("grey"), query="?softmax_mass=1")
        assert status == 200
        assert len(answer["softmax_set"]) == 4
        assert answer["softmax_set_size"] == len(COLOURS)
        assert len(predict(port, png("grey"), query="?softmax_mass=1&max_set=2")[1]["softmax_set"]) == 2
        assert predict(port, png("grey"), query="?softmax_mass=1&max_set=5")[0] == 422


def test_large_answers_leave_the_event_loop_free(predictor):
    """Ranking waits, and the service answers meanwhile: today's code ranked in the event loop."""
    gate, ranking = threading.Event(), threading.Event()

    class Slow:
        def __getattr__(self, name):
            return getattr(predictor, name)

        def rank(self, *args, **options):
            ranking.set()
            assert gate.wait(60)
            return predictor.rank(*args, **options)

    with served(Slow()) as port, ThreadPoolExecutor(1) as pool:
        ready(port)
        waiting = pool.submit(predict, port, png("red"), query="?softmax_mass=1")
        assert ranking.wait(60)
        assert request(port, "GET", "/healthz")[0] == 200
        gate.set()
        assert waiting.result()[0] == 200


def test_a_set_of_many_classes_is_ranked_in_proportion_to_what_is_given(predictor):
    n = 21841
    metadata = Metadata(5, 1.0, n, tuple(map(str, range(n))), predictor.metadata.preprocess)
    logits = np.random.default_rng(0).standard_normal((1, n)).astype(np.float32)
    outputs = {"logits": logits, "marginals": np.full((1, n), 5 / n, np.float32)}
    (row,) = rank_rows(outputs, metadata, softmax_mass=1.0, max_set=100)
    assert isinstance(row, Prediction)
    assert row.softmax_set is not None
    assert len(row.softmax_set) == 100
    assert n - 10 <= row.softmax_set_size <= n  # rounding may reach 1 before the last class


def test_outputs_that_are_not_numbers_are_the_servers_fault_in_valid_json(edited):
    with served(Predictor(edited(nan=True), device="cpu")) as port:
        ready(port)
        status, answer = predict(port, png("red"))
        assert (status, answer) == (500, {"detail": "the model's outputs for this image are not finite numbers"})


def test_a_file_without_marginals_is_refused_at_start(edited, capsys):
    from topk_export.commands import serve

    bare = edited(outputs=("indices",))
    with pytest.raises(ModelFileError, match="exported without logits and marginals"):
        create_app(Predictor(bare, device="cpu"))
    assert serve.main([str(bare), "--device", "cpu", "--port", "0"]) == 1
    assert capsys.readouterr().err.startswith("error: predictions need the outputs logits and marginals")


@pytest.mark.parametrize(
    "flags", [["--port", "99999"], ["--max-delay", "nan"], ["--max-delay", "-1"], ["--timeout", "inf"]]
)
def test_wrong_flags_are_one_line(model_file, flags, capsys):
    from topk_export.commands import serve

    with pytest.raises(SystemExit, match="2"):
        serve.main([str(model_file), *flags])
    assert capsys.readouterr().err.count("\n") == 1
