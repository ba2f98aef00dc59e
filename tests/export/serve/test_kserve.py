"""KServe's protocol, spoken by Triton's own client where it is installed."""

import json

import numpy as np
import pytest

from tests.export.colours import COLOURS, K, noise
from tests.export.serve.service import request, served, wait_until

IMAGES = [noise(40, 50, seed=i) for i in range(3)]


def test_the_protocols_own_client_gets_the_models_outputs(service, predictor):
    client = pytest.importorskip("tritonclient.http")
    x = predictor.preprocess(IMAGES)
    expected = predictor.run(x)
    with client.InferenceServerClient(f"127.0.0.1:{service.port}") as triton:
        assert triton.is_server_live()
        assert triton.is_server_ready()
        assert triton.is_model_ready("colours")
        metadata = triton.get_model_metadata("colours")
        assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 3, 32, 40]}]
        assert [output["shape"] for output in metadata["outputs"]] == [[-1, len(COLOURS)], [-1, len(COLOURS)], [-1, K]]
        for binary in (True, False):
            tensor = client.InferInput("input", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x, binary_data=binary)
            wanted = [client.InferRequestedOutput(name, binary_data=binary) for name in expected]
            answer = triton.infer("colours", [tensor], outputs=wanted, request_id="7")
            assert answer.get_response()["id"] == "7"
            for name, value in expected.items():
                assert np.allclose(answer.as_numpy(name), value, rtol=1e-5, atol=1e-6), name


def infer(port: int, content: object, **headers: str):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return request(port, "POST", "/v2/models/colours/infer", body, {"Content-Type": "application/json", **headers})


def tensor(**changes):
    zeros = {"name": "input", "datatype": "FP32", "shape": [1, 3, 32, 40], "data": [0.0] * (3 * 32 * 40)}
    return {"inputs": [{**zeros, **changes}]}


def test_plain_json(service):
    status, answer, _ = infer(service.port, tensor())
    assert status == 200
    assert (answer["model_name"], answer["model_version"]) == ("colours", "1")
    assert {output["name"]: output["shape"] for output in answer["outputs"]} == {
        "logits": [1, len(COLOURS)],
        "marginals": [1, len(COLOURS)],
        "indices": [1, K],
    }
    assert sum(answer["outputs"][1]["data"]) == pytest.approx(K, rel=1e-5)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        {},
        {"inputs": []},
        tensor(name="image"),
        tensor(datatype="FP64"),
        tensor(shape=[1, 3, 32, 32]),
        tensor(shape=[0, 3, 32, 40]),
        tensor(shape=[999, 3, 32, 40]),
        tensor(data=[1.0]),
        tensor(data=["a"] * 3840),
        tensor(parameters={"binary_data_size": 5}),
        {**tensor(), "outputs": [{"name": "scores"}]},
        {**tensor(), "outputs": [5]},
    ],
)
def test_a_request_that_makes_no_sense_is_a_400(service, content):
    status, answer, _ = infer(service.port, content)
    assert status == 400, answer
    assert answer["detail"].startswith("no request of the protocol: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**tensor(), "outputs": [{"name": "scores"}]}, "no output is called scores; there are logits"),
        (tensor(shape=[1, 3, 32, 32]), "[batch, 3, 32, 40], got input FP32 [1, 3, 32, 32]"),
    ],
)
def test_a_refusal_says_what_came_and_what_there_is(service, content, message):
    assert message in infer(service.port, content)[1]["detail"]


def test_a_wrong_length_and_another_model_are_refused(service):
    assert infer(service.port, tensor(), **{"Inference-Header-Content-Length": "9999999"})[0] == 400
    assert request(service.port, "GET", "/v2/models/other")[0] == 404
    assert request(service.port, "GET", "/v2")[1]["extensions"] == ["binary_tensor_data"]


def test_outputs_that_json_cannot_say_are_an_error(predictor):
    class Broken:
        def __getattr__(self, name):
            return getattr(predictor, name)

        def run(self, x):
            return {name: np.full_like(value, np.nan) for name, value in predictor.run(x).items() if name == "logits"}

    with served(Broken()) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        status, answer, _ = infer(port, tensor())
        assert (status, answer["detail"]) == (500, "the output logits is not finite, and JSON has no such numbers")
