"""Everything that is decided about a request before its route sees it: host, origin, key, share, time; and the log."""

import asyncio
import hmac
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topk_export.serve.limits import Access, Limits

HEALTH = frozenset(("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"))
OPEN = HEALTH | {"/"}  # the page holds no secret, and asks for the key
SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src blob: data:; "
    "connect-src 'self'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
)
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", POLICY.encode()),
)
AGAIN = {"Retry-After": "1"}


class Guard:
    """ASGI middleware: refuse a request that may not be answered, and tell metrics and log of all others too.

    Args:
        app: the application inside.
        access: who may use it.
        limits: requests in progress and seconds of one client.
        on_done: called with a route's path and the status of an answer.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, on_done: Callable[[str, int], None]) -> None:
        self._app, self._access, self._limits, self._on_done = app, access, limits, on_done
        self._keys = [key.encode() for key in access.keys]
        self._in_progress: Counter[str] = Counter()
        self._log = None if access.log is None else access_logger(access.log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, sent = time.perf_counter(), {"status": 500, "bytes": 0, "started": False, "counted": False}

        def count() -> None:
            if not sent["counted"]:
                sent["counted"] = True
                self._on_done(getattr(scope.get("route"), "path", "other"), sent["status"])

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent["status"], sent["started"] = message["status"], True
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            else:
                sent["bytes"] += len(message.get("body", b""))
                if not message.get("more_body", False):
                    count()  # before it is sent: who has an answer finds it in the metrics, of every worker
            await send(message)

        try:
            await self._answer(scope, receive, watched, sent)
        finally:
            count()
            if self._log is not None:
                self._log.info(_line(scope, sent, time.perf_counter() - start))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, sent: dict[str, Any]) -> None:
        client = scope["client"][0] if scope.get("client") else ""
        if scope["path"] in HEALTH:
            await self._app(scope, receive, send)
            return
        if (refusal := self._refusal(scope, client)) is not None:
            await refusal(scope, receive, send)
            return
        self._in_progress[client] += 1
        try:
            await asyncio.wait_for(self._app(scope, receive, send), self._limits.request_seconds)
        except (TimeoutError, asyncio.TimeoutError):
            if sent["started"]:
                raise
            late = f"no answer within {self._limits.request_seconds:g} s"
            await JSONResponse({"detail": late}, 503, AGAIN)(scope, receive, send)
        finally:
            self._in_progress[client] -= 1
            if not self._in_progress[client]:
                del self._in_progress[client]

    def _refusal(self, scope: Scope, client: str) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._access.hosts and urlsplit(f"//{host}").hostname not in self._access.hosts:
            return JSONResponse({"detail": f"this service is not called {host!r}"}, 400)
        if scope["method"] not in SAFE and not self._same_site(headers, host):
            return JSONResponse({"detail": "a page of another site may not send this: see --cors-origin"}, 403)
        if self._keys and scope["path"] not in OPEN and not self._has_key(headers):
            needed = "an API key is needed, as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
            return JSONResponse({"detail": needed}, 401, {"WWW-Authenticate": "Bearer"})
        if self._in_progress[client] >= self._limits.client_requests:
            many = f"{self._limits.client_requests} requests from this address are in progress already"
            return JSONResponse({"detail": many}, 429, AGAIN)
        return None

    def _same_site(self, headers: Headers, host: str) -> bool:
        """Browsers name the page's origin; other clients send no such header, and cannot be tricked into it."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        return {origin, "*"} & set(self._access.origins) != set() or urlsplit(origin).netloc == host != ""

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = (token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode()
        # every key is compared, each in constant time
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


def access_logger(target: str) -> logging.Logger:
    """Return a logger that writes bare lines to a file, or to standard output for ``-``."""
    logger = logging.getLogger(f"topk_export.access.{target}")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout) if target == "-" else logging.FileHandler(target, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger


def _line(scope: Scope, sent: dict[str, Any], seconds: float) -> str:
    entry = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        "path": scope["path"],
        "query": scope.get("query_string", b"").decode("latin-1"),
        "status": sent["status"],
        "bytes": sent["bytes"],
        "milliseconds": round(1e3 * seconds, 2),
    }
    return json.dumps(entry)


def read_keys(path: str) -> tuple[str, ...]:
    """Read API keys, one a line; empty lines and lines that begin with ``#`` are left out."""
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys or not all(key.isascii() for key in keys):
        raise ValueError(f"{path} must hold API keys, one a line, of ASCII characters")
    return keys
