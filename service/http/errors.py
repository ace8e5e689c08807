"""Everything that HTTP refuses, in one envelope: {"error": {"code", "message", "field"?}}.

Refused                  raised on purpose anywhere behind the door, with its status and code
RequestValidationError   FastAPI's own: a parameter or a field of the body is wrong
InputError, ModelError   the other rooms' refusals: 422, with a code by kind
anything else            500; the message says nothing of the inside, the log says all of it
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from engine.errors import (
    Cancelled,
    ImageError,
    InputError,
    ModelError,
    PfungstError,
    RecipeError,
    TargetError,
)
from service.disk import is_full
from service.jobs import ConflictError, QueueFullError

log = logging.getLogger("pfungst.http")

CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    409: "conflict",
    411: "length_required",
    413: "too_large",
    415: "wrong_content_type",
    422: "invalid",
    429: "busy",
    500: "internal",
    503: "unavailable",
    504: "timeout",
}
KINDS: dict[type[PfungstError], str] = {
    ImageError: "bad_image",
    TargetError: "bad_target",
    RecipeError: "bad_setting",
    ModelError: "bad_model",
    InputError: "bad_input",
}
LONGEST = 600
BRANCHES = frozenset({"constrained-int", "constrained-str"})
"""What pydantic adds to the place of a field that may be a number or a text."""
FULL_DISK = "The server's disk is full."


class Problem(BaseModel):
    """What is wrong."""

    code: str = Field(description="stable word to branch on, such as not_found")
    message: str = Field(description="one sentence for a person")
    field: str | None = Field(None, description="the field or parameter it is about; left out where there is none")


class Envelope(BaseModel):
    """Every answer from status 400 on."""

    error: Problem


JSON_ENVELOPE = {"application/json": {"schema": {"$ref": "#/components/schemas/Envelope"}}}
"""Not a `model`, which FastAPI would document under the content type of the route's good answer."""


class Refused(HTTPException):
    """A request that is not served; FastAPI hands such an error through from wherever it is raised."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code or code_of(status)
        self.field = field


def code_of(status: int) -> str:
    """The word for a status that nobody gave a better one."""
    return CODES.get(status, "bad_request" if status < 500 else "internal")


def envelope(
    status: int, message: str, code: str | None = None, field: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """The one shape of an error."""
    problem = {"code": code or code_of(status), "message": _printable(message)}
    if field:
        problem["field"] = _printable(field)[:200]
    return JSONResponse({"error": problem}, status, headers)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route for its OpenAPI entry; those that any route can give are always among them."""
    everywhere = (400, 401, 403, 404, 405, 413, 422, 500, 503)
    return {
        status: {"content": JSON_ENVELOPE, "description": HTTPStatus(status).phrase}
        for status in sorted({*everywhere, *statuses})
    }


def install(app: FastAPI, strip: Callable[[str], str] = str) -> None:
    """Gives an application its handlers; `strip` takes the server's own paths out of a message."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        code, field = getattr(error, "code", None), getattr(error, "field", None)
        text = str(error.detail) if isinstance(error, Refused) else HTTP_SENTENCES.get(status, str(error.detail))
        return envelope(status, strip(text), code, field, dict(error.headers or {}))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_envelope(error)

    async def unusable(_: Request, error: Exception) -> Response:
        assert isinstance(error, PfungstError)
        return envelope(422, strip(str(error)), kind_of(error))

    async def cancelled(_: Request, error: Exception) -> Response:
        return envelope(503, "The work was stopped before it was finished; ask again.", "cancelled")

    async def broken(request: Request, error: Exception) -> Response:
        log.error("request %s failed", request.scope.get("pfungst_request_id", "-"), exc_info=error)
        return envelope(500, "Something went wrong inside; the server's log has it under this request's id.")

    async def conflict(_: Request, error: Exception) -> Response:
        return envelope(409, str(error), "idempotency_conflict", "Idempotency-Key")

    async def full(_: Request, error: Exception) -> Response:
        return envelope(503, str(error), "queue_full", headers={"Retry-After": "30"})

    async def disk(request: Request, error: Exception) -> Response:
        if is_full(error):
            log.error("request %s: the disk is full", request.scope.get("pfungst_request_id", "-"))
            return envelope(503, FULL_DISK, "disk_full")
        return await broken(request, error)

    app.add_exception_handler(ConflictError, conflict)
    app.add_exception_handler(QueueFullError, full)
    app.add_exception_handler(OSError, disk)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Cancelled, cancelled)
    app.add_exception_handler(InputError, unusable)
    app.add_exception_handler(ModelError, unusable)
    app.add_exception_handler(Exception, broken)


HTTP_SENTENCES = {
    404: "There is nothing at this address; /v1/openapi.json says what there is.",
    405: "This address does not take that method.",
}


def kind_of(error: PfungstError) -> str:
    """The code of another room's refusal."""
    return next((code for kind, code in KINDS.items() if isinstance(error, kind)), "bad_input")


def validation_envelope(error: RequestValidationError) -> JSONResponse:
    """The first thing that is wrong with a request; what was given is not repeated, for it may be long or secret."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return envelope(400, "The body is no JSON.", "bad_json")
    where = [str(part) for part in first["loc"] if part not in BRANCHES]
    place, name = where[0], ".".join(where[1:])
    problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ").rstrip(".")
    if first["type"] == "missing":
        sentence = f"{name or 'the body'} is missing."
    elif first["type"] == "extra_forbidden":
        sentence = f"There is no field {name!r:.80} here."
    elif problem.startswith("Expected UploadFile"):
        sentence = f"{name} has to be sent as a file, not as text; an address is not fetched."
    else:
        sentence = f"{name or place}: {problem}."
    return envelope(422, sentence, "invalid", name or place)


def _printable(text: str) -> str:
    """One line of text without control characters."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
