"""KServe's Open Inference Protocol, version 2, over HTTP: the model's own tensors, as JSON or binary data.

With it come Triton's extensions that its clients ask for: a model's configuration and its statistics.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, HTTPException, Request, Response

from topk_export.runtime.metadata import GROUP, NO_GROUP
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.session import TYPES
from topk_export.serve.answers import KSERVE, as_json, encode
from topk_export.serve.limits import Limits
from topk_export.serve.model import ServedModel
from topk_export.serve.service import Service
from topk_export.serve.triton import TYPES as TRITON_TYPES
from topk_export.serve.upload import read_body

NAMES = {
    np.dtype(kind): name
    for kind, name in ((np.float32, "FP32"), (np.uint8, "UINT8"), (np.int64, "INT64"), (bool, "BOOL"))
}
LENGTH = "inference-header-content-length"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")
CHARACTERS = 25  # of a number in JSON and its comma, at most


def router(service: Service) -> APIRouter:
    """Build the routes below ``/v2``."""
    routes = APIRouter(prefix=KSERVE)

    def check(model: str, version: str | None = None) -> ServedModel:
        current = service.model
        if model != current.predictor.name:
            raise HTTPException(404, f"there is no model {model!r}: this service has {current.predictor.name!r}")
        if version not in (None, str(current.release.version)):
            raise HTTPException(404, f"there is no version {version!r}: this service has {current.release.version}")
        return current

    @routes.get("")
    async def server() -> dict[str, Any]:
        return {"name": "topk-registry", "version": "2", "extensions": EXTENSIONS}

    @routes.get("/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @routes.get("/health/ready")
    async def ready() -> dict[str, bool]:
        service.check_ready()
        return {"ready": True}

    @routes.get("/models/stats", include_in_schema=False)
    @routes.get("/models/{model}/stats")
    @routes.get("/models/{model}/versions/{version}/stats", include_in_schema=False)
    async def stats(model: str | None = None, version: str | None = None) -> dict[str, Any]:
        """Return counts and times of the requests that this version has answered, of all processes together."""
        current = service.model if model is None else check(model, version)
        return {"model_stats": [service.metrics.statistics(current.predictor.name, current.release)]}

    @routes.get("/models/{model}")
    @routes.get("/models/{model}/versions/{version}", include_in_schema=False)
    async def metadata(model: str, version: str | None = None) -> dict[str, Any]:
        return _metadata(check(model, version))

    @routes.get("/models/{model}/ready")
    @routes.get("/models/{model}/versions/{version}/ready", include_in_schema=False)
    async def model_ready(model: str, version: str | None = None) -> dict[str, Any]:
        check(model, version)
        service.check_ready()
        return {"name": model, "ready": True}

    @routes.get("/models/{model}/config")
    @routes.get("/models/{model}/versions/{version}/config", include_in_schema=False)
    async def config(model: str, version: str | None = None) -> dict[str, Any]:
        """Return the model's configuration in Triton's words."""
        return _config(check(model, version).predictor, service.limits)

    @routes.post("/models/{model}/infer", response_model=None)
    @routes.post("/models/{model}/versions/{version}/infer", include_in_schema=False, response_model=None)
    async def infer(model: str, request: Request, version: str | None = None) -> Response:
        """Run the model on its input tensor, and return the wanted outputs."""
        check(model, version)
        async with service.turn(request) as current:
            body = await read_body(request, service.limits)
            with current.stage("input"):
                header = request.headers.get(LENGTH)
                head, x, groups = await service.lane(_parse, current.predictor, service.limits, body, header)
                service.check_group(current, told=groups is not None)
            outputs = await service.run(current, x, groups)
            with current.stage("output"):
                content, length = await service.lane(_answer, current, head, outputs)
        if length is None:
            return as_json(content)
        return Response(content, media_type="application/octet-stream", headers={LENGTH: str(length)})

    return routes


def _metadata(model: ServedModel) -> dict[str, Any]:
    predictor = model.predictor
    outputs = [
        {"name": output.name, "datatype": NAMES[np.dtype(TYPES[output.type])], "shape": [-1, *output.shape[1:]]}
        for output in predictor.session.get_outputs()
    ]
    inputs = [
        {"name": predictor.input_name, "datatype": NAMES[predictor.input_type], "shape": [-1, *predictor.input_shape]}
    ]
    if predictor.metadata.group_names:
        inputs.append({"name": GROUP, "datatype": NAMES[np.dtype(np.int64)], "shape": [-1]})
    return {
        "name": predictor.name,
        "versions": [str(model.release.version)],
        "platform": "onnxruntime_onnx",
        "inputs": inputs,
        "outputs": outputs,
    }


def _config(predictor: Predictor, limits: Limits) -> dict[str, Any]:
    def tensors(values: list[Any]) -> list[dict[str, Any]]:
        return [
            {"name": value.name, "data_type": TRITON_TYPES[value.type], "dims": list(value.shape[1:])}
            for value in values
        ]

    # a request may leave it out: the largest threshold serves then
    groups = [{"name": GROUP, "data_type": "TYPE_INT64", "dims": [], "optional": True}]
    groups = groups if predictor.metadata.group_names else []
    batching = {
        "preferred_batch_size": [limits.batch],
        "max_queue_delay_microseconds": round(1e6 * limits.delay_seconds),
    }
    return {
        "name": predictor.name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": limits.images,
        "input": tensors(predictor.session.get_inputs()) + groups,
        "output": tensors(predictor.session.get_outputs()),
        "dynamic_batching": batching,
    }


def _parse(
    predictor: Predictor, limits: Limits, body: bytes, length: str | None
) -> tuple[dict[str, Any], np.ndarray, list[int] | None]:
    """Return a request's JSON, its input tensor, and the number of each row's group where it tells them."""
    try:
        size = len(body) if length is None else int(length)
        if not 0 <= size <= len(body):
            raise ValueError(f"{LENGTH} is {size}, the body has {len(body)} bytes")
        head = json.loads(body[:size])
        x, groups = _inputs(predictor, limits, head["inputs"], body[size:])
        names = [output["name"] for output in head.get("outputs", ())]
        if unknown := set(names) - set(predictor.output_names):
            there = ", ".join(predictor.output_names)
            raise ValueError(f"no output is called {', '.join(sorted(unknown))}; there are {there}")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"outputs names {', '.join(sorted(twice))} more than once")
        wanted = _wanted(head, predictor.output_names)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise HTTPException(400, f"no request of the protocol: {type(error).__name__}: {error}") from error
    largest = _length(predictor, wanted, len(x))
    if largest > limits.answer_bytes:
        raise HTTPException(
            413,
            f"the answer could have {largest} bytes, and at most {limits.answer_bytes} are sent: ask for fewer rows or "
            "outputs, or for binary data",
        )
    return head, x, groups


def _inputs(
    predictor: Predictor, limits: Limits, tensors: list[Any], binary: bytes
) -> tuple[np.ndarray, list[int] | None]:
    """Return the input, and the number of each row's group where the request has that tensor, in either order."""
    names = predictor.metadata.group_names
    if len(tensors) not in (1, 1 + bool(names)):
        takes = f"{predictor.input_name} and, if it likes, {GROUP}" if names else predictor.input_name
        raise ValueError(f"the model takes {takes}, got {len(tensors)} inputs")
    given: dict[bool, np.ndarray] = {}
    for tensor in tensors:
        is_group = bool(names) and tensor["name"] == GROUP
        if is_group in given:
            raise ValueError(f"inputs names {tensor['name']} twice")
        own, binary = _binary(tensor, binary)
        given[is_group] = (_group_tensor if is_group else _tensor)(predictor, limits, tensor, own)
    if binary:
        raise ValueError(f"{len(binary)} bytes follow the JSON that no input counts by its binary_data_size")
    if False not in given:
        raise ValueError(f"the input {predictor.input_name} is missing")
    if (groups := given.get(True)) is not None and len(groups) != len(given[False]):
        raise ValueError(f"expected a {GROUP} for each of {len(given[False])} rows, got {len(groups)}")
    return given[False], None if groups is None else groups.tolist()


def _binary(tensor: Mapping[str, Any], binary: bytes) -> tuple[bytes | None, bytes]:
    """Return the bytes of a tensor, None where its data are numbers in the JSON, and the bytes of those after it."""
    size = tensor.get("parameters", {}).get("binary_data_size")
    if size is None:
        return None, binary
    if not isinstance(size, int) or not 0 <= size <= len(binary):
        raise ValueError(f"binary_data_size is {size}, but {len(binary)} bytes follow the JSON")
    return binary[:size], binary[size:]


def _group_tensor(predictor: Predictor, limits: Limits, tensor: Mapping[str, Any], binary: bytes | None) -> np.ndarray:
    """Return the number of each row's group [batch]."""
    kind, shape = NAMES[np.dtype(np.int64)], tuple(tensor["shape"])
    if tensor["datatype"] != kind or len(shape) != 1:
        raise ValueError(f"the model takes {GROUP} {kind} [batch], got {tensor['datatype']} {list(shape)}")
    given = np.asarray(tensor["data"]) if binary is None else np.frombuffer(binary, np.int64)
    names = predictor.metadata.group_names
    if given.dtype.kind not in "iu" or (given < NO_GROUP).any() or (given >= len(names)).any():
        raise ValueError(
            f"expected numbers from 0 to {len(names) - 1}, or {NO_GROUP} for none, as {GROUP}; they stand for "
            f"{', '.join(names)}"
        )
    return given.astype(np.int64).reshape(shape)


def _wanted(head: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, bool]:
    """Return the outputs that a request asks for, and whether each is sent as binary data."""
    default = bool(head.get("parameters", {}).get("binary_data_output"))
    outputs: list[dict[str, Any]] = head.get("outputs") or [{"name": name} for name in names]
    return {output["name"]: bool(output.get("parameters", {}).get("binary_data", default)) for output in outputs}


def _length(predictor: Predictor, wanted: Mapping[str, bool], rows: int) -> int:
    """Return the most bytes that an answer has."""
    return sum(
        rows * int(np.prod(output.shape[1:])) * (np.dtype(TYPES[output.type]).itemsize if binary else CHARACTERS)
        for output in predictor.session.get_outputs()
        if (binary := wanted.get(output.name)) is not None
    )


def _tensor(predictor: Predictor, limits: Limits, tensor: Mapping[str, Any], binary: bytes | None) -> np.ndarray:
    wanted = predictor.input_type
    shape = tuple(tensor["shape"])
    expected = predictor.input_name, NAMES[wanted], predictor.input_shape
    if (tensor["name"], tensor["datatype"], shape[1:]) != expected:
        takes = f"{predictor.input_name} {NAMES[wanted]} [batch, {', '.join(map(str, expected[2]))}]"
        raise ValueError(f"the model takes {takes}, got {tensor['name']} {tensor['datatype']} {list(shape)}")
    if not 1 <= shape[0] <= limits.images:
        raise ValueError(f"the batch must be 1 to {limits.images}, got {shape[0]}")
    if binary is None:
        return _numbers(tensor["data"], wanted).reshape(shape)
    return _finite(np.frombuffer(binary, wanted)).reshape(shape)


def _numbers(data: Any, wanted: np.dtype[Any]) -> np.ndarray:
    """Return numbers of JSON as the type that the model takes; none may be changed by it but by rounding."""
    given = np.asarray(data)
    if given.dtype.kind not in ("iuf" if wanted.kind == "f" else "iu"):
        raise ValueError(f"the data must be numbers that are {wanted.name}, got {given.dtype.name}")
    if wanted.kind != "f" and not (given.min(initial=0) >= 0 and given.max(initial=0) <= np.iinfo(wanted).max):
        raise ValueError(f"the data must be {wanted.name}, got {given.min()} to {given.max()}")
    with np.errstate(over="ignore"):  # what overflows is found below
        return _finite(given.astype(wanted))


def _finite(x: np.ndarray) -> np.ndarray:
    if not np.isfinite(x).all():
        raise ValueError("the input holds NaN or infinite numbers, and the model takes none")
    return x


def _answer(model: ServedModel, head: Mapping[str, Any], outputs: Mapping[str, np.ndarray]) -> tuple[bytes, int | None]:
    """Return an answer's body, and the length of its JSON where binary data follows."""
    tensors, parts = [], []
    for name, binary in _wanted(head, tuple(outputs)).items():
        value = outputs[name]
        tensor: dict[str, Any] = {"name": name, "datatype": NAMES[value.dtype], "shape": list(value.shape)}
        if binary:
            parts.append(np.ascontiguousarray(value).tobytes())
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        elif not np.isfinite(value).all():
            raise HTTPException(500, f"the output {name} is not finite, and JSON has no such numbers")
        else:
            tensor["data"] = value.ravel().tolist()
        tensors.append(tensor)
    answer = {"model_name": model.predictor.name, "model_version": str(model.release.version), "outputs": tensors}
    if "id" in head:
        answer["id"] = head["id"]
    text = encode(answer)
    return b"".join((text, *parts)), len(text) if parts else None
