"""KServe's protocol, spoken by Triton's own client where it is installed."""

import gzip
import json
import zlib

import numpy as np
import pytest

from tests.export.colours import COLOURS, K, noise, png
from tests.export.serve.service import Held, request, served, wait_until
from topk_export import Predictor
from topk_export.serve.kserve import EXTENSIONS
from topk_export.serve.limits import Access

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
        {**tensor(), "outputs": [{"name": "logits"}] * 2},
        tensor(data=[float("nan")] * 3840),
        tensor(data=[float("inf")] + [0.0] * 3839),
        tensor(data=[1e39] + [0.0] * 3839),  # infinite in float32
        tensor(data=[True] * 3840),
        tensor(data=[10**400] * 3840),
        tensor(data=["1"] * 3840),
    ],
)
def test_a_request_that_makes_no_sense_is_a_400(service, content):
    status, answer, _ = infer(service.port, content)
    assert status == 400, answer
    assert answer["error"].startswith("no request of the protocol: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**tensor(), "outputs": [{"name": "scores"}]}, "no output is called scores; there are logits"),
        ({**tensor(), "outputs": [{"name": "logits"}] * 3}, "outputs names logits more than once"),
        (tensor(data=[float("nan")] * 3840), "the input holds NaN or infinite numbers"),
        (tensor(shape=[1, 3, 32, 32]), "[batch, 3, 32, 40], got input FP32 [1, 3, 32, 32]"),
    ],
)
def test_a_refusal_says_what_came_and_what_there_is(service, content, message):
    assert message in infer(service.port, content)[1]["error"]


def test_a_wrong_length_and_another_model_are_refused(service):
    assert infer(service.port, tensor(), **{"Inference-Header-Content-Length": "9999999"})[0] == 400
    assert request(service.port, "GET", "/v2/models/other")[0] == 404
    assert request(service.port, "GET", "/v2")[1]["extensions"] == list(EXTENSIONS)


def test_outputs_that_json_cannot_say_are_an_error(predictor):
    class Broken:
        def __getattr__(self, name):
            return getattr(predictor, name)

        def run(self, x):
            return {name: np.full_like(value, np.nan) for name, value in predictor.run(x).items() if name == "logits"}

    with served(Broken()) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        status, answer, _ = infer(port, tensor())
        assert (status, answer["error"]) == (500, "the output logits is not finite, and JSON has no such numbers")


def binary_nan() -> tuple[bytes, dict[str, str]]:
    x = np.full((1, 3, 32, 40), np.nan, np.float32).tobytes()
    content = tensor(parameters={"binary_data_size": len(x)})
    del content["inputs"][0]["data"]
    head = json.dumps(content).encode()
    return head + x, {"Inference-Header-Content-Length": str(len(head))}


def test_nan_in_binary_data_is_the_clients_fault(service):
    body, headers = binary_nan()
    status, answer, _ = infer(service.port, body, **headers)
    assert status == 400
    assert "the input holds NaN or infinite numbers" in answer["error"]


@pytest.mark.parametrize("data", [300, -1, 1.5, True, 2**70])
def test_numbers_that_are_no_bytes_are_refused(in_graph_file, data):
    with served(Predictor(in_graph_file, device="cpu", threads=1)) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        wrong = tensor(datatype="UINT8", shape=[1, 32, 40, 3], data=[data] * 3840)
        status, answer, _ = infer(port, wrong)
        assert (status, "the data must be" in answer["error"]) == (400, True), answer


def test_an_answer_has_a_limit(predictor):
    with served(predictor, answer_bytes=2000) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        assert infer(port, tensor())[0] == 200
        many = tensor(shape=[8, 3, 32, 40], data=[0.0] * (8 * 3840))
        status, answer, _ = infer(port, many)
        largest = 8 * (2 * len(COLOURS) + K) * 25
        assert status == 413
        assert answer["error"].startswith(f"the answer could have {largest} bytes, and at most 2000 are sent")
        assert infer(port, {**many, "outputs": [{"name": "indices"}]})[0] == 200
        assert infer(port, {**many, "parameters": {"binary_data_output": True}})[0] == 200


def test_the_limit_of_an_answer_is_one(service):
    """No number is longer in JSON than the limit counts."""
    numbers = [-np.float32(1.1754942e-38), np.float32(3.4028235e38), -np.float32(1.17549435e-38), np.int64(-(2**63))]
    assert max(len(json.dumps(number.item())) for number in numbers) + 1 <= 25


def test_every_error_of_the_protocol_has_its_key(predictor):
    held = Held(predictor)
    key = {"X-API-Key": "k"}
    with served(held, Access(keys=("k",), hosts=("127.0.0.1",)), request_seconds=0.5) as port:
        wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
        answers = {
            401: request(port, "GET", "/v2"),
            404: request(port, "GET", "/v2/models/other/config", headers=key),
            405: request(port, "GET", "/v2/models/colours/infer", headers=key),
            400: request(port, "GET", "/v2", headers={"Host": "evil.example"}),
            403: request(port, "POST", "/v2/models/colours/infer", headers={"Origin": "https://evil.example", **key}),
            415: infer(port, tensor(), **key, **{"Content-Encoding": "br"}),
        }
        held.error = RuntimeError("broken")
        answers[500] = infer(port, tensor(), **key)
        held.error, held.hold = None, True
        answers[503] = infer(port, tensor(), **key)
        held.gate.set()
    for status, (got, answer, _) in answers.items():
        assert (got, list(answer)) == (status, ["error"])


def test_the_protocols_own_client_is_told_what_is_wrong(service):
    client = pytest.importorskip("tritonclient.http")
    with client.InferenceServerClient(f"127.0.0.1:{service.port}") as triton:
        wrong = client.InferInput("picture", [1, 3, 32, 40], "FP32")
        wrong.set_data_from_numpy(np.zeros((1, 3, 32, 40), np.float32))
        with pytest.raises(client.InferenceServerException, match="the model takes input FP32"):
            triton.infer("colours", [wrong])
        with pytest.raises(client.InferenceServerException, match="there is no version '7': this service has 1"):
            triton.get_model_metadata("colours", "7")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_the_protocols_own_client_compresses_and_asks_for_configuration_and_statistics(service, predictor, coding):
    client = pytest.importorskip("tritonclient.http")
    x = predictor.preprocess(IMAGES)
    with client.InferenceServerClient(f"127.0.0.1:{service.port}") as triton:
        config = triton.get_model_config("colours")
        assert (config["name"], config["max_batch_size"]) == ("colours", 32)
        assert config["input"] == [{"name": "input", "data_type": "TYPE_FP32", "dims": [3, 32, 40]}]
        (before,) = triton.get_inference_statistics("colours")["model_stats"]
        tensor = client.InferInput("input", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        answer = triton.infer("colours", [tensor], request_compression_algorithm=coding)
        assert np.allclose(answer.as_numpy("logits"), predictor.run(x)["logits"], rtol=1e-5, atol=1e-6)
        (after,) = triton.get_inference_statistics()["model_stats"]
    assert (after["name"], after["version"]) == ("colours", "1")
    assert after["inference_count"] - before["inference_count"] == len(x)
    for kind, count in (
        ("success", 1),
        ("compute_input", 1),
        ("compute_infer", 3),
        ("queue", 3),
        ("compute_output", 1),
    ):
        new, old = after["inference_stats"][kind], before["inference_stats"][kind]
        assert new["count"] - old["count"] == count, kind
        assert new["ns"] > old["ns"], kind
    assert 1 <= after["execution_count"] - before["execution_count"] <= len(x)
    assert sum(row["compute_infer"]["count"] for row in after["batch_stats"]) == after["execution_count"]
    assert after["last_inference"] > 1.7e12


@pytest.mark.parametrize(
    ("body", "coding", "status", "message"),
    [
        (gzip.compress(png("pink")), "gzip", 200, None),
        (gzip.compress(png("pink")[:50]) + gzip.compress(png("pink")[50:]), "gzip", 200, None),
        (zlib.compress(png("pink")), "deflate", 200, None),
        (png("pink"), "identity", 200, None),
        (gzip.compress(bytes(20_000_000)), "gzip", 413, "the body is longer than 10000000 bytes"),
        (gzip.compress(png("pink"))[:-4], "gzip", 400, "the compressed body is cut off"),
        (png("pink"), "gzip", 400, "the body is not what Content-Encoding says"),
        (png("pink"), "br", 415, "Content-Encoding must be one of identity, gzip"),
    ],
)
def test_compressed_bodies_are_read(service, body, coding, status, message):
    headers = {"Content-Type": "image/png", "Content-Encoding": coding}
    got, answer, _ = request(service.port, "POST", "/predict", body, headers)
    assert got == status, answer
    assert answer["top"][0]["name"] == "pink" if message is None else message in answer["detail"]
