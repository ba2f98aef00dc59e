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
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topk_export.errors import ImageTooLargeError, PredictionError
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import Prediction, check_outputs
from topk_export.serve.batching import Batcher
from topk_export.serve.limits import (
    RETRY,
    Budget,
    Limits,
    Wanted,
    check_pixels,
    check_query,
    read_request,
    within_seconds,
)

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
ROUTES = frozenset(("/", "/predict", "/healthz", "/metrics", "/model"))


class Metrics:
    """Counters of the service, such as requests and images. ``text`` returns the counters in Prometheus' format."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.images = self.batches = self.in_progress = self.predictions = 0
        self.seconds = 0.0

    def count_batch(self, size: int) -> None:
        self.batches += 1
        self.images += size

    def text(self) -> str:
        values = {
            "topk_images_total": self.images,  # images that entered a run of the model
            "topk_batches_total": self.batches,
            "topk_predictions_total": self.predictions,  # requests for predictions that got an answer
            "topk_predict_seconds_total": self.seconds,  # total time of these requests, in seconds
            "topk_images_in_progress": self.in_progress,
        }
        lines = ["# TYPE topk_requests_total counter"]
        for (route, status), count in sorted(self.requests.items()):
            lines.append(f'topk_requests_total{{route="{route}",status="{status}"}} {count}')
        for name, value in values.items():
            lines += [f"# TYPE {name} {'counter' if name.endswith('total') else 'gauge'}", f"{name} {value}"]
        return "\n".join(lines) + "\n"


class Service:
    """The model of an HTTP application, with the queue of images and the threads that decode images."""

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self.predictor, self.limits, self.metrics = predictor, limits, Metrics()
        self.budget = Budget(limits)
        self.draining = False
        self._decoders = ThreadPoolExecutor(limits.decoders, thread_name_prefix="decode")
        self._batcher: Batcher | None = None

    async def start(self) -> None:
        """Start the queue. Then run the model once: the first run allocates memory, so later runs are faster."""
        predictor, limits = self.predictor, self.limits
        self._batcher = Batcher(predictor, limits.batch, limits.max_set, self.metrics.count_batch)
        await asyncio.to_thread(predictor.run, np.zeros((1, *predictor.input_shape), predictor.input_type))

    async def stop(self) -> None:
        if self._batcher is not None:
            await self._batcher.stop()
        await asyncio.to_thread(self._decoders.shutdown)

    async def answer(self, request: Request) -> dict[str, Any]:
        """Read a request to ``POST /predict``, run the model, and return the JSON values of the answer.

        Raises:
            HTTPException: the request is malformed or exceeds a limit.
            ValueError: an image cannot be read, or an option is wrong.
            PredictionError: the outputs for an image contain NaN or a logit of plus infinity.
        """
        start = time.perf_counter()
        with self._places(1):
            async with self.budget.body(request) as body:
                wanted = await read_request(request, body, self.limits)
                with self._places(len(wanted.images) - 1):
                    limit = HTTPException(503, f"no answer within {self.limits.request_seconds:g} s", RETRY)
                    predictions = await within_seconds(self._predict(wanted), self.limits.request_seconds, limit)
        seconds = time.perf_counter() - start
        self.metrics.predictions += 1
        self.metrics.seconds += seconds
        return {
            "k": self.predictor.metadata.k,
            "predictions": [_as_json(prediction, wanted.max_set) for prediction in predictions],
            "milliseconds": round(1e3 * seconds, 3),
        }

    async def _predict(self, wanted: Wanted) -> list[Prediction]:
        assert self._batcher is not None
        loop, batcher = asyncio.get_running_loop(), self._batcher
        mask = None if wanted.allow is None else self.predictor.mask_of(wanted.allow)
        await loop.run_in_executor(self._decoders, check_pixels, wanted.images, self.predictor, self.limits)

        async def one(image: bytes) -> Prediction:
            x = await loop.run_in_executor(self._decoders, self.predictor.input_of, image)
            return await batcher(x, mask, wanted.alpha)

        tasks = [asyncio.ensure_future(one(image)) for image in wanted.images]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    @contextlib.contextmanager
    def _places(self, count: int) -> Any:
        if self.metrics.in_progress + count > self.limits.queue:
            raise HTTPException(
                503, f"{self.metrics.in_progress} images are in progress, the limit is {self.limits.queue}", RETRY
            )
        self.metrics.in_progress += count
        try:
            yield
        finally:
            self.metrics.in_progress -= count


def create_app(predictor: Predictor, limits: Limits | None = None, hosts: Sequence[str] = LOCAL) -> FastAPI:
    """Build the HTTP application that serves a model.

    The attribute ``state.service`` of the application is the :class:`Service`. ``hosts`` are the names that the Host
    header of a request may contain. A request with another name gets status 400, except on the route ``/healthz``.

    Raises:
        ModelFileError: the model lacks an output that predictions need, or the preprocessing of images is unknown.
    """
    check_outputs(predictor.output_names, predictor.metadata)
    predictor.metadata.preprocess.check_known()
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
    facts |= asdict(predictor.metadata)
    model = json.dumps(facts, ensure_ascii=False).encode()

    @app.exception_handler(ValueError)
    async def wrong_input(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 413 if isinstance(error, ImageTooLargeError) else 400)

    @app.exception_handler(PredictionError)
    async def no_prediction(request: Request, error: PredictionError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 500)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        content = await service.answer(request)
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return Response(text.encode(), media_type="application/json")

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def health(request: Request) -> JSONResponse:
        check_query(request)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_query(request)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/model")
    async def describe(request: Request) -> Response:
        check_query(request)
        return Response(model, media_type="application/json")

    @app.api_route("/", methods=["GET", "HEAD"])
    async def start(request: Request) -> HTMLResponse:
        check_query(request)
        return HTMLResponse(page)

    return app


class Guard:
    """ASGI middleware that checks the Host and Origin headers, counts requests, and adds security headers to answers.

    ``hosts`` are the names that the Host header may contain. While the service stops, each answer tells the
    client to close the connection.
    """

    def __init__(self, app: ASGIApp, service: Service, hosts: frozenset[str]) -> None:
        self._app, self._service, self._hosts = app, service, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope["path"] if scope["path"] in ROUTES else "other"
                self._service.metrics.requests[route, message["status"]] += 1
                # after an error, part of the body may be unread, so the connection cannot serve another request
                unread = scope["method"] == "POST" and message["status"] >= 400
                closing = ((b"connection", b"close"),) if self._service.draining or unread else ()
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS, *closing]}
            await send(message)

        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        # /healthz takes every host, because orchestrators such as Kubernetes send the IP address
        if scope["path"] != "/healthz" and _name_of(host) not in self._hosts:
            detail = f"the host {host[:100]!r} is not allowed: start the service with --allowed-hosts NAME"
            await JSONResponse({"detail": detail}, 400)(scope, receive, watched)
        elif scope["method"] == "POST" and origin not in (None, f"http://{host}", f"https://{host}"):
            await JSONResponse({"detail": "requests from other sites are not allowed"}, 403)(scope, receive, watched)
        else:
            await self._app(scope, receive, watched)


def _name_of(host: str) -> str:
    """Return the host name in a Host header, without the port, in lower case. For a malformed header, return ""."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return str(ipaddress.ip_address(name)) if ":" in name else name
    except ValueError:
        return ""


def _as_json(prediction: Prediction, max_set: int) -> dict[str, Any]:
    content = asdict(prediction)
    if content["set"] is not None:
        content["set"] = content["set"][:max_set]
    return content
