"""The image in a request: the body itself or a form's file, read no further than it may be long."""

import asyncio
from typing import Any

from fastapi import HTTPException, Request
from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect


async def image_bytes(request: Request, max_bytes: int, max_seconds: float) -> bytes:
    """The image of a request, whose body is cut off as soon as it is too long or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data" and not kind.startswith("image/") and kind != "application/octet-stream":
        raise HTTPException(415, f"send an image (image/*) or a form with the field 'image', not {kind or 'nothing'!r}")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_long(max_bytes)
    try:
        body = await asyncio.wait_for(_read(request, max_bytes), max_seconds)
        image = await _form_image(request, body) if kind == "multipart/form-data" else body
    except ClientDisconnect as error:
        raise HTTPException(400, "the client went away") from error
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise HTTPException(408, f"the body did not come within {max_seconds:g} s") from error
    if not image:
        raise HTTPException(400, "the body is empty: expected an image")
    return image


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
    return bytes(body)


def _too_long(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is longer than {max_bytes} bytes")


async def _form_image(request: Request, body: bytes) -> bytes:
    async def replay() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    try:  # many a malformed form is Starlette's HTTPException, with status 400
        async with Request(request.scope, replay).form(max_files=1, max_fields=8) as form:
            field = form.get("image")
            if not isinstance(field, UploadFile):
                raise HTTPException(400, "the form has no file in the field 'image'")
            return await field.read()
    except FormParserError as error:  # but older versions let the parser's own errors pass
        raise HTTPException(400, f"Invalid multipart form: {error}") from error
