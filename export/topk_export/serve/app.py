"""The HTTP application of an exported model: predictions, health, metrics, KServe's protocol, and a page to try it on.

Limits come before work: the body is counted while it is read, an image's pixels are read from its header, all queues
are bounded. A client's fault is a 4xx that says what; 503 means try again.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import check_outputs, check_wanted
from topk_export.runtime.session import import_onnxruntime
from topk_export.serve import kserve
from topk_export.serve.answers import PROBLEMS, Answer, Answers, LabelsAnswer, Problem, as_json, problem
from topk_export.serve.guard import TOLD, Guard, facts_of
from topk_export.serve.interface import describe
from topk_export.serve.limits import Access, Limits
from topk_export.serve.model import ServedModel
from topk_export.serve.releases import Release, release_of
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
    release: Release | None = None,
) -> FastAPI:
    """Build the application of a loaded model.

    Args:
        predictor: the model, which must give logits and marginals.
        limits: bounds of the clients.
        access: who the clients are.
        log: file that takes a line a prediction, see :mod:`.log`.
        warm: take no connection before the model has run. Otherwise ``/healthz`` answers while it warms up.
        release: what the model was read from; default: its file, as it is now.

    The application's ``state.service`` is the :class:`Service` behind it.
    """
    limits, access = limits or Limits(), access or Access()
    check_outputs(predictor.output_names, predictor.metadata)
    predictor.metadata.preprocess.check_known()
    service = Service(predictor, release or release_of(predictor), limits, log)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start(warm=warm)
        yield
        await service.stop()

    app = FastAPI(title="topk-registry", description=_describe(predictor), lifespan=lifespan, docs_url=None)
    app.state.service = service

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return problem(request.scope["path"], error.detail, error.status_code, error.headers)

    app.add_middleware(
        Guard, access, limits, lambda route, status: service.metrics.requests.labels(route, status).inc()
    )
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Encoding", "Content-Type", "X-API-Key", "X-Request-ID"],
            expose_headers=[name.decode() for name in TOLD.values()],
        )
    _add_predictions(app, service)
    _add_state(app, service)
    app.include_router(kserve.router(service))
    return app


def _add_predictions(app: FastAPI, service: Service) -> None:
    limits = service.limits
    wanted = Annotated[float | None, Query(gt=0, le=1)]
    most = Annotated[int, Query(ge=1, le=limits.max_set)]
    few = min(SET, limits.max_set)
    one = Annotated[str | None, Query(description="name of the image's group, of sets.groups in /model")]
    each = Annotated[
        list[str] | None,
        Query(description="name of the group of all images, or of each in order; of sets.groups in /model"),
    ]

    @app.post("/predict", responses={**PROBLEMS, 200: {"model": Answer | LabelsAnswer}}, openapi_extra=ONE)
    async def predict(
        request: Request,
        softmax_mass: wanted = None,  # type: ignore[valid-type]
        max_set: most = few,  # type: ignore[valid-type]
        group: one = None,  # type: ignore[valid-type]
    ) -> Response:
        """Return the top-k classes of one image: the body, the form's file ``image``, or base64 in JSON.

        With a calibrated model also its prediction set; with ``softmax_mass`` the fewest classes whose shares reach it;
        at most ``max_set`` classes of each. A model with thresholds by group takes the ``group`` of the image; without
        one the largest threshold serves. A model of several labels gives the chosen labels too, and takes no
        ``softmax_mass``.
        """
        start = time.perf_counter()
        async with service.turn(request) as model:
            _check_wanted(model, softmax_mass, max_set)
            _for_each(request.query_params.getlist("group"), 1)
            service.group(model, group)
            image, facts = await one_image(request, limits), facts_of(request.scope)
            content = await service.predict(model, image, softmax_mass, max_set, facts, group)
            return await _answered(service, model, content, start)

    @app.post("/predictions", responses={**PROBLEMS, 200: {"model": Answers}}, openapi_extra=SEVERAL)
    async def predictions(
        request: Request,
        softmax_mass: wanted = None,  # type: ignore[valid-type]
        max_set: most = few,  # type: ignore[valid-type]
        group: each = None,  # type: ignore[valid-type]
    ) -> Response:
        """Return the same for several images: the form's files ``image``, or base64 in JSON.

        Of a model with thresholds by group: ``group`` once for all images, or once for each, in their order.
        """
        start = time.perf_counter()
        async with service.turn(request) as model:
            _check_wanted(model, softmax_mass, max_set)
            for name in group or [None]:
                service.group(model, name)
            images, facts = await several_images(request, limits), facts_of(request.scope)
            groups = _for_each(group or [], len(images))
            answers = await service.predict_all(model, images, softmax_mass, max_set, facts, groups)
            return await _answered(service, model, {"predictions": answers}, start)


def _check_wanted(model: ServedModel, softmax_mass: float | None, max_set: int) -> None:
    try:
        check_wanted(softmax_mass, max_set, model.predictor.metadata)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


def _for_each(groups: list[str], count: int) -> Sequence[str | None]:
    """Return the group of each image; raise a 400 where they are neither none, nor one for all, nor one for each."""
    if len(groups) not in (0, 1, count):
        wanted = "one group" if count == 1 else f"one group for all {count} images, or one for each"
        raise HTTPException(400, f"expected {wanted}, got {len(groups)}")
    return groups if len(groups) == count else (groups or [None]) * count


async def _answered(service: Service, model: ServedModel, content: dict[str, Any], start: float) -> Response:
    seconds = time.perf_counter() - start
    service.metrics.seconds.observe(seconds)
    full = {"k": model.predictor.metadata.k, **content, "milliseconds": 1e3 * seconds}
    return as_json(await service.encode(full))


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
    async def model(request: Request) -> JSONResponse:
        """Return the model's metadata, its content's SHA-256 and version, and where and how it runs."""
        predictor, release = service.model.predictor, service.model.release
        facts_of(request.scope).update(release.facts)
        state = {"device": predictor.device, "exif": predictor.exif, "software": _software(), **release.facts}
        return JSONResponse({**state, **asdict(predictor.metadata)})

    @app.get("/docs", include_in_schema=False)
    async def interface() -> HTMLResponse:
        return HTMLResponse(describe(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse((files("topk_export.serve") / "page.html").read_text(encoding="utf-8"))


def _software() -> dict[str, str]:
    """Return the versions of the packages that answer; the file's own ``versions`` are those that made it."""
    versions = {"onnxruntime": import_onnxruntime().__version__}
    for name in ("topk-registry", "topk-predict"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _describe(predictor: Predictor) -> str:
    meta = predictor.metadata
    of = f"{meta.backbone or 'A classifier'} of {meta.num_classes} classes"
    return f"{of}, several an image." if meta.several else f"{of} with exact top-{meta.k} probabilities."
