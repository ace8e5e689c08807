"""What audits and cfkd jobs have in common: status, list, events, cancel, and their files."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, BinaryIO, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import JSONResponse, StreamingResponse

from service.http.backend import Backend
from service.http.errors import Refused, responses
from service.http.schemas import Id, JobAnswer, JobError, JobList, ProgressAnswer
from service.http.security import Caller, auditor, reader
from service.jobs import Job, JobState

LOOK_SECONDS = 0.25
"""Between two looks at a job that somebody waits for."""
SIGN_OF_LIFE_SECONDS = 15.0
"""Proxies close a stream on which nothing is said."""
CHUNK = 1 << 18

Collection = Literal["audits", "cfkd"]
KINDS: dict[Collection, Literal["audit", "cfkd"]] = {"audits": "audit", "cfkd": "cfkd"}
State = Literal["queued", "running", "succeeded", "failed", "cancelled", "interrupted"]
JobId = Annotated[Id, Path(description="the job's id")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="the same key and request give the same job",
    ),
]
EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Events"}
}


async def job_of(backend: Backend, collection: Collection, id: str, caller: Caller) -> Job:
    """A job of this caller; another owner's is as unknown as one that never was."""
    job = await to_thread.run_sync(backend.jobs.get, id, caller.owner)
    if job is None or job.kind != KINDS[collection]:
        raise Refused(404, f"There is no such job at /v1/{collection}/{id}.")
    return job


async def succeeded(backend: Backend, collection: Collection, id: str, caller: Caller) -> Job:
    """A job that has something to show; 409 for any other."""
    job = await job_of(backend, collection, id, caller)
    if job.state is JobState.SUCCEEDED:
        return job
    if job.state.finished:
        why = f": {job.error['message']}" if job.error else "."
        raise Refused(409, f"The job ended {job.state}{why}", code=str(job.state))
    raise Refused(409, f"The job is {job.state}; ask again when it has succeeded.", code="not_finished")


def answer_of(job: Job) -> JobAnswer:
    """A job as it is told."""
    collection: Collection = "audits" if job.kind == "audit" else "cfkd"
    home = f"/v1/{collection}/{job.id}"
    links = {"self": home, "events": f"{home}/events", "cancel": f"{home}/cancel"}
    if job.state is JobState.SUCCEEDED:
        links |= {name: f"{home}/{part}" for name, part in parts_of(job).items()}
    return JobAnswer(
        id=job.id,
        kind=job.kind,  # type: ignore[arg-type]
        state=job.state.value,
        progress=progress_of(job),
        error=error_of(job),
        cancel_requested=job.cancel_requested,
        created=job.created,
        started=job.started,
        finished=job.finished,
        request=job.request,
        links=links,
    )


def parts_of(job: Job) -> dict[str, str]:
    """What a job that succeeded has to show, by the last part of its address."""
    parts = {"result": "result"}
    if job.kind == "audit":
        return parts | {
            "report": "report.html",
            "junit": "junit.xml",
            "summary": "summary.md",
            "archive": "archive.zip",
        }
    if (job.result or {}).get("counterfactuals"):
        parts["dataset"] = "dataset.zip"
        if job.request.get("finetune"):
            parts["classifier"] = "classifier.zip"
    return parts


def progress_of(job: Job) -> ProgressAnswer:
    """How far a job is."""
    return ProgressAnswer(**{name: job.progress.get(name) for name in ProgressAnswer.model_fields})


def error_of(job: Job) -> JobError | None:
    """Why a job failed."""
    if job.error is None:
        return None
    return JobError(code=str(job.error.get("code", "internal")), message=str(job.error.get("message", "")))


async def submit(
    backend: Backend, kind: str, caller: Caller, request: dict[str, Any], key: str | None
) -> tuple[Job, bool]:
    """Queues a job, wakes the workers; (job, whether it is new)."""
    most = backend.configuration.limits.queue
    job, created = await to_thread.run_sync(
        lambda: backend.jobs.submit(kind, caller.owner, request, key, most_waiting=most)
    )
    if created:
        await to_thread.run_sync(backend.executor.wake)
    return job, created


def submitted(job: Job, created: bool) -> JSONResponse:
    """202 for a new job, 200 for the one that the idempotency key had made."""
    answer = answer_of(job)
    return JSONResponse(
        answer.model_dump(mode="json"), 202 if created else 200, {"Location": answer.links["self"], "Retry-After": "1"}
    )


async def wait_for(backend: Backend, request: Request, job: Job, seconds: float) -> Job:
    """The job when it has finished, or as it is after some seconds, or when the asker is gone."""
    until = time.monotonic() + seconds
    while not job.state.finished and time.monotonic() < until and not backend.stopping.is_set():
        await asyncio.sleep(min(LOOK_SECONDS, max(0.01, until - time.monotonic())))
        if await request.is_disconnected():
            break
        found = await to_thread.run_sync(backend.jobs.get, job.id)
        job = found or job
    return job


def routes(backend: Backend, collection: Collection) -> APIRouter:
    """List, status, events and cancel."""
    router = APIRouter(tags=[collection])

    @router.get(f"/{collection}", responses=responses(), operation_id=f"list_{collection}")
    async def list_jobs(
        caller: Annotated[Caller, Depends(reader)],
        state: Annotated[State | None, Query(description="only jobs in this state")] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        before: Annotated[Id | None, Query(description="id of the last job of the page before")] = None,
    ) -> JobList:
        """Your jobs, the newest first."""
        if before is not None:
            await job_of(backend, collection, before, caller)
        found = await to_thread.run_sync(backend.jobs.list, caller.owner, state, limit, before, KINDS[collection])
        return JobList(jobs=[answer_of(job) for job in found], next=found[-1].id if len(found) == limit else None)

    @router.get(f"/{collection}/{{id}}", responses=responses(), operation_id=f"get_{collection}")
    async def status(id: JobId, caller: Annotated[Caller, Depends(reader)]) -> JobAnswer:
        """State, progress and time left. Never waits for the device."""
        return answer_of(await job_of(backend, collection, id, caller))

    @router.get(
        f"/{collection}/{{id}}/events",
        responses=responses() | EVENT_STREAM,
        response_class=StreamingResponse,
        operation_id=f"follow_{collection}",
    )
    async def events(
        id: JobId,
        caller: Annotated[Caller, Depends(reader)],
        after: Annotated[int, Query(ge=0, le=2**31 - 1, description="number of the last event known")] = 0,
        last: Annotated[str | None, Header(alias="Last-Event-ID", max_length=20)] = None,
    ) -> StreamingResponse:
        """Every change of a job as server-sent events, from the beginning or after an event, until it has finished."""
        await job_of(backend, collection, id, caller)
        start = int(last) if last is not None and last.isascii() and last.isdigit() and len(last) < 10 else after
        return StreamingResponse(_events(backend, id, start), media_type="text/event-stream")

    @router.post(
        f"/{collection}/{{id}}/cancel",
        status_code=202,
        responses=responses(409),
        operation_id=f"cancel_{collection}",
    )
    async def cancel(id: JobId, caller: Annotated[Caller, Depends(auditor)]) -> JobAnswer:
        """Ends a job: at once where it waits, at its next step where it runs."""
        job = await job_of(backend, collection, id, caller)
        if job.state.finished:
            raise Refused(409, f"The job has ended already: it is {job.state}.", code="finished")
        await to_thread.run_sync(backend.jobs.request_cancel, id)
        return answer_of(await job_of(backend, collection, id, caller))

    return router


async def _events(backend: Backend, id: str, after: int) -> AsyncIterator[str]:
    """Events of a job as text, with a comment now and then where nothing happens."""
    said = time.monotonic()
    while True:
        job = await to_thread.run_sync(backend.jobs.get, id)
        found = await to_thread.run_sync(backend.jobs.events, id, after)
        for event in found:
            after = event.number
            data = json.dumps({"time": event.time.isoformat(), **event.data})
            yield f"id: {event.number}\nevent: {event.kind}\ndata: {data}\n\n"
        # The job was read before its events: where it had finished, these were the last.
        if job is None or (job.state.finished and not found) or backend.stopping.is_set():
            return
        if found:
            said = time.monotonic()
        elif time.monotonic() - said > SIGN_OF_LIFE_SECONDS:
            said = time.monotonic()
            yield ": still here\n\n"
        if not (job.state.finished and found):
            await asyncio.sleep(LOOK_SECONDS)


async def stored(
    backend: Backend, job: Job, name: str, media_type: str, headers: dict[str, str] | None = None
) -> StreamingResponse:
    """A file of a job, sent as it is read."""

    def open_file() -> tuple[BinaryIO, int]:
        return backend.artifacts.open(job.id, name), backend.artifacts.size(job.id, name)

    try:
        stream, size = await to_thread.run_sync(open_file)
    except FileNotFoundError:
        raise Refused(404, f"The job left no {name}.") from None
    return StreamingResponse(
        _chunks(stream), media_type=media_type, headers={"Content-Length": str(size), **(headers or {})}
    )


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    with stream:
        while part := stream.read(CHUNK):
            yield part
