"""KServe's Open Inference Protocol, version 2, over HTTP: the model's own tensors, as JSON or binary data."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, HTTPException, Request, Response

from topk_export.runtime.session import TYPES
from topk_export.serve.answers import as_json, encode
from topk_export.serve.service import Service
from topk_export.serve.upload import read_body

NAMES = {
    np.dtype(kind): name
    for kind, name in ((np.float32, "FP32"), (np.uint8, "UINT8"), (np.int64, "INT64"), (bool, "BOOL"))
}
LENGTH = "inference-header-content-length"


def router(service: Service) -> APIRouter:
    """Build the routes below ``/v2``."""
    routes = APIRouter(prefix="/v2")
    name = service.predictor.name
    own = _metadata(service)

    def check(model: str) -> None:
        if model != name:
            raise HTTPException(404, f"there is no model {model!r}: this service has {name!r}")

    @routes.get("")
    async def server() -> dict[str, Any]:
        return {"name": "topk-registry", "version": "2", "extensions": ["binary_tensor_data"]}

    @routes.get("/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @routes.get("/health/ready")
    async def ready() -> dict[str, bool]:
        service.check_ready()
        return {"ready": True}

    @routes.get("/models/{model}")
    @routes.get("/models/{model}/versions/1", include_in_schema=False)
    async def metadata(model: str) -> dict[str, Any]:
        check(model)
        return own

    @routes.get("/models/{model}/ready")
    @routes.get("/models/{model}/versions/1/ready", include_in_schema=False)
    async def model_ready(model: str) -> dict[str, Any]:
        check(model)
        service.check_ready()
        return {"name": name, "ready": True}

    @routes.post("/models/{model}/infer", response_model=None)
    @routes.post("/models/{model}/versions/1/infer", include_in_schema=False, response_model=None)
    async def infer(model: str, request: Request) -> Response:
        """Run the model on its input tensor, and return the wanted outputs."""
        check(model)
        service.check_ready()
        async with service.room:
            body = await read_body(request, service.limits)
            head, x = await service.ranking(_parse, service, body, request.headers.get(LENGTH))
            outputs = await service.run(x)
            content, length = await service.ranking(_answer, name, head, outputs)
        if length is None:
            return as_json(content)
        return Response(content, media_type="application/octet-stream", headers={LENGTH: str(length)})

    return routes


def _metadata(service: Service) -> dict[str, Any]:
    predictor = service.predictor
    outputs = [
        {"name": output.name, "datatype": NAMES[np.dtype(TYPES[output.type])], "shape": [-1, *output.shape[1:]]}
        for output in predictor.session.get_outputs()
    ]
    source = {
        "name": predictor.input_name,
        "datatype": NAMES[predictor.input_type],
        "shape": [-1, *predictor.input_shape],
    }
    return {
        "name": predictor.name,
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [source],
        "outputs": outputs,
    }


def _parse(service: Service, body: bytes, length: str | None) -> tuple[dict[str, Any], np.ndarray]:
    """Return a request's JSON and its input tensor."""
    try:
        size = len(body) if length is None else int(length)
        if not 0 <= size <= len(body):
            raise ValueError(f"{LENGTH} is {size}, the body has {len(body)} bytes")
        head = json.loads(body[:size])
        (tensor,) = head["inputs"]
        x = _tensor(service, tensor, body[size:])
        names = service.predictor.output_names
        unknown = {output["name"] for output in head.get("outputs", ())} - set(names)
        if unknown:
            raise ValueError(f"no output is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return head, x
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise HTTPException(400, f"no request of the protocol: {type(error).__name__}: {error}") from error


def _tensor(service: Service, tensor: Mapping[str, Any], binary: bytes) -> np.ndarray:
    predictor, most = service.predictor, service.limits.images
    wanted = predictor.input_type
    shape = tuple(tensor["shape"])
    expected = predictor.input_name, NAMES[wanted], predictor.input_shape
    if (tensor["name"], tensor["datatype"], shape[1:]) != expected:
        takes = f"{predictor.input_name} {NAMES[wanted]} [batch, {', '.join(map(str, expected[2]))}]"
        raise ValueError(f"the model takes {takes}, got {tensor['name']} {tensor['datatype']} {list(shape)}")
    if not 1 <= shape[0] <= most:
        raise ValueError(f"the batch must be 1 to {most}, got {shape[0]}")
    size = tensor.get("parameters", {}).get("binary_data_size")
    if size is None:
        return np.asarray(tensor["data"], wanted).reshape(shape)
    if size != len(binary):
        raise ValueError(f"binary_data_size is {size}, but {len(binary)} bytes follow the JSON")
    return np.frombuffer(binary, wanted).reshape(shape)


def _answer(name: str, head: Mapping[str, Any], outputs: Mapping[str, np.ndarray]) -> tuple[bytes, int | None]:
    """Return an answer's body, and the length of its JSON where binary data follows."""
    default = bool(head.get("parameters", {}).get("binary_data_output"))
    wanted: list[dict[str, Any]] = head.get("outputs") or [{"name": output} for output in outputs]
    tensors, parts = [], []
    for output in wanted:
        value = outputs[output["name"]]
        tensor: dict[str, Any] = {
            "name": output["name"],
            "datatype": NAMES[value.dtype],
            "shape": list(value.shape),
        }
        if output.get("parameters", {}).get("binary_data", default):
            parts.append(np.ascontiguousarray(value).tobytes())
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        elif not np.isfinite(value).all():
            raise HTTPException(500, f"the output {output['name']} is not finite, and JSON has no such numbers")
        else:
            tensor["data"] = value.ravel().tolist()
        tensors.append(tensor)
    answer = {"model_name": name, "model_version": "1", "outputs": tensors}
    if "id" in head:
        answer["id"] = head["id"]
    text = encode(answer)
    return b"".join((text, *parts)), len(text) if parts else None
