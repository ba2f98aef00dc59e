"""Limits of the HTTP service, and functions that read requests within these limits.

:func:`read_request` runs in a thread, so that a long body does not block the event loop. Python's JSON parser does not
let other threads run. Therefore the function first counts the values of a JSON body, which is fast, and rejects a body
with more values than a request can need.
"""

import asyncio
import base64
import binascii
import json
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from fastapi import HTTPException, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from topk_export.errors import ImageTooLargeError
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.preprocess import size_of_image

FORM, JSON = "multipart/form-data", "application/json"
FIELDS = ("alpha", "allow", "max_set")
RETRY = {"Retry-After": "1"}
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits of the HTTP service. Times are in seconds."""

    body_bytes: int = 10_000_000
    total_bytes: int = 256_000_000  # maximum length of all bodies in memory together
    body_seconds: float = 30.0  # maximum time to receive a body
    header_seconds: float = 15.0  # maximum time to receive a header, and maximum idle time of a connection
    request_seconds: float = 60.0  # maximum time to answer a request
    images: int = 32  # maximum number of images, or of rows of arrays, per request
    values: int = 1_000_000  # maximum number of values of a JSON body with arrays
    pixels: int = 25_000_000  # maximum number of pixels per image
    request_pixels: int = 100_000_000  # maximum number of pixels of all images of a request together
    total_pixels: int = 400_000_000  # maximum number of pixels of all images in progress together
    queue: int = 128  # maximum number of images in progress
    batch: int = 16  # maximum number of images per run of the model
    max_set: int = 1000  # maximum number of classes that an answer lists per prediction set
    decoders: int = min(4, os.cpu_count() or 1)  # number of threads that decode images


@dataclass(frozen=True)
class Wanted:
    """The images, or the rows of arrays, and the options of one request for predictions."""

    images: list[bytes]  # encoded images
    rows: list[dict[str, np.ndarray]]  # one array per input of the model, without the batch axis
    pixels: int  # number of pixels of all images together
    mask: np.ndarray | None  # mask of the allowed classes; None: all classes
    alpha: float | None  # probability with which a prediction set may miss the true class; None: as in the calibration
    max_set: int  # maximum number of classes that the answer lists per prediction set


async def within_seconds(work: Awaitable[T], seconds: float, late: HTTPException) -> T:
    """Await ``work``, and return its result. If the work takes longer than ``seconds``, raise ``late``."""
    try:
        return await asyncio.wait_for(work, seconds)
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise late from error


class Budget:
    """Counter of the bytes of all request bodies that are in memory. The counter enforces ``Limits.total_bytes``."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._used = limits, 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body of a request, and yield the body. The counter includes the body until the ``with`` block ends.

        Raises:
            HTTPException: the body is too long or arrives too slowly, or all bodies together are too long.
        """
        content, seconds = bytearray(), self._limits.body_seconds
        late = HTTPException(408, f"the body did not arrive within {seconds:g} s")
        try:
            await within_seconds(self._read(request, content), seconds, late)
            yield bytes(content)
        except ClientDisconnect as error:
            raise HTTPException(400, "the client disconnected") from error
        finally:
            self._used -= len(content)

    async def _read(self, request: Request, content: bytearray) -> None:
        limit = self._limits.body_bytes
        too_long = HTTPException(413, f"the body is longer than the limit of {limit} bytes")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
            raise too_long
        async for chunk in request.stream():
            content += chunk
            self._used += len(chunk)
            if len(content) > limit:
                raise too_long
            if self._used > self._limits.total_bytes:
                raise HTTPException(503, "too many request bodies are in memory: try again", RETRY)


class _InMemoryParser(MultiPartParser):
    """Parser of HTML forms that keeps all parts in memory, because ``Limits.body_bytes`` already limits the memory."""

    spool_max_size = max_file_size = 2**40


class Reader:
    """Reader of the images and options of requests, for one model and its limits."""

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        names = predictor.metadata.class_names
        self._predictor, self._limits = predictor, limits
        self._names = len(names)
        self._letters = 2 * sum(map(len, names)) + 1000  # maximum length of a list of class names
        # maximum number of values of a JSON body; the names of classes may contain commas and brackets
        marks = sum(name.count(mark) for name in names for mark in ",[{")
        self._arrays = predictor.metadata.preprocess is None
        self._values = limits.values if self._arrays else limits.images + len(names) + marks + 10

    def __call__(self, request: Request, body: bytes) -> Wanted:
        """Parse the images and options of a request.

        The query of the URL may contain the options ``alpha``, ``allow`` and ``max_set``. ``body`` is one encoded
        image, a form with images, or a JSON object with images in base64. The header Content-Type tells which of the
        three. A form or a JSON object may also contain options. An option in the body replaces the same option in the
        URL.

        Raises:
            HTTPException: the request is malformed, or the request has too many images or class names.
            ValueError: the header of an image cannot be read, or a class is unknown.
            ImageTooLargeError: an image, or all images together, have too many pixels.
        """
        limits = self._limits
        check_query(request, FIELDS)
        if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise HTTPException(415, f"Content-Encoding {coding!r} is not supported: send the body without it")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        given: dict[str, Any] = {
            name: request.query_params.getlist(name) for name in FIELDS if name in request.query_params
        }
        rows: list[dict[str, np.ndarray]] = []
        if self._arrays:
            rows, fields = self._rows(kind, body)
            given |= fields
            images = []
        elif kind == FORM:
            images, fields = asyncio.run(_form(request, body, limits))
            given |= fields
        elif kind == JSON:
            if sum(body.count(mark) for mark in (b",", b"[", b"{")) > self._values:
                raise HTTPException(400, f"the body has more than {limits.images} images and {self._names} class names")
            images, fields = _json(body, limits)
            given |= fields
        elif kind.startswith("image/") or kind == "application/octet-stream":
            images = [body]
        else:
            raise HTTPException(415, f"expected Content-Type image/*, {FORM} or {JSON}, got {kind or 'none'!r}")
        if not 1 <= len(images) + len(rows) <= limits.images:
            what = "rows" if self._arrays else "images"
            raise HTTPException(400, f"expected 1 to {limits.images} {what}, got {len(images) + len(rows)}")
        if not all(images):
            raise HTTPException(400, f"image {images.index(b'') + 1} of {len(images)} is empty: it has 0 bytes")
        alpha = _number(given.get("alpha"), "alpha")
        max_set = _number(given.get("max_set", limits.max_set), "max_set")
        if max_set is None or not 1 <= max_set <= limits.max_set or max_set != int(max_set):
            raise HTTPException(400, f"max_set must be an integer from 1 to {limits.max_set}")
        mask = self._mask(given["allow"]) if "allow" in given else None
        return Wanted(images, rows, pixels_of(images, limits), mask, alpha, int(max_set))

    def _rows(self, kind: str, body: bytes) -> tuple[list[dict[str, np.ndarray]], dict[str, Any]]:
        """Parse a JSON body with arrays, for a model that takes arrays."""
        takes = ", ".join(f"{name}: {value} {shape}" for name, (value, shape) in self._predictor.inputs.items())
        expected = f"expected {JSON} with 'inputs', one array per input ({takes}), and optionally {', '.join(FIELDS)}"
        if kind != JSON:
            raise HTTPException(415, expected)
        if sum(body.count(mark) for mark in (b",", b"[", b"{")) > self._values:
            raise HTTPException(413, f"the body has more than {self._values} values")
        try:
            content = json.loads(body)
            if not isinstance(content, dict) or set(content) - {"inputs", *FIELDS}:
                raise ValueError("the body is not an object with these keys")
            arrays = self._predictor.check_inputs(content.pop("inputs"))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise HTTPException(400, f"{expected}: {error}") from error
        count = len(next(iter(arrays.values())))
        return [{name: values[i] for name, values in arrays.items()} for i in range(count)], content

    def _mask(self, allow: Any) -> np.ndarray:
        if not isinstance(allow, list) or not all(isinstance(text, str) for text in allow):
            raise HTTPException(400, "allow must be a list of class names")
        too_many = HTTPException(400, f"allow has more names than the {self._names} classes of the model")
        if sum(map(len, allow)) > self._letters:
            raise too_many
        names = [line.strip() for text in allow for line in text.splitlines() if line.strip()]
        if len(names) > self._names:
            raise too_many
        return self._predictor.mask_of(names)


def check_query(request: Request, known: Sequence[str] = ()) -> None:
    """If the URL of a request has a query parameter outside of ``known``, raise an HTTPException with status 400."""
    if unknown := sorted(set(request.query_params) - set(known)):
        raise HTTPException(
            400, f"unknown query parameter {unknown[0]!r}: {request.url.path} takes {', '.join(known) or 'none'}"
        )


def pixels_of(images: Sequence[bytes], limits: Limits) -> int:
    """Return the number of pixels of all images together. The function reads only the headers of the images.

    Raises:
        ImageTooLargeError: an image, or all images together, have too many pixels.
    """
    total = sum(math.prod(size_of_image(image, max_pixels=limits.pixels)) for image in images)
    if total > limits.request_pixels:
        raise ImageTooLargeError(f"the images have {total} pixels together, the limit is {limits.request_pixels}")
    return total


async def _form(request: Request, body: bytes, limits: Limits) -> tuple[list[bytes], dict[str, Any]]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        parser = _InMemoryParser(
            request.headers, stream(), max_files=limits.images, max_fields=8, max_part_size=limits.body_bytes
        )
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise HTTPException(400, f"the form cannot be parsed: {getattr(error, 'message', error)}") from error
    images: list[bytes] = []
    fields: dict[str, Any] = {}
    try:
        for name, value in form.multi_items():
            if name == "image" and isinstance(value, UploadFile):
                images.append(await value.read())
            elif name in FIELDS and isinstance(value, str):
                fields.setdefault(name, []).append(value)
            else:
                expected = f"the form takes files 'image' and the fields {', '.join(FIELDS)}"
                raise HTTPException(400, f"{expected}, got {name[:50]!r}")
    finally:
        await form.close()
    return images, fields


def _json(body: bytes, limits: Limits) -> tuple[list[bytes], dict[str, Any]]:
    expected = f"expected a JSON object with 'images' (base64, 1 to {limits.images}) and optionally {', '.join(FIELDS)}"
    try:
        content = json.loads(body)
        if not isinstance(content, dict) or set(content) - {"images", *FIELDS}:
            raise ValueError("the body is not an object with these keys")
        texts = content.pop("images")
        if not isinstance(texts, list):
            raise ValueError("'images' is not a list")
        return [base64.b64decode(text, validate=True) for text in texts], content
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise HTTPException(400, f"{expected}: {error}") from error


def _number(value: Any, name: str) -> float | None:
    value = value[-1] if isinstance(value, list) and value else value
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise HTTPException(400, f"{name} must be a number, got {str(value)[:50]!r}")
    return number
