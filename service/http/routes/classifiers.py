"""/v1/classifiers and /v1/datasets: what requests may name."""

from __future__ import annotations

from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, File, Form, Path, Response, UploadFile
from pydantic import StringConstraints

from service.configuration import EMBEDDED_WORLDS
from service.http.backend import Backend
from service.http.bodies import StrictRoute, strict_json
from service.http.errors import Refused, responses
from service.http.registry import Upload
from service.http.schemas import (
    ClassifierEntry,
    ClassifierList,
    DatasetEntry,
    DatasetList,
    Id,
    RegisterRequest,
)
from service.http.security import Caller, Scope, administrator, auditor, reader

UPLOADS_AT_A_TIME = 2
"""Uploads are unpacked and opened in threads of their own, so that status requests never wait for them."""

UploadName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]


def routes(backend: Backend) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter(route_class=StrictRoute)
    registry, known = backend.registry, backend.configuration
    limiter: list[CapacityLimiter] = []

    async def in_upload_thread(work: Any, *args: Any) -> Any:
        if not limiter:
            limiter.append(CapacityLimiter(UPLOADS_AT_A_TIME))
        return await to_thread.run_sync(work, *args, limiter=limiter[0])

    @router.get("/classifiers", tags=["classifiers"], responses=responses())
    async def list_classifiers(caller: Annotated[Caller, Depends(reader)]) -> ClassifierList:
        """Embedded, configured and your own uploaded classifiers."""
        uploads = await to_thread.run_sync(lambda: list(registry.uploads("classifiers", caller.owner)))
        return ClassifierList(
            classifiers=[*(entry_of(id) for id in known.classifier_ids), *(uploaded(one) for one in uploads)]
        )

    @router.post("/classifiers", tags=["classifiers"], status_code=201, responses=responses(415))
    async def register_classifier(
        body: RegisterRequest, caller: Annotated[Caller, Depends(administrator)]
    ) -> ClassifierEntry:
        """Opens a classifier of the operator's configuration, asks it once, and notes its labels."""
        if body.source not in known.classifier_ids:
            raise Refused(
                422, "There is no such classifier in the configuration.", code="unknown_classifier", field="source"
            )
        await in_upload_thread(registry.open_configured, body.source)
        return entry_of(body.source)

    @router.post("/classifiers/upload", tags=["classifiers"], status_code=201, responses=responses(415))
    async def upload_classifier(
        caller: Annotated[Caller, Depends(auditor)],
        file: Annotated[UploadFile, File(description="an ONNX file, or a zip of a Hugging Face safetensors folder")],
        name: Annotated[UploadName, Form(description="for people")] = "upload",
        settings: Annotated[
            str | None, Form(description="JSON of labels, size, mean, std, resample and output, for ONNX files")
        ] = None,
    ) -> ClassifierEntry:
        """Stores a model after it was opened and asked once. Pickles are never opened."""
        stated = None if settings is None else settings_of(settings)
        upload = await in_upload_thread(registry.add_classifier, file.file, caller.owner, name, stated)
        return uploaded(upload)

    @router.delete("/classifiers/{id}", tags=["classifiers"], status_code=204, responses=responses())
    async def delete_classifier(id: Annotated[Id, Path()], caller: Annotated[Caller, Depends(auditor)]) -> Response:
        """Removes an upload of yours; administrators may remove any."""
        await remove("classifiers", id, caller)
        backend.explanations.forget(id)
        return Response(status_code=204)

    @router.get("/datasets", tags=["datasets"], responses=responses())
    async def list_datasets(caller: Annotated[Caller, Depends(reader)]) -> DatasetList:
        """Embedded, configured and your own uploaded data sets."""
        uploads = await to_thread.run_sync(lambda: list(registry.uploads("datasets", caller.owner)))
        named = [
            DatasetEntry(id=id, kind="embedded" if id in EMBEDDED_WORLDS else "configured", name=id)
            for id in known.dataset_ids
        ]
        return DatasetList(datasets=[*named, *(uploaded_set(one) for one in uploads)])

    @router.post("/datasets/upload", tags=["datasets"], status_code=201, responses=responses(415))
    async def upload_dataset(
        caller: Annotated[Caller, Depends(auditor)],
        file: Annotated[UploadFile, File(description="a zip of pictures with manifest.csv or class folders")],
        name: Annotated[UploadName, Form(description="for people")] = "upload",
    ) -> DatasetEntry:
        """Stores a data set after its table was read and its files were found."""
        return uploaded_set(await in_upload_thread(registry.add_dataset, file.file, caller.owner, name))

    @router.delete("/datasets/{id}", tags=["datasets"], status_code=204, responses=responses())
    async def delete_dataset(id: Annotated[Id, Path()], caller: Annotated[Caller, Depends(auditor)]) -> Response:
        """Removes an upload of yours; administrators may remove any."""
        await remove("datasets", id, caller)
        return Response(status_code=204)

    async def remove(kind: Any, id: str, caller: Caller) -> None:
        owner = None if caller.may(Scope.ADMIN) else caller.owner
        if not await to_thread.run_sync(registry.delete, kind, id, owner):
            raise Refused(404, f"There is no upload {id}.")

    def entry_of(id: str) -> ClassifierEntry:
        kind = "embedded" if "/" in id else "configured"
        return ClassifierEntry.model_validate({"id": id, "kind": kind, "name": id, **registry.opened.get(id, {})})

    return router


def uploaded(one: Upload) -> ClassifierEntry:
    """An uploaded classifier's entry."""
    return ClassifierEntry.model_validate(
        {
            "id": one.id,
            "kind": "uploaded",
            "name": one.name,
            "labels": one.labels,
            "size": one.size,
            "sha256": one.sha256,
            "created": one.time,
        }
    )


def uploaded_set(one: Upload) -> DatasetEntry:
    """An uploaded data set's entry."""
    return DatasetEntry(id=one.id, kind="uploaded", name=one.name, created=one.time)


def settings_of(text: str) -> dict[str, Any]:
    """The settings field of an upload, read as strictly as a body."""
    try:
        found = strict_json(text.encode())
    except Refused as error:
        raise Refused(422, str(error.detail), code="bad_json", field="settings") from None
    if not isinstance(found, dict):
        raise Refused(422, "settings has to be one JSON object.", field="settings")
    return found
