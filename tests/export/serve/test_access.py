"""Who may use the service: keys, host names, other sites' pages, the access log; several images and processes."""

import asyncio
import base64
import json
import os
import re
import signal
import sys

import pytest

from tests.export.colours import COLOURS, K, png
from tests.export.serve.service import Held, Service, predict, request, served, wait_until
from topk_export.serve.app import create_app
from topk_export.serve.guard import Guard, read_keys
from topk_export.serve.limits import Access, Limits

IMAGE = {"Content-Type": "image/png"}


@pytest.fixture
def ask(predictor):
    """``ask(access, method, path, **headers)``: the status of one request to a service with that access."""

    def call(access, method, path, body=None, **headers):
        with served(predictor, access) as port:
            wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
            return request(port, method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})

    return call


def test_a_key_is_needed_where_keys_are_set(predictor):
    with served(predictor, Access(keys=("first", "second"))) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        status, answer, headers = request(port, "POST", "/predict", png("red"), IMAGE)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert "an API key is needed" in answer["detail"]
        for key in ({"X-API-Key": "second"}, {"Authorization": "Bearer first"}, {"Authorization": "bearer second"}):
            assert request(port, "POST", "/predict", png("red"), IMAGE | key)[0] == 200
        for key in ({"X-API-Key": "third"}, {"X-API-Key": ""}, {"Authorization": "Basic first"}, {"X-API-Key": "firs"}):
            assert request(port, "POST", "/predict", png("red"), IMAGE | key)[0] == 401
        for path, wanted in (("/", 200), ("/healthz", 200), ("/model", 401), ("/metrics", 401), ("/openapi.json", 401)):
            assert request(port, "GET", path)[0] == wanted, path


def test_keys_are_read_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the web shop\nabc\n\n  def \n")
    assert read_keys(str(path)) == ("abc", "def")
    for content in ("", "# none\n", "schlüssel\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match="must hold API keys, one a line"):
            read_keys(str(path))


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:80", 200), ("[::1]:80", 200), ("evil.example", 400), ("localhost.evil", 400)],
)
@pytest.mark.slow
def test_other_host_names_are_refused(ask, host, status):
    access = Access(hosts=("localhost", "::1"))
    assert ask(access, "GET", "/model", Host=host)[0] == status
    assert ask(access, "GET", "/healthz", Host="10.0.0.1")[0] == 200  # probes go by address


@pytest.mark.parametrize("hosts", [(), ("localhost",)])
def test_addresses_that_are_none_are_the_clients_fault(predictor, hosts, capfd):
    """They are refused before any key is asked for, and leave no traceback."""
    with served(predictor, Access(keys=("k",), hosts=hosts)) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        for host in (
            "[::1",
            "::1]",
            "[::1]:x",
            "[nonsense]",
            "a b",
            "a/b",
            "localhost:99999999",
            "user@localhost",
            "a?b",
        ):
            for path in ("/predict", "/model/", "/v2"):
                assert request(port, "GET", path, headers={"Host": host})[0] == 400, host
        for origin in ("http://[::1", "http://[nonsense]", "//[", "["):
            headers = {"Host": "localhost", "Origin": origin, **IMAGE}
            assert request(port, "POST", "/predict", png("red"), headers)[0] == 403, origin
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_request_has_an_id_in_its_answer_and_in_the_logs(predictor, tmp_path, capfd):
    log, answers, held = tmp_path / "access", tmp_path / "answers", Held(predictor)
    with served(held, Access(log=str(log)), log=str(answers)) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        ids = []
        for given in ("job-7/3", "", "two words", "x" * 129, "jürgen"):
            sent = {**IMAGE, **({"X-Request-ID": given.encode().decode("latin-1")} if given else {})}
            ids.append(request(port, "POST", "/predict", png("red"), sent)[2]["x-request-id"])
        assert ids[0] == "job-7/3"
        assert all(re.fullmatch("[0-9a-f]{32}", made) for made in ids[1:])
        assert len(set(ids)) == len(ids)
        missing = request(port, "GET", "/nowhere", headers={"X-Request-ID": "missing"})[2]
        held.error = RuntimeError("broken")
        status, answer, failed = request(port, "POST", "/predict", png("red"), {**IMAGE, "X-Request-ID": "failing"})
    assert (missing["x-request-id"], failed["x-request-id"]) == ("missing", "failing")
    assert (status, answer) == (500, {"detail": "the service failed: its log says why"})
    assert failed["x-content-type-options"] == "nosniff"
    assert [line["id"] for line in lines_of(log) if line["path"] != "/readyz"] == [*ids, "missing", "failing"]
    assert [line["id"] for line in lines_of(answers)] == ids
    assert "request failing failed\nTraceback" in capfd.readouterr().err


def lines_of(log) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_log_that_is_moved_away_is_opened_anew(predictor, tmp_path):
    log, answers = tmp_path / "access", tmp_path / "answers"
    with served(predictor, Access(log=str(log)), log=str(answers)) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        for number in range(3):
            predict(port, png("red"), query=f"?max_set={number + 1}")
            # the line of a request comes after its answer
            wait_until(lambda wanted=f"max_set={number + 1}": log.exists() and wanted in log.read_text())
            if number == 0:
                log.rename(tmp_path / "access.1")
                answers.rename(tmp_path / "answers.1")
            elif number == 1:
                log.unlink()
                answers.unlink()
    assert [line["query"] for line in lines_of(log)] == ["max_set=3"]
    assert lines_of(tmp_path / "access.1")[-1]["query"] == "max_set=1"
    assert len(lines_of(answers)) == len(lines_of(tmp_path / "answers.1")) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a full disk there")
def test_a_full_disk_costs_lines_and_no_answers(predictor, capfd):
    with served(predictor, log="/dev/full") as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        assert [predict(port, png("red"))[0] for _ in range(3)] == [200] * 3
    warning = "warning: the log /dev/full loses lines: [Errno 28] No space left on device"
    assert capfd.readouterr().err.count(warning) == 1


@pytest.mark.parametrize(
    ("headers", "origins", "status"),
    [
        ({}, (), 200),
        ({"Origin": "http://localhost"}, (), 200),  # the service's own page
        ({"Origin": "https://localhost"}, (), 200),  # behind a proxy with TLS
        ({"Origin": "https://evil.example"}, (), 403),
        ({"Origin": "null"}, (), 403),
        ({"Sec_Fetch_Site": "cross-site"}, (), 403),
        ({"Origin": "https://shop.example"}, ("https://shop.example",), 200),
        ({"Origin": "https://evil.example"}, ("https://shop.example",), 403),
        ({"Origin": "https://evil.example"}, ("*",), 200),
    ],
)
@pytest.mark.slow
def test_pages_of_other_sites_post_only_where_allowed(ask, headers, origins, status):
    access = Access(origins=origins)
    got, _, sent = ask(access, "POST", "/predict", png("red"), Host="localhost", Content_Type="image/png", **headers)
    assert got == status
    allowed = sent.get("access-control-allow-origin")
    assert allowed == (None if not origins or status == 403 else "*" if origins == ("*",) else origins[0])


def test_the_page_may_not_be_framed(service):
    headers = request(service.port, "GET", "/")[2]
    assert headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_the_access_log_has_a_line_for_each_request(predictor, tmp_path):
    log = tmp_path / "access.log"
    with served(predictor, Access(log=str(log))) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        predict(port, png("red"), query='?softmax_mass=0.5&x="')
        request(port, "GET", "/no\r\nwhere".replace("\r\n", "%0d%0a"))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    entry = next(line for line in lines if line["path"] == "/predict")
    assert (entry["method"], entry["status"], entry["client"]) == ("POST", 200, "127.0.0.1")
    assert entry["query"] == 'softmax_mass=0.5&x="'
    assert entry["bytes"] > 100
    assert entry["milliseconds"] > 0
    assert lines[-1]["status"] == 404


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_is_counted_once_and_before_its_answer_ends(fails):
    """A client that has its answer finds it in the metrics, whichever worker it asks."""
    counted, counted_then = [], []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if fails:
            raise ConnectionError("the client has gone")
        await send({"type": "http.response.body", "body": b"b"})

    async def send(message):
        counted_then.append(len(counted))

    scope = {"type": "http", "path": "/predict", "method": "GET", "headers": [(b"host", b"localhost")]}
    guard = Guard(app, Access(), Limits(), lambda path, status: counted.append(status))
    if fails:
        with pytest.raises(ConnectionError):
            asyncio.run(guard(scope, None, send))
    else:
        asyncio.run(guard(scope, None, send))
    assert counted_then == ([0, 0] if fails else [0, 0, 1])
    assert counted == [201]


def encoded(colour: str) -> str:
    return base64.b64encode(png(colour)).decode()


def post(port: int, path: str, content: object) -> tuple[int, dict]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return request(port, "POST", path, body, {"Content-Type": "application/json"})[:2]


def test_json_with_base64_is_as_good_as_a_body(service):
    status, answer = post(service.port, "/predict", {"image": encoded("pink")})
    assert status == 200
    assert answer["top"][0]["name"] == "pink"


@pytest.mark.parametrize(
    "content", [{}, {"image": 5}, {"image": "not base64!"}, [1], b"{", b"", {"image": [encoded("red")]}, b"[" * 5000]
)
def test_json_of_another_shape_is_refused(service, content):
    status, answer = post(service.port, "/predict", content)
    assert status == 400
    assert "expected JSON with an image in base64 under the key 'image'" in answer["detail"]


def test_several_images_are_one_request(service):
    bad = base64.b64encode(b"no image").decode()
    status, answer = post(service.port, "/predictions", {"images": [encoded("red"), bad, encoded("blue")]})
    assert status == 200
    assert answer["k"] == K
    red, wrong, blue = answer["predictions"]
    assert (red["top"][0]["name"], blue["top"][0]["name"]) == ("red", "blue")
    assert "known format" in wrong["detail"]
    parts = b"".join(
        b'--line\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + png(colour) + b"\r\n"
        for colour in ("green", "white")
    )
    kind = {"Content-Type": "multipart/form-data; boundary=line"}
    status, answer, _ = request(service.port, "POST", "/predictions", parts + b"--line--\r\n", kind)
    assert status == 200
    assert [p["top"][0]["name"] for p in answer["predictions"]] == ["green", "white"]
    assert post(service.port, "/predictions", {"images": []})[0] == 400
    assert post(service.port, "/predictions", {"images": [encoded("red")] * 33})[0] == 400


@pytest.mark.slow
def test_workers_share_the_port_and_their_counters(model_file, tmp_path):
    with Service(model_file, tmp_path / "log", "--workers", "2", "--access-log", str(tmp_path / "access")) as running:
        colours = list(COLOURS)
        answers = [predict(running.port, png(colour)) for colour in colours]
        assert [answer["top"][0]["name"] for _, answer in answers] == colours
        text = request(running.port, "GET", "/metrics")[1]
        assert f'topk_requests_total{{route="/predict",status="200"}} {len(colours)}.0' in text
        assert running.stop() == 0
    assert "Traceback" not in running.log


def test_a_worker_accepts_once_its_model_has_run(predictor):
    held = Held(predictor)
    held.hold = True

    async def main() -> None:
        app = create_app(held, warm=True)
        context = app.router.lifespan_context(app)
        started = asyncio.ensure_future(context.__aenter__())
        while not held.runs:
            await asyncio.sleep(0.001)
        assert not started.done()
        held.gate.set()
        await started
        await context.__aexit__(None, None, None)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_worker_whose_model_does_not_run_ends(predictor):
    app = create_app(Held(predictor, ValueError("no memory")), warm=True)

    async def main() -> None:
        async with app.router.lifespan_context(app):
            pass

    with pytest.raises(RuntimeError, match="the model does not run: no memory"):
        asyncio.run(main())


@pytest.mark.slow
def test_workers_end_with_their_parent(model_file, tmp_path):
    with Service(model_file, tmp_path / "log", "--workers", "2") as running:
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait(60)

        def refused() -> bool:
            try:
                return request(running.port, "GET", "/healthz")[0] == 0
            except OSError:
                return True

        wait_until(refused)
