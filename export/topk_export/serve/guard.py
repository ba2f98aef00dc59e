"""Everything that is decided about a request before its route sees it: host, origin, key, share, time; and the log."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topk_export.serve.answers import problem
from topk_export.serve.limits import Access, Limits
from topk_export.serve.log import Lines

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
ID = re.compile(r"[!-~]{1,128}")  # of a request, from its client: visible ASCII
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(:\d{0,5})?", re.ASCII)
TOLD = {"id": b"x-request-id", "sha256": b"x-model-sha256", "version": b"x-model-version"}
logger = logging.getLogger("uvicorn.error")


def facts_of(scope: Scope) -> dict[str, Any]:
    """Return what is told of a request in its answer's headers and in the logs: its id, and the model that answered."""
    return scope.setdefault("state", {}).setdefault("facts", {})


class Guard:
    """ASGI middleware: refuse a request that may not be answered, and tell metrics and log of all others too.

    Every request has an id, its own (``X-Request-ID``) or a new one, which stands in its answer and in the logs.

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
        self._log = None if access.log is None else Lines(access.log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts = facts_of(scope)
        given = Headers(scope=scope).get("x-request-id", "")
        facts["id"] = given if ID.fullmatch(given) else uuid.uuid4().hex
        start, sent = time.perf_counter(), {"status": 500, "bytes": 0, "started": False, "counted": False}

        def count() -> None:
            if not sent["counted"]:
                sent["counted"] = True
                self._on_done(getattr(scope.get("route"), "path", "other"), sent["status"])

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent["status"], sent["started"] = message["status"], True
                told = [(TOLD[name], str(value).encode()) for name, value in facts.items()]
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS, *told]}
            else:
                sent["bytes"] += len(message.get("body", b""))
                if not message.get("more_body", False):
                    count()  # before it is sent: who has an answer finds it in the metrics, of every worker
            await send(message)

        try:
            await self._answer(scope, receive, watched, sent)
        except Exception:
            if sent["started"]:
                raise
            logger.exception("request %s failed", facts["id"])
            await problem(scope["path"], "the service failed: its log says why", 500)(scope, receive, watched)
        finally:
            count()
            if self._log is not None:
                self._log(_entry(scope, sent, time.perf_counter() - start))

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
            await problem(scope["path"], late, 503, AGAIN)(scope, receive, send)
        finally:
            self._in_progress[client] -= 1
            if not self._in_progress[client]:
                del self._in_progress[client]

    def _refusal(self, scope: Scope, client: str) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        host = headers.get("host", "")
        # whatever builds an address from another form of it would fail
        if HOST.fullmatch(host) is None:
            return problem(path, f"the Host header must be NAME, NAME:PORT or [IPV6]:PORT, got {host!r}", 400)
        if self._access.hosts and _name_in(host) not in self._access.hosts:
            return problem(path, f"this service is not called {host!r}", 400)
        if scope["method"] not in SAFE and not self._same_site(headers, host):
            return problem(path, "a page of another site may not send this: see --cors-origin", 403)
        if self._keys and path not in OPEN and not self._has_key(headers):
            needed = "an API key is needed, as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
            return problem(path, needed, 401, {"WWW-Authenticate": "Bearer"})
        if self._in_progress[client] >= self._limits.client_requests:
            many = f"{self._limits.client_requests} requests from this address are in progress already"
            return problem(path, many, 429, AGAIN)
        return None

    def _same_site(self, headers: Headers, host: str) -> bool:
        """Browsers name the page's origin; other clients send no such header, and cannot be tricked into it."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        return {origin, "*"} & set(self._access.origins) != set() or _place_of(origin) == host != ""

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = (token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode()
        # every key is compared, each in constant time
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


def _name_in(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # brackets around no address
        return None


def _place_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _entry(scope: Scope, sent: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        "path": scope["path"],
        "query": scope.get("query_string", b"").decode("latin-1"),
        "status": sent["status"],
        "bytes": sent["bytes"],
        "milliseconds": round(1e3 * seconds, 2),
        **facts_of(scope),
    }


def read_keys(path: str) -> tuple[str, ...]:
    """Read API keys, one a line; empty lines and lines that begin with ``#`` are left out."""
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys or not all(key.isascii() for key in keys):
        raise ValueError(f"{path} must hold API keys, one a line, of ASCII characters")
    return keys
