"""/v1/explain: one image, K counterfactuals, answered while the caller waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from threading import Event
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from service.http.backend import Backend
from service.http.batching import Asked, Closed, Full
from service.http.bodies import StrictRoute, strict_json
from service.http.errors import Refused, responses
from service.http.explanations import Kind, Question, flips
from service.http.schemas import ExplainRequest, ExplainSettings, Explanation
from service.http.security import Caller, auditor
from service.http.uploads import check_image, check_pixels, decode_base64
from service.sources import AUTO

DECODED_AT_A_TIME = 2
"""A picture of 40 megapixels takes 120 MB while it is looked at."""
LOOK_SECONDS = 0.5
"""Between two looks whether the service is stopping."""
COMING = "pfungst_coming"


def routes(backend: Backend) -> APIRouter:
    """The routes of this subject."""

    class ExpectedRoute(StrictRoute):
        """A route whose requests the device expects from their first line on, before their bodies are read."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def expected(request: Request) -> Response:
                with backend.device.expect() as coming:
                    request.scope[COMING] = coming
                    return await handle(request)

            return expected

    router = APIRouter(route_class=ExpectedRoute, tags=["explain"])
    limits = backend.configuration.limits
    limiter: list[CapacityLimiter] = []

    def check(content: bytes, declared: str | None) -> None:
        check_image(content, limits, declared)
        check_pixels(content)

    @router.post("/explain", responses=responses(415, 504))
    async def explain(
        body: ExplainRequest, request: Request, caller: Annotated[Caller, Depends(auditor)]
    ) -> Explanation:
        """Counterfactuals of an image in base64."""
        content = decode_base64(body.image, limits.image_bytes)
        return await answered(content, None, body, request, caller)

    @router.post("/explain/upload", responses=responses(415, 504))
    async def explain_upload(
        request: Request,
        caller: Annotated[Caller, Depends(auditor)],
        image: Annotated[UploadFile, File(description="PNG, JPEG, WebP or BMP")],
        settings: Annotated[str, Form(description="the fields of /v1/explain besides the image, as JSON")],
    ) -> Explanation:
        """Counterfactuals of an image file."""
        body = settings_of(settings)
        if image.size is not None and image.size > limits.image_bytes:
            raise Refused(413, f"The image has over {limits.image_bytes} bytes.", field="image")
        return await answered(await image.read(), image.content_type, body, request, caller)

    async def answered(
        content: bytes, declared: str | None, body: ExplainSettings, request: Request, caller: Caller
    ) -> Explanation:
        check_settings(backend, body, caller)
        if not limiter:
            limiter.append(CapacityLimiter(DECODED_AT_A_TIME))
        await to_thread.run_sync(check, content, declared, limiter=limiter[0])
        kind = Kind(body.classifier, body.prior or AUTO, body.k, body.steps)
        try:
            asked = backend.device.ask(kind, Question(content, body.target, body.seed))
        except Full:
            raise Refused(
                503, "Too many questions wait already; ask again soon.", code="busy", headers={"Retry-After": "5"}
            ) from None
        except Closed:
            raise Refused(503, "The service is stopping.") from None
        request.scope[COMING].arrived()
        found = await patiently(asked, request, body.timeout_seconds, backend.stopping)
        backend.metrics.counterfactuals(*flips(found))
        return Explanation.model_validate(found)

    return router


async def patiently(
    asked: Asked[Question, dict[str, Any]], request: Request, seconds: float, stopping: Event
) -> dict[str, Any]:
    """The answer; a question whose time is up, or whose asker went away, is given up."""
    future = asyncio.wrap_future(asked.answer)
    gone = asyncio.ensure_future(_disconnected(request))
    either: set[asyncio.Future[Any]] = {future, gone}
    until = time.monotonic() + seconds
    try:
        while True:
            left = until - time.monotonic()
            patience = min(LOOK_SECONDS, max(0.0, left))
            await asyncio.wait(either, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if future.done():
                return future.result()
            if left <= 0:
                raise Refused(504, f"There was no answer within {seconds:g} s; the work was stopped.")
            if stopping.is_set():
                raise Refused(503, "The service is stopping.")
            if gone.done():
                raise Refused(503, "The caller went away.", code="cancelled")
    finally:
        gone.cancel()
        if not future.done():
            asked.give_up()
            future.cancel()


async def _disconnected(request: Request) -> None:
    """Returns when the caller is gone. It sleeps until then: fifty who wait and look would slow down the work."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_settings(backend: Backend, body: ExplainSettings, caller: Caller) -> None:
    """Names that this caller may use, and numbers within the operator's limits."""
    limits, priors = backend.configuration.limits, backend.configuration.priors
    backend.registry.check_named("classifiers", body.classifier, caller.owner)
    if body.prior not in (None, AUTO, *priors):
        raise Refused(422, "There is no such prior; see /v1/priors.", code="unknown_prior", field="prior")
    for name in ("k", "steps"):
        value, most = getattr(body, name), getattr(limits, name)
        if value is not None and value > most:
            raise Refused(422, f"{name} is {value}; at most {most} are allowed.", field=name)


def settings_of(text: str) -> ExplainSettings:
    """The settings field of a form, read as strictly as a body."""
    try:
        found = strict_json(text.encode())
    except Refused as error:
        raise Refused(422, str(error.detail), code="bad_json", field="settings") from None
    try:
        return ExplainSettings.model_validate(found)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("settings", *one["loc"])} for one in error.errors()]) from None
