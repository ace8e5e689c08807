"""/v1/cfkd: the data that repairs a classifier, and the repair."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response, StreamingResponse

from service.cases import CfkdRequest as Checked
from service.http.backend import Backend
from service.http.bodies import StrictRoute
from service.http.errors import Refused, responses
from service.http.routes.audits import AGAIN
from service.http.routes.jobs import IdempotencyKey, JobId, job_of, stored, submit, submitted, succeeded
from service.http.routes.jobs import routes as job_routes
from service.http.schemas import CfkdRequest, JobAnswer
from service.http.security import Caller, auditor, reader
from service.jobs import JobState

ZIP: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/zip": {"schema": {"type": "string"}}}, "description": "The file"}
}


def routes(backend: Backend) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(route_class=StrictRoute)

    @router.post(
        "/cfkd", tags=["cfkd"], status_code=202, response_model=JobAnswer, responses=responses(409, 415) | AGAIN
    )
    async def submit_cfkd(
        body: CfkdRequest, caller: Annotated[Caller, Depends(auditor)], key: IdempotencyKey = None
    ) -> JSONResponse:
        """Queues a debiasing set of one of your audits, and with `finetune` the repair."""
        audit = await job_of(backend, "audits", body.audit, caller)
        if audit.state is not JobState.SUCCEEDED:
            raise Refused(409, f"The audit is {audit.state}; only one that has succeeded can be learned from.")
        for field, name in (("train", body.train), ("test", body.test)):
            if name is not None:
                backend.registry.check_named("datasets", name, caller.owner, field)
        asked = Checked.of(body.model_dump(mode="json"), backend.configuration).model_dump(mode="json")
        return submitted(*await submit(backend, "cfkd", caller, asked, key))

    router.include_router(job_routes(backend, "cfkd"))

    @router.get("/cfkd/{id}/result", tags=["cfkd"], responses=responses(409))
    async def result(id: JobId, caller: Annotated[Caller, Depends(reader)]) -> dict[str, Any]:
        """How many counterfactuals there are to learn from, and what the repair gained."""
        return (await succeeded(backend, "cfkd", id, caller)).result or {}

    @router.get("/cfkd/{id}/dataset.zip", tags=["cfkd"], responses=responses(409) | ZIP, response_class=Response)
    async def dataset(id: JobId, caller: Annotated[Caller, Depends(reader)]) -> StreamingResponse:
        """The debiasing set as a zip file."""
        return await packed(id, caller, "set.zip")

    @router.get("/cfkd/{id}/classifier.zip", tags=["cfkd"], responses=responses(409) | ZIP, response_class=Response)
    async def classifier(id: JobId, caller: Annotated[Caller, Depends(reader)]) -> StreamingResponse:
        """The repaired classifier as a zip file of a Hugging Face folder."""
        return await packed(id, caller, "classifier.zip")

    async def packed(id: str, caller: Caller, name: str) -> StreamingResponse:
        job = await succeeded(backend, "cfkd", id, caller)
        attachment = {"Content-Disposition": f'attachment; filename="{name}"'}
        return await stored(backend, job, name, "application/zip", attachment)

    return router
