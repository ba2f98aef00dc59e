"""Bodies of the service's answers, and their encoding, which runs in a thread."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from topk_export.runtime.predictor import Predictor


class RankedClass(BaseModel):
    index: int
    name: str
    marginal: float
    softmax: float


class Ranking(BaseModel):
    """``marginal``: the chance of being in the top-k set; ``softmax``: the softmax share.

    ``set``: the prediction set of a calibrated model; ``softmax_set``: the classes with the wanted softmax mass. Each
    is cut to ``max_set`` classes, and ``set_size`` and ``softmax_set_size`` count them all.
    """

    top: list[RankedClass]
    set: list[RankedClass] | None = None
    set_size: int | None = None
    softmax_set: list[RankedClass] | None = None
    softmax_set_size: int | None = None
    set_nodes: list[str] | None = None


class ProbableClass(BaseModel):
    index: int
    name: str
    probability: float


class Labels(BaseModel):
    """A file of several labels: the k most probable classes, the chosen ones, and the set, of a calibrated model."""

    top: list[ProbableClass]
    labels: list[ProbableClass] | None = None
    set: list[ProbableClass] | None = None
    set_size: int | None = None


class Answer(Ranking):
    k: int
    milliseconds: float


class LabelsAnswer(Labels):
    k: int
    milliseconds: float


class Problem(BaseModel):
    detail: str


class Answers(BaseModel):
    """One ranking or problem for each image, in order."""

    k: int
    predictions: list[Ranking | Labels | Problem]
    milliseconds: float


KSERVE = "/v2"
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {
        "model": Problem,
        "description": "no image that can be decoded, or an option that the model does not take",
    },
    401: {"model": Problem, "description": "an API key is needed"},
    403: {"model": Problem, "description": "a page of another site sent this"},
    408: {"model": Problem, "description": "the body came too slowly"},
    413: {"model": Problem, "description": "too many bytes, or too many pixels"},
    415: {"model": Problem, "description": "no image, form or JSON"},
    429: {"model": Problem, "description": "too many requests in progress from this address"},
    500: {"model": Problem, "description": "the model failed, or gave no numbers"},
    503: {"model": Problem, "description": "overloaded, too slow, or not ready"},
}


def problem(path: str, detail: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error's answer: its text is under ``detail``, and under ``error`` where KServe's protocol is spoken."""
    key = "error" if path == KSERVE or path.startswith(f"{KSERVE}/") else "detail"
    return JSONResponse({key: detail}, status, headers)


def ranking(predictor: Predictor, outputs: Mapping[str, np.ndarray], softmax_mass: float | None, max_set: int) -> dict:
    """Return the fields of a :class:`Ranking` or of :class:`Labels` for outputs [1, ...]."""
    return asdict(predictor.rank(outputs, softmax_mass=softmax_mass, max_set=max_set)[0])


def encode(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def as_json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
