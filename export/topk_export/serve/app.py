"""An exported model over HTTP, for one machine: FastAPI, dynamic batching, health, metrics and a page to try it on.

Limits come before work: the body is counted while it is read, an image's pixels are read from its header, the queue is
bounded. What a client does wrong is a 4xx that says what; 503 means try again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel

from topk_export.errors import ImageError, ImageTooLargeError
from topk_export.runtime.predictor import Predictor
from topk_export.serve.batching import Batcher, OverloadedError, WarmUp
from topk_export.serve.upload import image_bytes

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src blob: data:; connect-src 'self'"
)
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["image"],
                    "properties": {"image": {"type": "string", "format": "binary"}},
                }
            },
        },
    }
}


@dataclass(frozen=True)
class Limits:
    """What one client may ask of the server."""

    body_bytes: int = 10_000_000
    body_seconds: float = 30.0
    queue: int = 128
    batch: int = 16
    delay_seconds: float = 0.005
    decoders: int = 2


class RankedClass(BaseModel):
    index: int
    name: str
    marginal: float
    probability: float


class Answer(BaseModel):
    """``marginal``: the chance of being in the top-k set; ``probability``: the softmax share.

    ``set``: the prediction set of a calibrated model; ``softmax_set``: the classes with the wanted softmax mass.
    """

    k: int
    top: list[RankedClass]
    set: list[RankedClass] | None = None
    softmax_set: list[RankedClass] | None = None
    milliseconds: float


class Problem(BaseModel):
    detail: str


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "no image, or one that cannot be decoded"},
    408: {"model": Problem, "description": "the body came too slowly"},
    413: {"model": Problem, "description": "too many bytes, or too many pixels"},
    415: {"model": Problem, "description": "neither an image nor a form"},
    503: {"model": Problem, "description": "overloaded, or not ready"},
}


class Metrics:
    """Counters of one application, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("topk_requests", "Requests", ("route", "status"), registry=self.registry)
        self.seconds = Histogram("topk_predict_seconds", "Time of a prediction", registry=self.registry)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        self.batches = Histogram("topk_batch_size", "Inputs a batch", buckets=sizes, registry=self.registry)
        self.waiting = Gauge("topk_queue_length", "Inputs that wait", registry=self.registry)


def create_app(predictor: Predictor, limits: Limits = Limits()) -> FastAPI:
    """The HTTP application of a loaded model."""
    metrics = Metrics()
    batcher = Batcher(
        predictor.run,
        max_batch=limits.batch,
        max_delay=limits.delay_seconds,
        max_queue=limits.queue,
        on_batch=metrics.batches.observe,
    )
    metrics.waiting.set_function(lambda: batcher.waiting)
    room = asyncio.Semaphore(limits.queue)
    decoders = ThreadPoolExecutor(limits.decoders, thread_name_prefix="decode")
    warm_up = WarmUp(batcher, _blank(predictor))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        warm_up.start()
        yield
        await warm_up.stop()
        await batcher.stop()
        decoders.shutdown()

    app = FastAPI(title="topk-registry", description=_describe(predictor), lifespan=lifespan)

    @app.middleware("http")
    async def count(request: Request, call_next: Any) -> Response:
        status = 500
        try:
            response = await call_next(request)
            status = response.status_code
        finally:
            route = getattr(request.scope.get("route"), "path", "other")
            metrics.requests.labels(route, status).inc()
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @app.post("/predict", responses=PROBLEMS, openapi_extra=BODY)
    async def predict(request: Request, softmax_mass: Annotated[float | None, Query(gt=0, le=1)] = None) -> Answer:
        """The top-k classes of one image, sent as the body or as the form's field ``image``.

        With a calibrated model also its prediction set; with ``softmax_mass`` the fewest classes whose shares reach it.
        """
        if problem := warm_up.problem():
            raise _try_later(problem)
        if room.locked():
            raise _try_later(f"{limits.queue} requests are in progress already")
        start = time.perf_counter()
        async with room:
            body = await image_bytes(request, limits.body_bytes, limits.body_seconds)
            x = await _decode(predictor, body, decoders)
            outputs = await _infer(batcher, x)
        prediction = predictor.rank(outputs, softmax_mass=softmax_mass)[0]
        seconds = time.perf_counter() - start
        metrics.seconds.observe(seconds)
        return Answer(k=predictor.metadata.k, milliseconds=1e3 * seconds, **asdict(prediction))

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": Problem}})
    async def readiness() -> dict[str, str]:
        """The model has run, and there is room for a request."""
        if problem := warm_up.problem():
            raise _try_later(problem)
        if room.locked():
            raise _try_later("busy")
        return {"status": "ready"}

    @app.get("/metrics", include_in_schema=False)
    async def scrape() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/model")
    async def model() -> JSONResponse:
        """What the file says of itself, and where it runs."""
        return JSONResponse({"device": predictor.device, **asdict(predictor.metadata)})

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        text = (files("topk_export.serve") / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})

    return app


def _describe(predictor: Predictor) -> str:
    meta = predictor.metadata
    return f"{meta.backbone or 'A classifier'} of {meta.num_classes} classes with exact top-{meta.k} probabilities."


def _blank(predictor: Predictor) -> np.ndarray:
    return np.zeros((1, *predictor.input_shape), np.uint8 if predictor.metadata.in_graph else np.float32)


def _try_later(problem: str) -> HTTPException:
    return HTTPException(503, problem, {"Retry-After": "1"})


async def _decode(predictor: Predictor, body: bytes, decoders: ThreadPoolExecutor) -> np.ndarray:
    try:
        return await asyncio.get_running_loop().run_in_executor(decoders, predictor.preprocess, [body])
    except ImageTooLargeError as error:
        raise HTTPException(413, str(error)) from error
    except ImageError as error:
        raise HTTPException(400, str(error)) from error


async def _infer(batcher: Batcher, x: np.ndarray) -> dict[str, np.ndarray]:
    try:
        return await batcher(x)
    except OverloadedError as error:
        raise _try_later(str(error)) from error
