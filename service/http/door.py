"""The door: an ASGI middleware that every request passes, to BentoML's own addresses too.

It gives a request its id, finds out who asks, counts the body while it is read, adds the security headers, and sees to
it that whatever goes wrong behind it leaves as the one envelope.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.errors import Refused, code_of, envelope
from service.http.security import Guard

log = logging.getLogger("pfungst.http")

OPEN = frozenset({"/livez", "/readyz", "/healthz"})
"""What orchestrators ask, who hold no token; the answers say nothing but yes or no."""
HIDDEN = frozenset({"/", "/docs.json", "/schema.json"})
"""Addresses of BentoML's own that describe an interface this service does not have."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}

Watch = Callable[[str, str, int, float], None]
"""Told (method, address, status, seconds) of each answered request."""


class Door:
    """See the module's text. `limit_of` gives the most bytes a body may have at an address."""

    def __init__(
        self, app: ASGIApp, guard: Guard, limit_of: Callable[[Scope], int], watch: Watch | None = None
    ) -> None:
        self.app = app
        self.guard = guard
        self.limit_of = limit_of
        self.watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self.app(scope, receive, send)
            return
        answer = _Answer(send, request_id(scope))
        scope["pfungst_request_id"] = answer.request_id
        start = time.perf_counter()
        try:
            await self._serve(scope, receive, answer)
        finally:
            seconds = time.perf_counter() - start
            route = getattr(scope.get("route"), "path", "other")
            log.info("%s %s %s %d %.0f ms", answer.request_id, scope["method"], route, answer.status, 1000 * seconds)
            if self.watch is not None:
                self.watch(scope["method"], route, answer.status, seconds)

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            if scope["path"] in HIDDEN:
                raise Refused(404, "There is nothing at this address; /v1/openapi.json says what there is.")
            if scope["path"] not in OPEN:
                scope["pfungst_caller"] = self.guard.caller(scope)
            limited = _counted(scope, receive, self.limit_of(scope))
            await self.app(scope, limited, answer)
        except Refused as error:
            if not answer.started:
                refusal = envelope(error.status_code, str(error.detail), error.code, error.field)
                refusal.headers.update(error.headers or {})
                await refusal(scope, receive, answer)
        except Exception:
            if answer.finished:
                return  # the application answered and logged it, and raised it again for servers that do neither
            # An answer that has begun cannot be taken back: the connection breaks off, and the log says why.
            log.exception("request %s failed", answer.request_id)
            if answer.started:
                raise
            await envelope(500, "Something went wrong inside; the server's log has it under this request's id.")(
                scope, receive, answer
            )


class _Answer:
    """The way out: adds headers, and turns an error that is not in the envelope into one that is."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.send = send
        self.request_id = request_id
        self.status = 500
        self.started = self.finished = False
        self.replaced = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers["X-Request-Id"] = self.request_id
            self.replaced = self.status >= 400 and headers.get("content-type") != "application/json"
            if self.replaced:
                await self._replace(message, headers)
                return
        elif self.replaced:
            return
        await self.send(message)
        self.finished = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def _replace(self, message: Message, headers: MutableHeaders) -> None:
        """BentoML and Starlette answer some errors in plain text."""
        sentence = {404: "There is nothing at this address.", 503: "The service is not ready."}.get(
            self.status, "The request cannot be served."
        )
        body = json.dumps({"error": {"code": code_of(self.status), "message": sentence}}).encode()
        headers["content-type"] = "application/json"
        headers["content-length"] = str(len(body))
        await self.send(message)
        await self.send({"type": "http.response.body", "body": body})
        self.finished = True


def request_id(scope: Scope) -> str:
    """The id that the caller gave in X-Request-Id, if it is a plain word, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _counted(scope: MutableMapping[str, Any], receive: Receive, limit: int) -> Receive:
    """`receive`, which refuses a body over the limit: at once where its length is stated, else when it gets there."""
    sentence = f"The body may have at most {limit} bytes."
    stated = Headers(scope=scope).get("content-length")
    if stated is not None:
        if not stated.isascii() or not stated.isdigit():
            raise Refused(400, "Content-Length has to be a number.", field="Content-Length")
        if len(stated) > 18 or int(stated) > limit:
            raise Refused(413, sentence)
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > limit:
                raise Refused(413, sentence)
        return message

    return counted
