"""Limits of the HTTP service, and the parser of its requests.

A wrong request raises ValueError, which becomes an answer with the status 400, or an HTTPException with another status.
"""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import HTTPException, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from topk_export.runtime.predictor import Predictor

FORM, JSON = "multipart/form-data", "application/json"
FIELDS = ("alpha", "allow", "max_set")


@dataclass(frozen=True)
class Limits:
    """Limits of the HTTP service. The predictor limits the number of pixels per image."""

    body_bytes: int = 10_000_000
    images: int = 32  # maximum number of images, or of rows of arrays, per request
    queue: int = 128  # maximum number of images in progress
    batch: int = 16  # maximum number of images per run of the model
    max_set: int = 1000  # maximum number of classes that an answer lists per prediction set
    request_seconds: float = 60.0  # maximum time from the header of a request to the answer


@dataclass(frozen=True)
class Wanted:
    """The images, or the rows of arrays, and the options of one request for predictions."""

    items: list[Any]  # encoded images; for a model of arrays, dictionaries with one array per input
    mask: np.ndarray | None  # mask of the allowed classes; None: all classes
    alpha: float | None  # probability with which a prediction set may miss the true class; None: as in the calibration
    max_set: int  # maximum number of classes that the answer lists per prediction set


class _InMemoryParser(MultiPartParser):
    """Parser of HTML forms that keeps all parts in memory, because ``Limits.body_bytes`` already limits the memory."""

    spool_max_size = max_file_size = 2**40


async def read_request(request: Request, predictor: Predictor, limits: Limits) -> Wanted:
    """Read the images and options of a request.

    The query of the URL may contain the options ``alpha``, ``allow`` and ``max_set``. The body is one encoded image, a
    form with images, or a JSON object with images in base64 or with arrays. The header Content-Type tells which. A form
    or a JSON object may also contain options. An option in the body replaces the same option in the URL.
    """
    body = await _body(request, limits.body_bytes)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPException(415, f"Content-Encoding {encoding[:50]!r} is not supported: send the body without it")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    arrays = predictor.metadata.preprocess is None
    query = request.query_params
    given: dict[str, Any] = {name: query.getlist(name) for name in query}
    if kind == JSON:
        items, fields = await asyncio.to_thread(_json, body, predictor)  # 10 MB of arrays take half a second
    elif arrays:
        raise HTTPException(
            415, f"expected Content-Type {JSON}, because the model takes arrays; got {kind or 'none'!r}"
        )
    elif kind == FORM:
        items, fields = await _form(request, body, limits)
    elif kind.startswith("image/") or kind == "application/octet-stream":
        items, fields = [body], {}
    else:
        raise HTTPException(415, f"expected Content-Type image/*, {FORM} or {JSON}, got {kind or 'none'!r}")
    given |= fields
    if unknown := sorted(set(given) - set(FIELDS)):
        raise ValueError(f"unknown option {unknown[0][:50]!r}: /predict takes {', '.join(FIELDS)}")
    if not 1 <= len(items) <= limits.images:
        raise ValueError(f"expected 1 to {limits.images} {'rows' if arrays else 'images'}, got {len(items)}")
    max_set = _number(given.get("max_set"), "max_set")
    max_set = limits.max_set if max_set is None else max_set
    if not 1 <= max_set <= limits.max_set:
        raise ValueError(f"max_set must be from 1 to {limits.max_set}, got {max_set:g}")
    if max_set != int(max_set):
        raise ValueError(f"max_set must be an integer, got {max_set:g}")
    mask = predictor.mask_of(_names(given["allow"])) if "allow" in given else None
    return Wanted(items, mask, _number(given.get("alpha"), "alpha"), int(max_set))


async def _body(request: Request, limit: int) -> bytes:
    content = bytearray()
    length = 0
    async for chunk in request.stream():
        length += len(chunk)
        if length <= limit:  # the rest is received and discarded, because a client reads the answer after it has sent
            content += chunk
    if length > limit:
        raise HTTPException(413, f"the body is longer than the limit of {limit} bytes")
    return bytes(content)


def _json(body: bytes, predictor: Predictor) -> tuple[list[Any], dict[str, Any]]:
    arrays = predictor.metadata.preprocess is None
    key, content = ("inputs", "one array per input") if arrays else ("images", "a list of images in base64")
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict) or set(fields) - {key, *FIELDS}:
            raise ValueError("the body is not an object with these keys")
        given = fields.pop(key)
        if arrays:
            inputs = predictor.check_inputs(given)
            rows = range(len(next(iter(inputs.values()))))
            return [{name: values[i] for name, values in inputs.items()} for i in rows], fields
        if not isinstance(given, list):
            raise ValueError("'images' is not a list")
        return [base64.b64decode(text, validate=True) for text in given], fields
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        expected = f"expected {JSON} with {key!r}, {content}, and optionally {', '.join(FIELDS)}"
        raise ValueError(f"{expected}: {error}") from error


async def _form(request: Request, body: bytes, limits: Limits) -> tuple[list[Any], dict[str, Any]]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        parser = _InMemoryParser(
            request.headers, stream(), max_files=limits.images, max_fields=8, max_part_size=limits.body_bytes
        )
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise ValueError(f"the form cannot be parsed: {getattr(error, 'message', error)}") from error
    images, wrong = [], []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile) != (name == "image"):
            wrong.append(name)
        elif isinstance(value, UploadFile):
            images.append(await value.read())
    await form.close()
    if wrong:
        texts = ", ".join(FIELDS)
        raise ValueError(f"field {wrong[0][:50]!r}: a form has files in fields named 'image', and texts in {texts}")
    return images, {name: form.getlist(name) for name in form if name != "image"}


def _names(allow: Any) -> list[str]:
    """Return the class names in a list of texts, with one name per line."""
    if not isinstance(allow, list) or not all(isinstance(text, str) for text in allow):
        raise ValueError("allow must be a list of class names")
    return [line.strip() for text in allow for line in text.splitlines() if line.strip()]


def _number(value: Any, name: str) -> float | None:
    value = value[-1] if isinstance(value, list) and value else value
    if value is None or value == "":
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a number, got {str(value)[:50]!r}") from error
