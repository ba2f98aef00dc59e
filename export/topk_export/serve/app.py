"""HTTP application that serves an exported model.

The routes are ``/predict``, ``/healthz``, ``/metrics``, ``/model`` (the metadata of the model), and ``/`` (a web page
to try the model). The application limits the size of a request body, the number of pixels of the images, and the number
of images in progress. If a request exceeds a limit, the application rejects the request and does not decode the images.
If the client made an error, the status is 4xx, and the key ``detail`` of the JSON answer contains the reason. If the
status is 503, the client may send the request again.
"""

import asyncio
import contextlib
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topk_export.errors import ImageTooLargeError, ModelFileError, PredictionError
from topk_export.runtime.inputs import random_inputs
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import Prediction, check_outputs
from topk_export.serve.batching import Batcher
from topk_export.serve.limits import (
    RETRY,
    Budget,
    Limits,
    Reader,
    Wanted,
    check_query,
    within_seconds,
)
from topk_export.serve.workers import BusyError, Workers

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src blob: data:; "
    "connect-src 'self'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
)
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", POLICY.encode()),
)
LOCAL = ("localhost", "127.0.0.1", "::1")
LABELS = ("route", "status")
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # in seconds
IDLE_SECONDS = 1.0
ROUTES = frozenset(("/", "/predict", "/healthz", "/metrics", "/model"))


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
        self.budget = Budget(limits)
        self.draining = False
        self._in_progress = 0
        self._read = Reader(predictor, limits)
        self._workers = Workers(limits.decoders, limits.total_pixels)
        self._batcher: Batcher | None = None

    async def start(self) -> None:
        """Start the queue. Then run the model once: the first run allocates memory, so later runs are faster."""
        predictor, limits = self.predictor, self.limits
        self._batcher = Batcher(predictor, limits.batch, limits.max_set, self.metrics.count_batch)
        await asyncio.to_thread(predictor.run, self._warm_up())

    def _warm_up(self) -> Any:
        predictor = self.predictor
        if predictor.metadata.preprocess is not None:
            return np.zeros((1, *predictor.input_shape), predictor.input_type)
        rows = random_inputs(predictor.session)
        return {name: x[None] if predictor.metadata.batch == 0 else x for name, x in rows.items()}

    async def stop(self) -> None:
        if self._batcher is not None:
            await self._batcher.stop()
        await self._workers.stop()

    async def answer(self, request: Request) -> bytes:
        """Read a request to ``POST /predict``, run the model, and return the answer as JSON.

        Raises:
            HTTPException: the request is malformed or exceeds a limit.
            ValueError: an image cannot be read, or an option is wrong.
            PredictionError: the outputs for an image contain NaN or a logit of plus infinity.
        """
        start = time.perf_counter()
        with self._places(1):
            async with self.budget.body(request) as body:
                wanted = await self._workers.run(self._read, request, body)
                with self._places(len(wanted.images) + len(wanted.rows) - 1):
                    limit = HTTPException(503, f"no answer within {self.limits.request_seconds:g} s", RETRY)
                    predictions = await within_seconds(self._predict(wanted), self.limits.request_seconds, limit)
        seconds = time.perf_counter() - start
        self.metrics.seconds.observe(seconds)
        return await self._workers.run(_as_json, predictions, wanted.max_set, self.predictor.metadata.k, seconds)

    async def _predict(self, wanted: Wanted) -> list[Prediction]:
        assert self._batcher is not None
        batcher = self._batcher
        if wanted.rows:
            return await asyncio.gather(*(batcher(row, wanted.mask, wanted.alpha) for row in wanted.rows))
        order = self._workers.admit(wanted.pixels)

        async def one(image: bytes) -> Prediction:
            x = await self._workers.run(self.predictor.input_of, image, order=order)
            return await batcher(x, wanted.mask, wanted.alpha)

        tasks = [asyncio.ensure_future(one(image)) for image in wanted.images]
        try:
            return await asyncio.gather(*tasks)
        finally:
            self._workers.discharge(order)
            for task in tasks:
                task.cancel()

    @contextlib.contextmanager
    def _places(self, count: int) -> Any:
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

    The attribute ``state.service`` of the application is the :class:`Service`. ``hosts`` are the names that the Host
    header of a request may contain. A request with another name gets status 400, except on the route ``/healthz``.

    Raises:
        ModelFileError: the model lacks an output that predictions need, or the preprocessing of images is unknown.
    """
    check_outputs(predictor.output_names, predictor.metadata)
    if predictor.metadata.preprocess is not None:
        predictor.metadata.preprocess.check_known()
    if predictor.positions:
        raise ModelFileError("the logits have several positions per row, which the service does not support")
    service = Service(predictor, limits or Limits())

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(title="topk-registry", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.add_middleware(Guard, service, frozenset(hosts))
    page = (files("topk_export.serve") / "page.html").read_text(encoding="utf-8")
    facts = {"name": predictor.name, "device": predictor.device, "limits": asdict(service.limits)}
    facts |= {"inputs": predictor.inputs} | asdict(predictor.metadata)
    model = json.dumps(facts, ensure_ascii=False).encode()

    @app.exception_handler(ValueError)
    async def wrong_input(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 413 if isinstance(error, ImageTooLargeError) else 400)

    @app.exception_handler(BusyError)
    async def busy(request: Request, error: BusyError) -> JSONResponse:
        return JSONResponse({"detail": f"{error}: try again"}, 503, RETRY)

    @app.exception_handler(PredictionError)
    async def no_prediction(request: Request, error: PredictionError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 500)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        return Response(await service.answer(request), media_type="application/json")

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def health(request: Request) -> JSONResponse:
        check_query(request)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_query(request)
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/model")
    async def describe(request: Request) -> Response:
        check_query(request)
        return Response(model, media_type="application/json")

    @app.api_route("/", methods=["GET", "HEAD"])
    async def start(request: Request) -> HTMLResponse:
        check_query(request)
        if predictor.metadata.preprocess is None:
            raise HTTPException(404, "the model takes arrays, and the page needs images: send JSON to /predict")
        return HTMLResponse(page)

    return app


class Guard:
    """ASGI middleware that checks the Host and Origin headers, counts requests, and adds security headers to answers.

    ``hosts`` are the names that the Host header may contain. While the service stops, each answer tells the client to
    close the connection.

    If the service answers before the whole body has arrived, such as with status 413, the middleware reads and discards
    the rest of the body before the connection closes. Otherwise, a client that still sends would get a reset connection
    in place of the answer. This ends after ``Limits.body_seconds``, or if no byte arrives for ``IDLE_SECONDS``.
    """

    def __init__(self, app: ASGIApp, service: Service, hosts: frozenset[str]) -> None:
        self._app, self._service, self._hosts = app, service, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        unread = scope["method"] not in ("GET", "HEAD")

        async def watched_receive() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def discard() -> None:
            while unread:
                await asyncio.wait_for(watched_receive(), IDLE_SECONDS)

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope["path"] if scope["path"] in ROUTES else "other"
                self._service.metrics.requests.labels(route, message["status"]).inc()
                # a connection with an unread body cannot serve another request
                closing = ((b"connection", b"close"),) if self._service.draining or unread else ()
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS, *closing]}
            elif unread and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(discard(), self._service.limits.body_seconds)
                message = {"type": "http.response.body"}
            await send(message)

        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        # /healthz takes every host, because orchestrators such as Kubernetes send the IP address
        if scope["path"] != "/healthz" and _name_of(host) not in self._hosts:
            detail = f"the host {host[:100]!r} is not allowed: start the service with --allowed-hosts NAME"
            await JSONResponse({"detail": detail}, 400)(scope, receive, watched_send)
        elif scope["method"] == "POST" and origin not in (None, f"http://{host}", f"https://{host}"):
            answer = JSONResponse({"detail": "requests from other sites are not allowed"}, 403)
            await answer(scope, receive, watched_send)
        else:
            await self._app(scope, watched_receive, watched_send)


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
