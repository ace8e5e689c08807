"""/v1/audits: submit an audit and read what it found. /v1/gate: the verdict that a pipeline waits for."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from service.cases import AuditRequest as Checked
from service.http.backend import Backend
from service.http.bodies import StrictRoute
from service.http.errors import responses
from service.http.registry import named_dataset
from service.http.routes.jobs import (
    IdempotencyKey,
    JobId,
    answer_of,
    error_of,
    job_of,
    progress_of,
    stored,
    submit,
    submitted,
    succeeded,
    wait_for,
)
from service.http.routes.jobs import routes as job_routes
from service.http.schemas import AuditRequest, GateAnswer, GateRequest, JobAnswer
from service.http.security import Caller, auditor, reader
from service.http.zip_stream import zip_stream
from service.jobs import Job, JobState

FAILED = 4
"""The exit code of an audit that ended without a verdict."""
STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
JSON_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}, "description": "The record of the audit"}
}


def _file(kind: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {kind: {"schema": {"type": "string"}}}, "description": "The file"}}


AGAIN: dict[int | str, dict[str, Any]] = {
    200: {"model": JobAnswer, "description": "The job that this idempotency key made before"}
}


def routes(backend: Backend) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(route_class=StrictRoute)

    @router.post(
        "/audits", tags=["audits"], status_code=202, response_model=JobAnswer, responses=responses(409, 415) | AGAIN
    )
    async def submit_audit(
        body: AuditRequest, caller: Annotated[Caller, Depends(auditor)], key: IdempotencyKey = None
    ) -> JSONResponse:
        """Queues an audit."""
        asked = await to_thread.run_sync(checked, backend, body, caller)
        return submitted(*await submit(backend, "audit", caller, asked, key))

    router.include_router(job_routes(backend, "audits"))

    @router.get("/audits/{id}/result", tags=["audits"], responses=responses(409) | JSON_FILE, response_class=Response)
    async def result(id: JobId, caller: Annotated[Caller, Depends(reader)]) -> Response:
        """report.json: everything that the audit found."""
        job = await succeeded(backend, "audits", id, caller)
        return await stored(backend, job, "report.json", "application/json")

    @router.get(
        "/audits/{id}/report.html",
        tags=["audits"],
        responses=responses(409) | _file("text/html"),
        response_class=HTMLResponse,
    )
    async def report(id: JobId, caller: Annotated[Caller, Depends(reader)]) -> HTMLResponse:
        """The report as one page. It may show its own pictures and style, and nothing else: no script runs in it."""
        job = await succeeded(backend, "audits", id, caller)
        content = await to_thread.run_sync(_read, backend, job, "report.html")
        page = content.decode("utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": page_policy(page)})

    @router.get(
        "/audits/{id}/junit.xml",
        tags=["audits"],
        responses=responses(409) | _file("application/xml"),
        response_class=Response,
    )
    async def junit(id: JobId, caller: Annotated[Caller, Depends(reader)]) -> Response:
        """The verdict as JUnit test cases."""
        return await stored(backend, await succeeded(backend, "audits", id, caller), "junit.xml", "application/xml")

    @router.get(
        "/audits/{id}/summary.md",
        tags=["audits"],
        responses=responses(409) | _file("text/markdown"),
        response_class=Response,
    )
    async def summary(id: JobId, caller: Annotated[Caller, Depends(reader)]) -> Response:
        """The verdict as Markdown for a merge request."""
        return await stored(backend, await succeeded(backend, "audits", id, caller), "summary.md", "text/markdown")

    @router.get(
        "/audits/{id}/archive.zip",
        tags=["audits"],
        responses=responses(409) | _file("application/zip"),
        response_class=StreamingResponse,
    )
    async def archive(id: JobId, caller: Annotated[Caller, Depends(reader)]) -> StreamingResponse:
        """Everything that the audit left behind, pictures too, packed while it is sent."""
        job = await succeeded(backend, "audits", id, caller)
        names = [
            name
            for name in await to_thread.run_sync(backend.artifacts.names, job.id)
            if not name.startswith(("surrogates/", "resume/"))  # kept for a worker that takes the job over
        ]
        return StreamingResponse(
            zip_stream(names, lambda name: backend.artifacts.open(job.id, name)),
            media_type="application/zip",
            headers={"Content-Disposition": f'attachment; filename="audit-{job.id}.zip"'},
        )

    @router.post(
        "/gate",
        tags=["gate"],
        response_model=GateAnswer,
        responses=responses(409, 415) | {202: {"model": GateAnswer, "description": "No verdict yet; ask again"}},
    )
    async def gate(
        body: GateRequest,
        request: Request,
        caller: Annotated[Caller, Depends(auditor)],
        key: IdempotencyKey = None,
    ) -> JSONResponse:
        """Audits and waits for the verdict, up to `wait_seconds`; 202 where there is none by then."""
        audit = AuditRequest(**body.model_dump(exclude={"wait_seconds"}))
        asked = await to_thread.run_sync(checked, backend, audit, caller)
        job, _ = await submit(backend, "audit", caller, asked, key)
        return verdict_of(await wait_for(backend, request, job, body.wait_seconds))

    @router.get(
        "/gate/{id}",
        tags=["gate"],
        response_model=GateAnswer,
        responses=responses() | {202: {"model": GateAnswer, "description": "No verdict yet; ask again"}},
    )
    async def gate_status(
        id: JobId,
        request: Request,
        caller: Annotated[Caller, Depends(reader)],
        wait_seconds: Annotated[float, Query(ge=0, le=600, allow_inf_nan=False)] = 0.0,
    ) -> JSONResponse:
        """The verdict of an audit, by polling or by waiting for it."""
        job = await job_of(backend, "audits", id, caller)
        return verdict_of(await wait_for(backend, request, job, wait_seconds))

    return router


def checked(backend: Backend, body: AuditRequest, caller: Caller) -> dict[str, Any]:
    """The job's request: ids that this caller may name, within the operator's limits, with every default filled in."""
    backend.registry.check_named("classifiers", body.classifier, caller.owner)
    dataset = named_dataset(body.dataset, body.classifier)
    backend.registry.check_named("datasets", dataset, caller.owner)
    if body.teacher is not None:
        backend.registry.check_named("classifiers", body.teacher, caller.owner, "teacher")
    backend.registry.check_labels(body.classifier, dataset, caller.owner)
    asked = body.model_dump(mode="json") | {"dataset": dataset}
    return Checked.of(asked, backend.configuration).model_dump(mode="json")


def verdict_of(job: Job) -> JSONResponse:
    """What a pipeline branches on: 200 with an exit code once the audit has finished, 202 before."""
    found = job.result or {}
    done = job.state.finished
    answer = GateAnswer(
        audit=job.id,
        state=job.state.value,
        verdict=found.get("verdict"),
        exit_code=(found.get("exit_code", FAILED) if job.state is JobState.SUCCEEDED else FAILED) if done else None,
        headline=found.get("headline"),
        reasons=list(found.get("reasons", [])),
        error=error_of(job),
        progress=progress_of(job),
        links=answer_of(job).links | {"gate": f"/v1/gate/{job.id}"},
    )
    headers = {} if done else {"Location": f"/v1/gate/{job.id}", "Retry-After": "1"}
    return JSONResponse(answer.model_dump(mode="json"), 200 if done else 202, headers)


def page_policy(page: str) -> str:
    """A Content-Security-Policy under which a report shows its inline pictures and its own style block alone."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"
        for style in STYLE.findall(page)
    )
    return (
        f"default-src 'none'; img-src data:; style-src {hashes or chr(39) + 'none' + chr(39)}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; sandbox"
    )


def _read(backend: Backend, job: Job, name: str) -> bytes:
    with backend.artifacts.open(job.id, name) as stream:
        return stream.read()
