"""The images of a request: the body itself, files of a form or base64 in JSON, read no further than allowed."""

import asyncio
import base64
import binascii
import json
import zlib
from typing import Any

from fastapi import HTTPException, Request
from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from topk_export.serve.limits import Limits

CODINGS = ("identity", "gzip", "x-gzip", "deflate")
FORM, JSON = "multipart/form-data", "application/json"


def _description(field: str, form: dict[str, Any], encoded: dict[str, Any], alone: bool) -> dict[str, Any]:
    """OpenAPI's description of a body, which FastAPI cannot see: the routes read it themselves."""
    kinds = {
        FORM: {"schema": {"type": "object", "required": ["image"], "properties": {"image": form}}},
        JSON: {"schema": {"type": "object", "required": [field], "properties": {field: encoded}}},
    }
    if alone:
        kinds["image/*"] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": kinds}}


_FILE, _BASE64 = {"type": "string", "format": "binary"}, {"type": "string", "format": "byte"}
ONE = _description("image", _FILE, _BASE64, alone=True)
SEVERAL = _description("images", {"type": "array", "items": _FILE}, {"type": "array", "items": _BASE64}, alone=False)


async def one_image(request: Request, limits: Limits) -> bytes:
    """Read the image of a request: its body, the form's file ``image``, or base64 under the JSON key ``image``."""
    kind = content_kind(request)
    if kind in (FORM, JSON):
        (image,) = await _images(request, kind, limits, 1)
    elif kind.startswith("image/") or kind == "application/octet-stream":
        image = await read_body(request, limits)
    else:
        raise HTTPException(
            415, f"send an image (image/*), a form or JSON with the field 'image', not {kind or 'nothing'!r}"
        )
    if not image:
        raise HTTPException(400, "the body is empty: expected an image")
    return image


async def several_images(request: Request, limits: Limits) -> list[bytes]:
    """Read the images of a request: the form's files ``image``, or base64 in a list under the JSON key ``images``."""
    kind = content_kind(request)
    if kind not in (FORM, JSON):
        raise HTTPException(
            415, f"send a form with files 'image', or JSON with a list 'images', not {kind or 'nothing'!r}"
        )
    return await _images(request, kind, limits, limits.images)


def content_kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read a body, compressed or not; raise as soon as it is too long or too slow."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in CODINGS:
        accepted = ", ".join(CODINGS)
        raise HTTPException(
            415, f"Content-Encoding must be one of {accepted}, got {coding!r}", {"Accept-Encoding": accepted}
        )
    body = await _received(request, limits)
    return body if coding == "identity" else await asyncio.to_thread(_inflated, body, limits)


def _inflated(body: bytes, limits: Limits) -> bytes:
    """Return the content of gzip or zlib data, which may be no longer than a body."""
    parts, left = [], limits.body_bytes
    while body:  # gzip allows several streams, one after the other
        stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
        try:
            parts.append(stream.decompress(body, left + 1))
        except zlib.error as error:
            raise HTTPException(400, f"the body is not what Content-Encoding says: {error}") from error
        left -= len(parts[-1])
        if left < 0:
            raise _too_long(limits)
        if not stream.eof:
            raise HTTPException(400, "the compressed body is cut off")
        body = stream.unused_data
    return b"".join(parts)


async def _received(request: Request, limits: Limits) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise _too_long(limits)
    try:
        return await asyncio.wait_for(_read(request, limits), limits.body_seconds)
    except ClientDisconnect as error:
        raise HTTPException(400, "the client went away") from error
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise HTTPException(408, f"the body did not come within {limits.body_seconds:g} s") from error


async def _read(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.body_bytes:
            raise _too_long(limits)
    return bytes(body)


def _too_long(limits: Limits) -> HTTPException:
    return HTTPException(413, f"the body is longer than {limits.body_bytes} bytes")


async def _images(request: Request, kind: str, limits: Limits, most: int) -> list[bytes]:
    body = await read_body(request, limits)
    images = await (_form_images(request, body, most) if kind == FORM else asyncio.to_thread(_json_images, body, most))
    if not 1 <= len(images) <= most:
        raise HTTPException(400, f"expected 1 to {most} images, got {len(images)}")
    return images


async def _form_images(request: Request, body: bytes, most: int) -> list[bytes]:
    async def replay() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    try:  # many a malformed form is Starlette's HTTPException, with status 400
        async with Request(request.scope, replay).form(max_files=most, max_fields=8) as form:
            fields = form.getlist("image")
            files = [field for field in fields if isinstance(field, UploadFile)]
            if not files or len(files) < len(fields):
                raise HTTPException(400, "the form has no file in the field 'image'")
            return [await file.read() for file in files]
    except FormParserError as error:  # but older versions let the parser's own errors pass
        raise HTTPException(400, f"Invalid multipart form: {error}") from error


def _json_images(body: bytes, most: int) -> list[bytes]:
    field = "image" if most == 1 else "images"
    try:
        content = json.loads(body)[field]
        texts = [content] if most == 1 else content
        if not isinstance(texts, list) or len(texts) > most:
            raise ValueError(f"a list of at most {most}")
        return [base64.b64decode(text, validate=True) for text in texts]
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        what = "an image" if most == 1 else f"a list of at most {most} images"
        raise HTTPException(400, f"expected JSON with {what} in base64 under the key {field!r}: {error}") from error
