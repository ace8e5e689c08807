"""A disk that fills up at the worst moment: it is said, nothing half-written stays, and the same request works later.

The errors are the kernel's and SQLite's own: files are sent to /dev/full, and the database may not grow.
"""

import errno
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import sqlalchemy as sa

from service import worker as worker_module
from service.artifacts import ArtifactStore
from service.configuration import Configuration
from service.disk import database_is_full, is_full
from service.http.explanations import Explanations
from service.jobs import JobState, JobTable
from service.worker import Worker
from tests.audit.test_onnx_classifier import SETTINGS, save
from tests.service.http.conftest import Service, base64_of, png, zip_of
from tests.service.test_worker import cache, check_whole, configuration, journal_of, now, pictures, submit, table

__all__ = ["cache", "configuration", "pictures", "table"]  # fixtures

FULL = Path("/dev/full")
AUDIT = {"classifier": "portraits/student"}
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="/dev/full is needed for a real ENOSPC")


def full_for(monkeypatch: pytest.MonkeyPatch, full_mode: str) -> None:
    """Every file that is opened in this mode is on a full disk."""
    opened = Path.open

    def on_full_disk(path: Path, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        if mode != full_mode:
            return opened(path, mode, *args, **options)
        return opened(FULL, mode.replace("x", "w"), *args, **options)

    monkeypatch.setattr(Path, "open", on_full_disk)


def data_set() -> dict[str, Any]:
    files = {f"{label}/{n}.png": png() for label in ("dark", "blond") for n in range(2)}
    return {"files": {"file": ("a.zip", zip_of(files))}}


def model(folder: Path) -> dict[str, Any]:
    content = save(folder / "model.onnx").read_bytes()
    return {"files": {"file": ("model", content)}, "data": {"settings": json.dumps(SETTINGS)}}


# Uploads


@pytest.mark.parametrize("mode", ["xb", "w"])
@pytest.mark.parametrize("kind", ["datasets", "classifiers"])
def test_an_upload_that_meets_a_full_disk_leaves_nothing(
    service: Service, kind: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is unpacked (xb), and while its settings or its record are written (w)."""
    request = data_set() if kind == "datasets" else model(tmp_path)
    service.backend.registry.home("datasets").mkdir(parents=True)
    service.backend.registry.home("classifiers").mkdir(parents=True)
    with monkeypatch.context() as patch:
        full_for(patch, mode)
        service.refuses(503, "disk_full", "POST", f"/v1/{kind}/upload", **request)
    assert list(service.backend.registry.home("datasets").iterdir()) == []
    assert list(service.backend.registry.home("classifiers").iterdir()) == []
    assert service.client.post(f"/v1/{kind}/upload", **request).status_code == 201


@pytest.mark.parametrize("address", ["/v1/datasets/upload", "/v1/classifiers/upload"])
def test_an_upload_too_large_for_the_disk_it_is_spooled_to_is_no_bad_form(
    service: Service, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large: dict[str, Any] = {"files": {"file": ("a.zip", b"PK" + b"\0" * 2_000_000)}}  # more than is held in memory
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", lambda *_, **__: FULL.open("w+b", buffering=0))
        service.refuses(503, "disk_full", "POST", address, **large)
    service.refuses(422, None, "POST", address, **large)  # the disk is fine, but this is no archive


def test_surrogates_that_cannot_be_stored_are_said(alone: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    small = alone.backend.configuration.model_copy(update={"surrogate_steps": 2, "surrogate_pictures": 20})
    alone.backend.device.work = Explanations(small)
    small.cache_folder.mkdir()
    body = {"classifier": "portraits/student", "image": base64_of(png()), "prior": "portraits", "steps": 2, "k": 1}
    with monkeypatch.context() as patch:
        patch.setattr("engine.surrogate_cache.os.replace", full)
        alone.refuses(503, "disk_full", "POST", "/v1/explain", json=body | {"timeout_seconds": 120})
    assert alone.client.post("/v1/explain", json=body | {"timeout_seconds": 120}).status_code == 200


# Jobs


@contextmanager
def no_growth(table: JobTable) -> Iterator[None]:
    """The database as large as it may be, which is how SQLite sees a full disk."""

    def limit(connection: Any, *_: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # SQLite takes this for "not beyond what is there"

    def unlimit(connection: Any, *_: object) -> None:
        connection.execute("PRAGMA max_page_count = 1073741823")

    sa.event.listen(table._engine, "checkout", limit)
    try:
        yield
    finally:
        sa.event.remove(table._engine, "checkout", limit)
        sa.event.listen(table._engine, "checkout", unlimit)


def test_a_job_that_does_not_fit_into_the_table_is_refused_whole(alone: Service) -> None:
    jobs = alone.backend.jobs
    with no_growth(jobs):
        with pytest.raises(OSError) as caught:
            for _ in range(1000):
                jobs.request_cancel(jobs.submit("audit", "ann", {})[0].id)
        assert is_full(caught.value) and database_is_full(caught.value.__cause__.orig)  # type: ignore[union-attr]
        for address in ("/v1/audits", "/v1/gate"):
            alone.refuses(503, "disk_full", "POST", address, json=AUDIT, headers={"Idempotency-Key": "once"})
        assert alone.client.get("/v1/audits").status_code == 200  # what is there can be read
    answer = alone.client.post("/v1/audits", json=AUDIT, headers={"Idempotency-Key": "once"})
    assert answer.status_code == 202  # the key was not used up
    assert [event.data for event in jobs.events(answer.json()["id"])] == [{"state": "queued"}]


@pytest.mark.parametrize("where", ["copy", "journal", "report"])
@pytest.mark.slow
def test_a_job_that_meets_a_full_disk_goes_on_where_it_was(
    configuration: Configuration, table: JobTable, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was finished stays, on this disk and in the artifacts, and is not done again."""
    monkeypatch.setattr(worker_module, "FULL_SECONDS", 0.0)
    job = submit(table, policy={"min_images": 2, "min_per_direction": 1, "max_images": 4})
    worker = Worker(configuration, table=table)
    store, opened, copied = worker.store, Path.open, worker.store._files.put_file
    file = configuration.work_folder(job.id) / "journal.jsonl"

    def finished() -> list[bytes]:
        if not file.is_file():
            return []
        with opened(file, "rb") as stream:
            return stream.read().splitlines(keepends=True)

    def put_file(source: str, target: str) -> None:
        full = source.endswith("report.html") if where == "report" else where == "copy" and len(finished()) > 3
        if not full:
            return copied(source, target)
        Path(target).write_bytes(b"half")
        with opened(FULL, "wb") as sink:
            sink.write(b"the other half")

    def open_file(path: Path, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        full = where == "journal" and (path, mode) == (file, "ab") and len(finished()) > 3
        return opened(FULL if full else path, mode, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "put_file", put_file)
        patch.setattr(Path, "open", open_file)
        assert worker.run_one()
    stopped, lines = now(table, job), finished()
    assert (stopped.state, stopped.attempts, stopped.error) == (JobState.INTERRUPTED, 0, None)
    assert stopped.progress["stage"] == "waiting for space on the disk"
    assert len(lines) == {"copy": 5, "journal": 4, "report": 5}[where]
    stored = journal_of(ArtifactStore(configuration.artifacts_url), job)
    assert len(stored) == (5 if where == "report" else 3)
    assert not any(".partial-" in path.name for path in configuration.folder.rglob("*"))

    assert worker.run_one()
    ended = now(table, job)
    assert ended.state is JobState.SUCCEEDED, ended.error
    check_whole(store, ended)
    assert [line + b"\n" for line in journal_of(store, ended)][: len(lines)] == lines
    assert not configuration.work_folder(job.id).exists()


def test_a_worker_that_met_a_full_disk_leaves_the_queue_alone_for_a_while(
    configuration: Configuration, table: JobTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    worker, waited = Worker(configuration, table=table), list[float]()
    monkeypatch.setattr(worker._ending, "wait", waited.append)
    monkeypatch.setattr(worker_module, "job_case", full)
    job = submit(table)
    for _ in range(configuration.max_attempts + 2):  # however often: it is no fault of the job's
        assert worker.run_one()
    assert waited == [worker_module.FULL_SECONDS] * (configuration.max_attempts + 2)
    assert now(table, job).state is JobState.INTERRUPTED
    table.request_cancel(job.id)
    assert now(table, job).state is JobState.CANCELLED
    assert not worker.run_one()
