"""The HTTP application of an exported model: predictions, health, metrics, KServe's protocol, and a page to try it on.

Limits come before work: the body is counted while it is read, an image's pixels are read from its header, all queues
are bounded. A client's fault is a 4xx that says what; 503 means try again.
"""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import check_outputs
from topk_export.serve import kserve
from topk_export.serve.answers import PROBLEMS, Answer, Answers, Problem, as_json
from topk_export.serve.guard import Guard
from topk_export.serve.interface import describe
from topk_export.serve.limits import Access, Limits
from topk_export.serve.service import Service
from topk_export.serve.upload import ONE, SEVERAL, one_image, several_images

SET = 100  # classes of a set in an answer, where a request does not say


def create_app(
    predictor: Predictor,
    limits: Limits | None = None,
    access: Access | None = None,
    log: str | None = None,
    *,
    warm: bool = False,
) -> FastAPI:
    """Build the application of a loaded model.

    Args:
        predictor: the model, which must give logits and marginals.
        limits: bounds of the clients.
        access: who the clients are.
        log: file that takes a line a prediction, see :mod:`.log`.
        warm: take no connection before the model has run. Otherwise ``/healthz`` answers while it warms up.
    """
    limits, access = limits or Limits(), access or Access()
    check_outputs(dict.fromkeys(predictor.output_names))
    predictor.metadata.preprocess.check_known()
    service = Service(predictor, limits, log)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start(warm=warm)
        yield
        await service.stop()

    app = FastAPI(title="topk-registry", description=_describe(predictor), lifespan=lifespan, docs_url=None)
    app.add_middleware(
        Guard, access, limits, lambda route, status: service.metrics.requests.labels(route, status).inc()
    )
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-API-Key"],
        )
    _add_predictions(app, service)
    _add_state(app, service)
    app.include_router(kserve.router(service))
    return app


def _add_predictions(app: FastAPI, service: Service) -> None:
    limits, k = service.limits, service.predictor.metadata.k
    wanted = Annotated[float | None, Query(gt=0, le=1)]
    most = Annotated[int, Query(ge=1, le=limits.max_set)]
    few = min(SET, limits.max_set)

    @app.post("/predict", responses={**PROBLEMS, 200: {"model": Answer}}, openapi_extra=ONE)
    async def predict(request: Request, softmax_mass: wanted = None, max_set: most = few) -> Response:  # type: ignore[valid-type]
        """Return the top-k classes of one image: the body, the form's file ``image``, or base64 in JSON.

        With a calibrated model also its prediction set; with ``softmax_mass`` the fewest classes whose shares reach it;
        at most ``max_set`` classes of each.
        """
        service.check_ready()
        start = time.perf_counter()
        async with service.room:
            content = await service.predict(await one_image(request, limits), softmax_mass, max_set)
            return as_json(await service.encode({"k": k, **content, **_took(service, start)}))

    @app.post("/predictions", responses={**PROBLEMS, 200: {"model": Answers}}, openapi_extra=SEVERAL)
    async def predictions(request: Request, softmax_mass: wanted = None, max_set: most = few) -> Response:  # type: ignore[valid-type]
        """Return the same for several images: the form's files ``image``, or base64 in JSON."""
        service.check_ready()
        start = time.perf_counter()
        async with service.room:
            found = await service.predict_all(await several_images(request, limits), softmax_mass, max_set)
            return as_json(await service.encode({"k": k, "predictions": found, **_took(service, start)}))


def _took(service: Service, start: float) -> dict[str, float]:
    seconds = time.perf_counter() - start
    service.metrics.seconds.observe(seconds)
    return {"milliseconds": 1e3 * seconds}


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": Problem}})
    async def readiness() -> dict[str, str]:
        """Say that the model has run, and that there is room for a request."""
        service.check_ready()
        return {"status": "ready"}

    @app.get("/metrics", include_in_schema=False)
    async def scrape() -> Response:
        return Response(service.scrape(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/model")
    async def model() -> JSONResponse:
        """Return the model's metadata, and where and how it runs."""
        predictor = service.predictor
        return JSONResponse({"device": predictor.device, "exif": predictor.exif, **asdict(predictor.metadata)})

    @app.get("/docs", include_in_schema=False)
    async def interface() -> HTMLResponse:
        return HTMLResponse(describe(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse((files("topk_export.serve") / "page.html").read_text(encoding="utf-8"))


def _describe(predictor: Predictor) -> str:
    meta = predictor.metadata
    return f"{meta.backbone or 'A classifier'} of {meta.num_classes} classes with exact top-{meta.k} probabilities."
