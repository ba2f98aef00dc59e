"""The service of a file with thresholds by group: each image of a request has its own, whatever shares its batch."""

import base64
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlencode

import numpy as np
import pytest
from PIL import Image

from tests.export.colours import COLOURS, encoded
from tests.export.groups import GROUPS, expected_sets, grouped
from tests.export.serve.service import Service, batches, form, request, served, served_by, wait_until
from topk_export import Predictor
from topk_export.commands import serve
from topk_export.serve.releases import Releases, open_release
from topk_export.serve.server import Plan

NAMES = list(COLOURS)


def mixed(seed: int) -> bytes:
    """An image between two colours, so that its sets differ by group."""
    rng = np.random.default_rng(seed)
    a, b = (np.array(list(COLOURS.values())[i], float) for i in rng.choice(12, 2, replace=False))
    pixels = 0.55 * a + 0.45 * b + 10 * rng.standard_normal((32, 40, 3))
    return encoded(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), "PNG")


IMAGES = [mixed(i) for i in range(12)]


@pytest.fixture(scope="module")
def file(model_file, tmp_path_factory):
    return grouped(model_file, tmp_path_factory.mktemp("groups") / "grouped.onnx")


@pytest.fixture(scope="module")
def predictor(file):
    return Predictor(file, device="cpu", threads=1)


@pytest.fixture(scope="module")
def port(predictor):
    with served(predictor, images=40) as found:
        wait_until(lambda: request(found, "GET", "/readyz")[0] == 200)
        yield found


@pytest.fixture(scope="module")
def wanted(predictor):
    """``wanted(i, g)``: the names of the set of an image in a group, by the definition."""
    logits = predictor.run(predictor.preprocess(IMAGES))["logits"]
    of_groups = [expected_sets(logits, [g] * len(IMAGES)) for g in range(len(GROUPS))]
    assert len({inside.sum() for inside in of_groups}) == len(GROUPS)
    return lambda i, g: {NAMES[y] for y in np.flatnonzero(of_groups[g][i])}


def ask(port, image, group=None, extra=""):
    query = extra if group is None else f"?{urlencode({'group': group})}{extra}"
    return request(port, "POST", f"/predict{query}", image, {"Content-Type": "image/png"})[:2]


def ask_all(port, images, *groups):
    body = json.dumps({"images": [base64.b64encode(image).decode() for image in images]}).encode()
    path = f"/predictions?{urlencode([('group', group) for group in groups])}"
    return request(port, "POST", path, body, {"Content-Type": "application/json"})[:2]


def names(answer):
    return {ranked["name"] for ranked in answer["set"]}


def test_a_request_names_its_group(port, wanted):
    for g, group in enumerate(GROUPS):
        for i, image in enumerate(IMAGES[:3]):
            status, answer = ask(port, image, group)
            assert status == 200, answer
            assert names(answer) == wanted(i, g)
            assert answer["set_size"] == len(wanted(i, g))
    body, headers = form(IMAGES[0])
    status, answer, _ = request(port, "POST", f"/predict?group={quote(GROUPS[1])}", body, headers)
    assert (status, names(answer)) == (200, wanted(0, 1))
    assert names(ask(port, IMAGES[0])[1]) == set(NAMES)  # not told: the largest threshold


def test_images_of_a_request_have_groups_of_their_own(port, wanted):
    numbers = [i % len(GROUPS) for i in range(len(IMAGES))]
    status, answer = ask_all(port, IMAGES, *(GROUPS[g] for g in numbers))
    assert status == 200
    assert [names(each) for each in answer["predictions"]] == [wanted(i, g) for i, g in enumerate(numbers)]
    status, answer = ask_all(port, IMAGES, "day")  # one for all
    assert [names(each) for each in answer["predictions"]] == [wanted(i, 0) for i in range(len(IMAGES))]
    status, answer = ask_all(port, IMAGES)
    assert all(names(each) == set(NAMES) for each in answer["predictions"])
    status, answer = ask_all(port, [b"no image", IMAGES[1]], GROUPS[1], GROUPS[0])  # a bad one moves no group
    assert "is not an image" in answer["predictions"][0]["detail"]
    assert names(answer["predictions"][1]) == wanted(1, 0)


def test_requests_of_different_groups_share_batches(port, wanted):
    work = [(i % len(IMAGES), (i // 3) % (len(GROUPS) + 1)) for i in range(96)]  # the last is a group not told

    def one(item):
        i, g = item
        return ask(port, IMAGES[i], GROUPS[g] if g < len(GROUPS) else None)

    def share():
        before = batches(port)
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(one, work))
        for (i, g), (status, answer) in zip(work, answers, strict=True):
            assert status == 200
            assert names(answer) == wanted(i, min(g, 3))
        runs, inputs = (after - earlier for after, earlier in zip(batches(port), before, strict=True))
        assert inputs == len(work)
        return runs < inputs

    wait_until(share)


@pytest.mark.parametrize("group", ["dusk", "", "Day", "day ", "0", "-1", "night%20&%20fog", "\x00", "ü" * 300])
def test_an_unknown_group_is_a_400_that_names_those_there_are(port, group):
    for status, answer in (ask(port, IMAGES[0], group), ask_all(port, IMAGES[:2], "day", group)):
        assert status == 400
        assert answer["detail"].startswith(f"calibration has seen no group {group!r}; there are {', '.join(GROUPS)}.")


def test_a_wrong_number_of_groups_is_a_400(port):
    status, answer = ask_all(port, IMAGES[:3], "day", "rare")
    assert status == 400
    assert answer["detail"] == "expected one group for all 3 images, or one for each, got 2"
    status, answer = ask(port, IMAGES[0], "day", "&group=rare")
    assert (status, answer["detail"]) == (400, "expected one group, got 2")


def test_a_file_without_groups_takes_none(service):
    status, answer = ask(service.port, IMAGES[0], "day")
    assert (status, answer["detail"]) == (400, "the file has no thresholds by group, got group 'day'")
    assert request(service.port, "GET", "/v2/models/colours")[1]["inputs"][1:] == []


def test_groups_can_be_demanded(predictor, wanted):
    with served(predictor, require_group=True) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        refused = "expected the group of each image, got none; there are day, night & fog/2, "
        for status, answer in (ask(port, IMAGES[0]), ask_all(port, IMAGES)):
            assert status == 400
            assert answer["detail"].startswith(refused)
        assert names(ask(port, IMAGES[0], "day")[1]) == wanted(0, 0)
        status, answer = infer(port, tensor(IMAGES_IN))
        assert status == 400
        assert answer["error"].startswith(refused)


def test_the_services_own_group_is_that_of_requests_that_name_none(file, wanted, tmp_path):
    log = tmp_path / "answers.jsonl"
    flags = ("--group", GROUPS[1], "--log", str(log))
    with Service(file, tmp_path / "log", *flags) as running:
        assert names(ask(running.port, IMAGES[0])[1]) == wanted(0, 1)
        assert names(ask(running.port, IMAGES[0], "day")[1]) == wanted(0, 0)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        assert [entry.get("group") for entry in entries] == [None, "day"]
        text = request(running.port, "GET", "/metrics")[1]
        assert 'topk_requests_total{route="/predict",status="200"} 2.0' in text  # no label a group


def test_flags_that_make_no_sense_are_told(file, model_file, capsys):
    with pytest.raises(SystemExit):
        serve.main([str(file), "--group", "day", "--require-group"])
    assert "--group is the group of requests that name none" in capsys.readouterr().err
    assert serve.main([str(model_file), "--device", "cpu", "--require-group"]) == 1
    assert "--require-group expects a file with thresholds by group" in capsys.readouterr().err
    assert serve.main([str(file), "--device", "cpu", "--group", "dusk"]) == 1
    assert "calibration has seen no group 'dusk'" in capsys.readouterr().err


def test_groups_are_those_of_the_content_that_answers(file, model_file, tmp_path, wanted):
    """A swap to a file without groups, and one that lacks the service's own group, which is dropped."""
    served_file = Path(shutil.copy(file, tmp_path / "served.onnx"))
    options = {"device": "cpu", "threads": 1}
    with Releases(served_file) as releases:
        first = releases.read()
        releases.keep(first)
        with served_by(open_release(first, options), Plan(options), first) as (port, service):
            wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
            assert names(ask(port, IMAGES[0], "day")[1]) == wanted(0, 0)
            served_file.write_bytes(model_file.read_bytes())
            second = releases.read()
            for step in ("prepare", "hold", "switch"):
                assert service.take(step, second) == []
            status, answer = ask(port, IMAGES[0], "day")
            assert (status, "the file has no thresholds by group" in answer["detail"]) == (400, True)
            assert ask(port, IMAGES[0])[0] == 200
        releases.keep(second)
        served_file.write_bytes(file.read_bytes())
        first = releases.read()
        releases.keep(first)
        options["group"] = "day"
        with served_by(open_release(first, options), Plan(options), first) as (port, service):
            wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
            served_file.write_bytes(model_file.read_bytes())
            (problem,) = service.take("prepare", releases.read())
            assert "the file has no thresholds by group, got group 'day'" in problem
            assert service.take("drop", first) == []
            assert names(ask(port, IMAGES[0])[1]) == wanted(0, 0)


def test_the_interface_describes_groups(port):
    schema = request(port, "GET", "/openapi.json")[1]
    for path, kind in (("/predict", "string"), ("/predictions", "array")):
        (option,) = (each for each in schema["paths"][path]["post"]["parameters"] if each["name"] == "group")
        assert option["in"] == "query"
        assert not option["required"]
        assert [each["type"] for each in option["schema"]["anyOf"]] == [kind, "null"]
    assert "group" in request(port, "GET", "/docs")[1]
    groups = request(port, "GET", "/model")[1]["sets"]["groups"]
    assert [group["name"] for group in groups] == list(GROUPS)


# KServe's protocol

IMAGES_IN = np.zeros((3, 3, 32, 40), np.float32)


def tensor(x, groups=None, **changes):
    inputs = [{"name": "input", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}]
    if groups is not None:
        inputs.append({"name": "group", "datatype": "INT64", "shape": [len(groups)], "data": groups, **changes})
    return {"inputs": inputs, "outputs": [{"name": "set"}]}


def infer(port, content):
    headers = {"Content-Type": "application/json"}
    return request(port, "POST", "/v2/models/grouped/infer", json.dumps(content).encode(), headers)[:2]


def test_the_protocol_takes_the_numbers_of_groups(port, predictor):
    x = predictor.preprocess(IMAGES[:3])
    logits = predictor.run(x)["logits"]
    for numbers in ([0, 1, 3], [2, 2, 2], [-1, 0, 1]):
        content = tensor(x, numbers)
        for inputs in (content["inputs"], content["inputs"][::-1]):  # in either order
            status, answer = infer(port, {**content, "inputs": inputs})
            assert status == 200, answer
            (output,) = answer["outputs"]
            np.testing.assert_array_equal(np.reshape(output["data"], (3, 12)), expected_sets(logits, numbers))
    (output,) = infer(port, tensor(x))[1]["outputs"]
    assert all(output["data"])
    metadata = request(port, "GET", "/v2/models/grouped")[1]
    assert metadata["inputs"][1:] == [{"name": "group", "datatype": "INT64", "shape": [-1]}]
    config = request(port, "GET", "/v2/models/grouped/config")[1]
    assert config["input"][1:] == [{"name": "group", "data_type": "TYPE_INT64", "dims": [], "optional": True}]


def test_the_protocols_own_client_sends_groups(port, predictor):
    client = pytest.importorskip("tritonclient.http")
    x, numbers = predictor.preprocess(IMAGES[:4]), np.array([3, 1, -1, 0])
    with client.InferenceServerClient(f"127.0.0.1:{port}") as triton:
        for binary in (True, False):
            tensors = [client.InferInput("input", list(x.shape), "FP32"), client.InferInput("group", [4], "INT64")]
            for each, values in zip(tensors, (x, numbers), strict=True):
                each.set_data_from_numpy(values, binary_data=binary)
            for inputs in (tensors, tensors[::-1]):
                found = triton.infer("grouped", inputs).as_numpy("set")
                np.testing.assert_array_equal(found, expected_sets(predictor.run(x)["logits"], numbers.tolist()))


@pytest.mark.parametrize(
    ("groups", "changes", "message"),
    [
        ([0, 1], {}, "expected a group for each of 3 rows, got 2"),
        ([0, 1, 4], {}, "expected numbers from 0 to 3, or -1 for none, as group; they stand for day, night"),
        ([0, 1, -2], {}, "expected numbers from 0 to 3"),
        ([0, 1, 0.5], {}, "expected numbers from 0 to 3"),
        ([0, 1, True], {"data": [True] * 3}, "expected numbers from 0 to 3"),
        ([0, 1, 2], {"data": ["day"] * 3}, "expected numbers from 0 to 3"),
        ([0, 1, 2], {"data": [2**70] * 3}, ""),
        ([0, 1, 2], {"data": None}, ""),
        ([0, 1, 2], {"datatype": "INT32"}, "the model takes group INT64 [batch], got INT32 [3]"),
        ([0, 1, 2], {"shape": [3, 1]}, "the model takes group INT64 [batch], got INT64 [3, 1]"),
        ([0, 1, 2], {"shape": [2]}, ""),
        ([0, 1, 2], {"name": "input"}, ""),
        ([0, 1, 2], {"name": "camera"}, ""),
        ([0, 1, 2], {"parameters": {"binary_data_size": 24}}, "binary_data_size is 24, but 0 bytes follow the JSON"),
    ],
)
def test_group_tensors_that_make_no_sense_are_a_400(port, groups, changes, message):
    status, answer = infer(port, tensor(IMAGES_IN, groups, **changes))
    assert status == 400, answer
    assert answer["error"].startswith("no request of the protocol: ")
    assert message in answer["error"]


def test_inputs_are_counted_by_name(port, service):
    twice = tensor(IMAGES_IN, [0, 1, 2])
    for inputs, message in (
        (twice["inputs"][1:], "the input input is missing"),
        (twice["inputs"][1:] * 2, "inputs names group twice"),
        (twice["inputs"] * 2, "the model takes input and, if it likes, group, got 4 inputs"),
    ):
        status, answer = infer(port, {"inputs": inputs})
        assert (status, message in answer["error"]) == (400, True), answer
    body = json.dumps(twice).encode()
    status, answer, _ = request(service.port, "POST", "/v2/models/colours/infer", body)
    assert (status, "the model takes input, got 2 inputs" in answer["error"]) == (400, True)
