"""The application under /v1, and the limits that the door holds it to."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

from anyio import to_thread
from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response
from starlette.types import Scope

from service.configuration import Configuration
from service.http import errors
from service.http.backend import Backend
from service.http.door import Door
from service.http.metrics import CONTENT_TYPE, Metrics
from service.http.registry import strip_path
from service.http.routes import audits, cfkd, classifiers, explain, priors
from service.http.security import Caller, Guard, reader

FORM_BYTES = 64 * 1024
"""What a form's fields and boundaries may take beside its file."""
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
}
UPLOADS = ("/v1/classifiers/upload", "/v1/datasets/upload")


def build_app(backend: Backend) -> FastAPI:
    """The application; it is reached through a Door alone, which says who asks."""
    app = FastAPI(
        title="Pfungst",
        version=version("pfungst"),
        description="Audits image classifiers for Clever Hans behaviour with visual counterfactuals.",
        openapi_url="/v1/openapi.json",
        docs_url=None,  # those pages load scripts of other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    errors.install(app, lambda message: strip_path(message, backend.configuration.folder))
    for subject in (classifiers, priors, explain, audits, cfkd):
        app.include_router(subject.routes(backend), prefix="/v1")

    @app.get("/metrics", tags=["metrics"], responses=errors.responses() | METRICS, response_class=Response)
    async def metrics(caller: Annotated[Caller, Depends(reader)]) -> Response:
        """Figures for Prometheus: requests, stages, batches, flips, jobs by state, device memory."""
        return Response(await to_thread.run_sync(backend.metrics.text), media_type=CONTENT_TYPE)

    app.openapi = lambda: _openapi(app, bool(backend.configuration.tokens))  # type: ignore[method-assign]
    return app


def behind_door(backend: Backend) -> Door:
    """The application with its door, as a server without BentoML would serve it."""
    return Door(build_app(backend), **door_settings(backend.configuration, backend.metrics))


def door_settings(configuration: Configuration, metrics: Metrics) -> dict[str, Any]:
    """What a door needs to know."""
    limits = configuration.limits

    def limit_of(scope: Scope) -> int:
        return limits.archive_bytes + FORM_BYTES if scope["path"] in UPLOADS else limits.body_bytes

    return {"guard": Guard(configuration.tokens), "limit_of": limit_of, "watch": metrics.request}


def _openapi(app: FastAPI, tokens: bool) -> dict[str, Any]:
    """FastAPI's document, with the error envelope in place of FastAPI's own, and the bearer token if one is needed."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = schema["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        told = errors.Envelope.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= told.pop("$defs") | {"Envelope": told}
        if tokens:
            schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}]
        app.openapi_schema = schema
    return app.openapi_schema
