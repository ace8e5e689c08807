"""The application in this process, for the many ways to ask wrongly, and one real server for the rest."""

from __future__ import annotations

import base64
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from starlette.testclient import TestClient

from service.artifacts import ArtifactStore
from service.configuration import Configuration
from service.executor import LocalExecutor
from service.http.app import behind_door
from service.http.backend import Backend
from service.http.explanations import Explanations, Kind, Question
from service.http.metrics import Metrics
from service.http.registry import Registry
from service.http.security import token_hash
from service.worker import open_table

ROOT = Path(__file__).parents[3]
LIMITS = {
    "body_bytes": 200_000,
    "image_bytes": 100_000,
    "image_pixels": 4_000_000,
    "archive_bytes": 6_000_000,
    "archive_files": 20,
    "unpacked_bytes": 8_000_000,
    "steps": 50,
    "k": 4,
    "batch": 8,
    "queue": 5,
}
TOKENS = {"alice": "alice-secret", "bob": "bob-secret", "watcher": "watcher-secret", "root": "root-secret"}
SCOPES = {"alice": ["audit"], "bob": ["audit"], "watcher": ["read"], "root": ["admin"]}


def png(size: tuple[int, int] = (64, 64), kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    """A small picture."""
    stream = io.BytesIO()
    Image.new(mode, size).save(stream, kind, **options)
    return stream.getvalue()


def base64_of(content: bytes) -> str:
    """As a JSON request holds a picture."""
    return base64.b64encode(content).decode()


def zip_of(files: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip file of these files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return stream.getvalue()


class Counted(Explanations):
    """In place of the engine, where a test is about what reaches it: notes each batch and answers at once."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.batches: list[tuple[Kind, list[Question]]] = []

    def prepare(self) -> None:
        """Needs nothing."""

    def __call__(self, kind: Kind, questions: Sequence[Question], cancel: Any) -> list[dict[str, Any] | Exception]:
        self.batches.append((kind, list(questions)))
        one = {
            "flipped": True,
            "evaluator_flipped": True,
            "target_probability": 0.9,
            "edited_area": 0.1,
            "escalation": 1.0,
            "cost": {"seconds": 0.1},
            "image": base64_of(png()),
            "mask": base64_of(png()),
        }
        return [
            {
                "format": 1,
                "classifier": kind.classifier,
                "prior": "portraits",
                "source": "dark",
                "target": "blond",
                "source_probability": 0.9,
                "original": base64_of(question.image),
                "counterfactuals": [one] * kind.k,
                "agreement": {},
                "seed": question.seed,
                "recipe": {},
                "hashes": {},
            }
            for question in questions
        ]


@dataclass
class Service:
    """An application, and what can be seen of its inside."""

    client: TestClient
    backend: Backend

    @property
    def folder(self) -> Path:
        return self.backend.configuration.folder

    @property
    def explained(self) -> list[tuple[Kind, list[Question]]]:
        assert isinstance(self.backend.explanations, Counted)
        return self.backend.explanations.batches

    def traces(self) -> Any:
        """Everything that a request could leave behind."""
        files = sorted(
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if "jobs.sqlite" not in path.name and path.name not in ("uploads", "classifiers", "datasets")
        )
        return self.backend.jobs.counts(), files, len(self.explained)

    def refuses(
        self, status: int, code: str | None, method: str, address: str, *, field: str | None = None, **request: Any
    ) -> str:
        """Asserts that a request gets this status in the envelope, leaves nothing, and that the next one works."""
        before = self.traces()
        answer = self.client.request(method, address, **request)
        assert answer.status_code == status, answer.text
        problem = envelope_of(answer)
        if code is not None:
            assert problem["code"] == code, answer.text
        if field is not None:
            assert problem.get("field") == field, answer.text
        assert self.traces() == before
        assert self.client.get("/v1/classifiers").status_code == 200
        return str(problem["message"])


def envelope_of(answer: httpx.Response) -> dict[str, str]:
    """What is inside the one shape of an error; an AssertionError for any other shape."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    content = answer.json()
    assert set(content) == {"error"}
    problem: dict[str, str] = content["error"]
    assert {"code", "message"} <= set(problem) <= {"code", "message", "field"}
    assert all(isinstance(value, str) and value for value in problem.values())
    assert "Traceback" not in answer.text and str(ROOT) not in answer.text
    return problem


def open_backend(configuration: Configuration) -> Backend:
    jobs = open_table(configuration)
    return Backend(
        configuration,
        jobs,
        ArtifactStore(configuration.artifacts_url),
        LocalExecutor(configuration, jobs),
        Counted(configuration),
        Registry(configuration),
        Metrics(),
    )


def in_process(configuration: Configuration) -> Iterator[Service]:
    backend = open_backend(configuration)
    backend.start()
    door = behind_door(backend)
    with TestClient(door, base_url="http://127.0.0.1:3000", client=("127.0.0.1", 50_000)) as client:
        yield Service(client, backend)  # type: ignore[arg-type]
    backend.stop()


def without_tokens(folder: Path) -> Configuration:
    return Configuration(folder=folder, workers=0, limits=LIMITS)


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    yield from in_process(without_tokens(tmp_path_factory.mktemp("shared") / "data"))


@pytest.fixture
def service(_shared: Service) -> Service:
    """A service without tokens or workers, as good as new: the application is made once, for that takes longest."""
    with _shared.backend.jobs._writing() as connection:
        for table in ("pfungst_jobs", "pfungst_events"):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    for folder in ("uploads", "artifacts"):
        shutil.rmtree(_shared.folder / folder, ignore_errors=True)
    _shared.explained.clear()
    return _shared


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Service]:
    """A service of its own, for tests that change it."""
    yield from in_process(without_tokens(tmp_path / "data"))


@pytest.fixture(scope="session")
def _guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    tokens = [{"name": name, "sha256": token_hash(secret), "scopes": SCOPES[name]} for name, secret in TOKENS.items()]
    folder = tmp_path_factory.mktemp("guarded") / "data"
    yield from in_process(Configuration(folder=folder, workers=0, limits=LIMITS, tokens=tokens))


@pytest.fixture
def guarded(_guarded: Service) -> Service:
    """A service with tokens."""
    with _guarded.backend.jobs._writing() as connection:
        for table in ("pfungst_jobs", "pfungst_events"):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    return _guarded


def as_(name: str) -> dict[str, str]:
    """The headers of one of the tokens' owners."""
    return {"Authorization": f"Bearer {TOKENS[name]}"}


@dataclass
class Served:
    """A server process and a client of it."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    folder: Path
    log: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(folder: Path) -> dict[str, str]:
    """Of a process that serves or builds without touching anything of the user's."""
    return os.environ | {
        "PFUNGST_CONFIG": str(folder / "pfungst.yaml"),
        "BENTOML_HOME": str(folder / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
        "HF_HUB_OFFLINE": "1",
    }


def serve(folder: Path, what: str = "service:Audit", cwd: Path = ROOT) -> Served:
    """`bentoml serve` on a free port; returns when it is ready."""
    port, log = free_port(), folder / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "bentoml", "serve", what, "--port", str(port)],
            cwd=cwd,
            env=environment(folder),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
    until = time.monotonic() + 200
    while True:
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        try:
            if client.get("/readyz").status_code == 200:
                return Served(process, client, folder, log)
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def end(served: Served, within: float = 10.0) -> float:
    """Ends a server as an orchestrator does; how many seconds it took."""
    served.client.close()
    start = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    try:
        served.process.wait(within + 20)
    finally:
        if served.process.poll() is None:
            os.killpg(served.process.pid, signal.SIGKILL)
    return time.monotonic() - start


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real server with one worker that distils surrogates in two steps: quick, and good enough for a walk."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "pfungst.yaml").write_text(
        "folder: data\nworkers: 1\nthreads: 1\nnice: 0\nsurrogate_steps: 2\nsurrogate_pictures: 40\n"
        "limits: {body_bytes: 400000}\n"
    )
    found = serve(folder)
    yield found
    end(found)
