"""/v1/priors and /v1/runtimes: what explanations and audits can run with, and whether it is ready."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends

from service.configuration import EMBEDDED_WORLDS
from service.http.backend import Backend
from service.http.errors import responses
from service.http.schemas import PriorEntry, PriorList, RuntimeEntry, RuntimeList
from service.http.security import Caller, reader

ROOT = Path(__file__).parents[3]
Runtime = Literal["torch", "onnxruntime", "tensorrt"]
DETAILS: dict[Runtime, str] = {
    "torch": "the reference; explanations and audits run on it",
    "onnxruntime": "runs exported graphs; chosen when a prior is exported",
    "tensorrt": "runs exported graphs on NVIDIA devices",
}


def routes(backend: Backend) -> APIRouter:
    """The routes of this subject."""
    router = APIRouter()

    @router.get("/priors", tags=["priors"], responses=responses())
    async def priors(caller: Annotated[Caller, Depends(reader)]) -> PriorList:
        """The generative priors that requests may name."""
        found = await to_thread.run_sync(lambda: [entry(name) for name in backend.configuration.priors])
        return PriorList(priors=found)

    @router.get("/runtimes", tags=["runtimes"], responses=responses())
    async def runtimes(caller: Annotated[Caller, Depends(reader)]) -> RuntimeList:
        """What the networks can run on here."""
        return RuntimeList(runtimes=await to_thread.run_sync(lambda: [runtime(name) for name in DETAILS]))

    def entry(name: str) -> PriorEntry:
        embedded = name in EMBEDDED_WORLDS
        folder = ROOT / "worlds" / "weights" / name / "prior" if embedded else Path(name)
        return PriorEntry(
            name=name,
            kind="embedded" if embedded else "configured",
            ready=(folder / "model_index.json").is_file(),
            loaded=name in backend.explanations.priors,
        )

    return router


def runtime(name: Runtime) -> RuntimeEntry:
    """Whether a runtime's package is here; nothing is imported to find out."""
    try:
        found = version(name) if find_spec(name) is not None else None
    except (PackageNotFoundError, ValueError):
        found = None
    return RuntimeEntry(name=name, ready=found is not None, version=found, detail=DETAILS[name])
