"""HTTP application that serves an exported model.

The routes are ``/predict``, ``/healthz``, ``/metrics``, ``/model`` (the metadata of the model), and ``/`` (a web page
to try the model). If the client made an error, the status is 4xx, and the key ``detail`` of the JSON answer contains
the reason. If the status is 503, the client may send the request again.

The application limits the length of a body, the images of a request and the images in progress. It does not limit the
bandwidth of clients: slow connections are the task of the proxy in front of the service.
"""

import asyncio
import contextlib
import ipaddress
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topk_export.errors import ImageTooLargeError, ModelFileError, PredictionError
from topk_export.runtime.inputs import random_inputs
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import Prediction, check_outputs
from topk_export.serve.batching import Batcher
from topk_export.serve.reading import Limits, read_request

HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src blob: data:; connect-src 'self'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
}
STATUS: dict[type[Exception], int] = {  # of the answer, by exception
    ValueError: 400,
    ClientDisconnect: 400,
    ImageTooLargeError: 413,
    PredictionError: 500,
}
LOCAL = ("localhost", "127.0.0.1", "::1")
LABELS = ("route", "status")
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # in seconds
ROUTES = frozenset(("/", "/predict", "/healthz", "/metrics", "/model"))
RETRY = {"Retry-After": "1"}
DECODERS = min(4, os.cpu_count() or 1)  # number of threads that decode images


class Metrics:
    """Metrics of the service, such as the number of requests. ``text`` returns them in the format of Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("topk_requests", "Answers by route and status", LABELS, registry=self.registry)
        self.seconds = Histogram(
            "topk_predict_seconds", "Time of a request that got predictions", buckets=BUCKETS, registry=self.registry
        )
        self.images = Counter("topk_images", "Images that entered a run of the model", registry=self.registry)
        self.batches = Counter("topk_batches", "Runs of the model", registry=self.registry)
        self.in_progress = Gauge("topk_images_in_progress", "Images in progress", registry=self.registry)

    def count_batch(self, size: int) -> None:
        self.batches.inc()
        self.images.inc(size)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Service:
    """The model of an HTTP application, with the queue of images and the threads that decode images."""

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self.predictor, self.limits, self.metrics = predictor, limits, Metrics()
        self._in_progress = 0
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")
        self._batcher: Batcher | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the queue, and run the model once: the first run allocates memory, so later runs are faster."""
        predictor, limits = self.predictor, self.limits
        self._batcher = Batcher(predictor, limits.batch, limits.max_set, self.metrics.count_batch)
        try:
            await asyncio.to_thread(predictor.run, self._warm_up())
        except Exception:
            if predictor.metadata.preprocess is not None:
                raise
            # random arrays need not fit a model of arrays
        yield
        await self._batcher.stop()
        await asyncio.to_thread(self._decoders.shutdown)

    def _warm_up(self) -> Any:
        predictor = self.predictor
        if predictor.metadata.preprocess is not None:
            return np.zeros((1, *predictor.input_shape), predictor.input_type)
        rows = random_inputs(predictor.session)
        return {name: x[None] if predictor.metadata.batch == 0 else x for name, x in rows.items()}

    async def answer(self, request: Request) -> bytes:
        """Read a request to ``POST /predict``, run the model, and return the answer as JSON.

        Raises:
            HTTPException: the request has a wrong type or exceeds a limit.
            ValueError: the request is malformed, an image cannot be read, or an option is wrong.
            PredictionError: the outputs for an image contain NaN or a logit of plus infinity.
        """
        start = time.perf_counter()
        limit = self.limits.request_seconds
        try:
            predictions, max_set = await asyncio.wait_for(self._predict(request), limit)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise HTTPException(503, f"no answer within {limit:g} s", RETRY) from error
        seconds = time.perf_counter() - start
        self.metrics.seconds.observe(seconds)
        return await asyncio.to_thread(_as_json, predictions, max_set, self.predictor.metadata.k, seconds)

    async def _predict(self, request: Request) -> tuple[list[Prediction], int]:
        assert self._batcher is not None
        batcher = self._batcher

        async def one(x: Any) -> Prediction:
            if isinstance(x, bytes):
                loop = asyncio.get_running_loop()
                x = await loop.run_in_executor(self._decoders, self.predictor.input_of, x)
            return await batcher(x, wanted.mask, wanted.alpha)

        with self._places(1):
            wanted = await read_request(request, self.predictor, self.limits)
            with self._places(len(wanted.items) - 1):
                tasks = [asyncio.ensure_future(one(item)) for item in wanted.items]
                try:
                    return await asyncio.gather(*tasks), wanted.max_set
                finally:  # after an error of one image, no limit counts the others: end the work on them
                    for task in tasks:
                        task.cancel()

    @contextlib.contextmanager
    def _places(self, count: int) -> Iterator[None]:
        if self._in_progress + count > self.limits.queue:
            raise HTTPException(
                503, f"{self._in_progress} images are in progress, the limit is {self.limits.queue}", RETRY
            )
        self._in_progress += count
        self.metrics.in_progress.set(self._in_progress)
        try:
            yield
        finally:
            self._in_progress -= count
            self.metrics.in_progress.set(self._in_progress)


def create_app(predictor: Predictor, limits: Limits | None = None, hosts: Sequence[str] = LOCAL) -> FastAPI:
    """Build the HTTP application that serves a model.

    ``hosts`` are the names that the Host header of a request may contain. A request with another name gets status 400,
    except on the route ``/healthz``.

    Raises:
        ModelFileError: the model lacks an output that predictions need, or the preprocessing of images is unknown.
    """
    check_outputs(predictor.output_names, predictor.metadata)
    if predictor.metadata.preprocess is not None:
        predictor.metadata.preprocess.check_known()
    if predictor.positions:
        raise ModelFileError("the logits have several positions per row, which the service does not support")
    service = Service(predictor, limits or Limits())
    page = (files("topk_export.serve") / "page.html").read_text(encoding="utf-8")
    facts = {"name": predictor.name, "device": predictor.device, "limits": asdict(service.limits)}
    facts |= {"inputs": predictor.inputs} | asdict(predictor.metadata)
    model = json.dumps(facts, ensure_ascii=False).encode()
    app = FastAPI(
        title="topk-registry", lifespan=lambda app: service.running(), docs_url=None, redoc_url=None, openapi_url=None
    )
    app.add_middleware(Guard, hosts=hosts, answers=service.metrics.requests)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
        return JSONResponse({"detail": str(error)}, status)

    for kind in STATUS:
        app.add_exception_handler(kind, failed)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        return Response(await service.answer(request), media_type="application/json")

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/model")
    async def describe() -> Response:
        return Response(model, media_type="application/json")

    @app.api_route("/", methods=["GET", "HEAD"])
    async def start() -> HTMLResponse:
        if predictor.metadata.preprocess is None:
            raise HTTPException(404, "the model takes arrays, and the page needs images: send JSON to /predict")
        return HTMLResponse(page)

    return app


class Guard:
    """ASGI middleware that rejects requests of other sites, counts answers, and adds security headers to answers.

    ``hosts`` are the names that the Host header of a request may contain. ``answers`` counts by route and status.
    The class does not use Starlette's ``BaseHTTPMiddleware``, which starts a task per request.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], answers: Counter) -> None:
        self._app = app
        self._hosts = hosts
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"]
                self._answers.labels(path if path in ROUTES else "other", message["status"]).inc()
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] != "http":  # the start and the end of the application
            await self._app(scope, receive, send)
            return
        answer = _refusal(Request(scope), self._hosts)
        await (answer or self._app)(scope, receive, guarded_send)


def _refusal(request: Request, hosts: Sequence[str]) -> JSONResponse | None:
    """Return an answer to a request that a page of another site may have made, or None."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    # /healthz takes every host, because orchestrators such as Kubernetes send the IP address
    if request.scope["path"] != "/healthz" and _name_of(host) not in hosts:
        detail = f"the host {host[:100]!r} is not allowed: start the service with --allowed-hosts NAME"
        return JSONResponse({"detail": detail}, 400)
    if request.method == "POST" and origin not in (None, f"http://{host}", f"https://{host}"):
        return JSONResponse({"detail": "requests from other sites are not allowed"}, 403)
    return None


def _name_of(host: str) -> str:
    """Return the host name in a Host header, without the port, in lower case. For a malformed header, return ""."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return str(ipaddress.ip_address(name)) if ":" in name else name
    except ValueError:
        return ""


def _as_json(predictions: list[Prediction], max_set: int, k: int, seconds: float) -> bytes:
    contents = [asdict(prediction) for prediction in predictions]
    for content in contents:
        if content["set"] is not None:
            content["set"] = content["set"][:max_set]
    answer = {"k": k, "predictions": contents, "milliseconds": round(1e3 * seconds, 3)}
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
