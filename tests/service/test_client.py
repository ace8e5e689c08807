"""The client against real servers on loopback, and `pfungst audit --server` from arguments to files and exit code."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import InputError
from service import client as client_module
from service import remote_audit
from service.cli import main
from service.client import Client, Event, FaultError, Job, RefusedError, read_events, server_address, unpack
from service.configuration import Configuration
from service.http import uploads
from service.http.app import behind_door
from service.http.backend import Backend
from service.http.security import token_hash
from service.jobs import JobState
from tests.audit.test_run import reported
from tests.service.http.conftest import (
    LIMITS,
    TOKENS,
    Counted,
    Served,
    end,
    open_backend,
    png,
    serve,
    without_tokens,
    zip_of,
)
from worlds.store import WEIGHTS

ROOT = Path(__file__).parents[2]
STUDENT = "portraits/student"


class Way:
    """The way to a server, which can be made to fail; it notes (method, path, idempotency key) of what arrives."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.seen: list[tuple[str, str, str | None]] = []
        self.away = 0
        """So many requests are answered 503 from here on."""
        self.cut = 0
        """So many streams of events break off after their first event."""
        self.no_streams = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        keys = [value.decode() for name, value in scope["headers"] if name == b"idempotency-key"]
        self.seen.append((scope["method"], scope["path"], keys[0] if keys else None))
        stream = scope["path"].endswith("/events")
        if self.away or (stream and self.no_streams):
            self.away = max(0, self.away - 1)
            await send({"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"text/html")]})
            await send({"type": "http.response.body", "body": b"<h1>away</h1>"})
            return
        await self.app(scope, receive, self.breaking(send) if stream and self.cut else send)

    def breaking(self, send: Send) -> Send:
        self.cut -= 1
        sent = 0

        async def first_only(message: Message) -> None:
            nonlocal sent
            sent += message["type"] == "http.response.body"
            if sent > 1:
                raise ConnectionResetError
            await send(message)

        return first_only

    def count(self, method: str, path: str) -> int:
        return sum((m, p) == (method, path) for m, p, _ in self.seen)


class Running:
    """A server in a thread of this process, without workers: the tests do what a worker would."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.way = Way(behind_door(backend))
        settings = uvicorn.Config(self.way, port=0, ws="none", lifespan="off", log_config=None)
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def start(self) -> None:
        self.backend.start()
        self.thread.start()
        until = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self.backend.stopping.set()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.backend.stop()

    def claim(self, seconds: float = 60.0) -> Any:
        """The next job, as a worker takes it."""
        until = time.monotonic() + seconds
        while (job := self.backend.jobs.claim("worker")) is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        return job

    def succeed(self, id: str, folder: Path) -> None:
        """What a worker leaves of an audit whose files are in a folder."""
        self.backend.artifacts.put_tree(id, folder)
        found = json.loads((folder / "report.json").read_text())
        codes = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
        result = {name: found[name] for name in ("verdict", "headline", "reasons")}
        result["exit_code"] = codes[found["verdict"]]
        assert self.backend.jobs.finish(id, "worker", JobState.SUCCEEDED, result)


@contextlib.contextmanager
def running(configuration: Configuration) -> Iterator[Running]:
    server = Running(open_backend(configuration))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(without_tokens(tmp_path_factory.mktemp("client") / "data")) as server:
        yield server


@pytest.fixture
def server(_shared: Running) -> Running:
    for job in _shared.backend.jobs.list(limit=200):
        _shared.backend.jobs.request_cancel(job.id)
    _shared.backend.jobs.interrupt("worker")
    way = _shared.way
    way.seen.clear()
    way.away, way.cut, way.no_streams = 0, 0, False
    return _shared


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(server.url, patience=20) as found:
        yield found


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an audit that found a Clever Hans."""
    out = tmp_path_factory.mktemp("audited")
    reported(out, hans=True)
    return out


# What there is ----------------------------------------------------------------------------------------------------


def test_the_lists_are_records(client: Client) -> None:
    assert not client.ready()  # /readyz is BentoML's, which is not between
    assert STUDENT in [one.id for one in client.classifiers()]
    assert [one.id for one in client.datasets()] == ["portraits", "histology"]
    assert all(one.ready for one in client.priors())
    assert "torch" in [one.name for one in client.runtimes()]
    assert "pfungst_jobs" in client.metrics()


def test_a_folder_of_safetensors_is_uploaded_and_deleted(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for file in (WEIGHTS / "portraits" / "student").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04never sent")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.json").write_text("{}")
    sent = client.upload_classifier(folder)
    assert (sent.kind, sent.name, sent.labels) == ("uploaded", "mine", ("dark", "blond"))
    assert sent.id in [one.id for one in client.classifiers()]
    client.delete_classifier(sent.id)
    assert sent.id not in [one.id for one in client.classifiers()]
    with pytest.raises(RefusedError) as refused:
        client.delete_classifier(sent.id)
    assert (refused.value.status, refused.value.code) == (404, "not_found")


def test_a_data_set_is_uploaded_as_a_folder_or_as_a_zip_file(client: Client, tmp_path: Path) -> None:
    files = {f"{label}/{i}.png": png() for label in ("dark", "blond") for i in range(2)}
    for name, content in files.items():
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(content)
    (tmp_path / "set.zip").write_bytes(zip_of(files))
    for path in (tmp_path / "set", tmp_path / "set.zip"):
        sent = client.upload_dataset(path)
        assert (sent.kind, sent.name) == ("uploaded", path.name)
        client.delete_dataset(sent.id)


def test_what_is_packed_is_what_the_server_takes(tmp_path: Path) -> None:
    assert client_module.MODEL_FILES == uploads.ENDINGS
    assert set(client_module.DATA_FILES) == {*uploads.PICTURES, *uploads.TABLES}
    (tmp_path / "weights.bin").write_bytes(b"x")
    with (
        pytest.raises(InputError, match="none of the files that a server takes"),
        client_module.packed(tmp_path, client_module.MODEL_FILES),
    ):
        pass


# Work -------------------------------------------------------------------------------------------------------------


def test_a_picture_is_explained(client: Client, server: Running) -> None:
    found = client.explain(png(), STUDENT, k=2, seed=5, target="blond")
    assert (found.classifier, found.source, found.target, found.seed) == (STUDENT, "dark", "blond", 5)
    assert found.original == png()
    assert [one.image[:4] for one in found.counterfactuals] == [b"\x89PNG"] * 2
    assert isinstance(server.backend.explanations, Counted)


def test_a_submission_runs_once_although_it_is_sent_again(client: Client, server: Running) -> None:
    server.way.away = 2
    job = client.submit_audit(STUDENT, k=1)
    assert (job.state, job.request["dataset"], job.ended) == ("queued", "portraits", False)
    keys = {key for method, path, key in server.way.seen if (method, path) == ("POST", "/v1/audits")}
    assert server.way.count("POST", "/v1/audits") == 3
    assert len(keys) == 1 and None not in keys
    assert server.backend.jobs.counts()["queued"] == 1
    assert client.submit_audit(STUDENT, k=1).id != job.id
    mine = client.submit_audit(STUDENT, key="build-7")
    assert client.submit_audit(STUDENT, key="build-7").id == mine.id
    with pytest.raises(RefusedError) as conflict:
        client.submit_audit(STUDENT, key="build-7", k=2)
    assert conflict.value.code == "idempotency_conflict"


def test_nothing_else_is_sent_twice(client: Client, server: Running, tmp_path: Path) -> None:
    job = client.submit_audit(STUDENT)
    (tmp_path / "set.zip").write_bytes(zip_of({"a.png": png()}))
    calls = {
        "/v1/classifiers": lambda: client.register(STUDENT),
        "/v1/explain": lambda: client.explain(png(), STUDENT),
        "/v1/datasets/upload": lambda: client.upload_dataset(tmp_path / "set.zip"),
        f"/v1/audits/{job.id}/cancel": lambda: client.cancel(job),
    }
    for path, call in calls.items():
        server.way.away = 1
        with pytest.raises(FaultError, match="status 503"):
            call()
        assert server.way.count("POST", path) == 1
        assert server.way.away == 0
    server.way.away = 2
    assert client.job(job.id).state == "queued"
    assert server.way.count("GET", f"/v1/audits/{job.id}") == 3


def test_a_full_queue_is_said_at_once(client: Client, server: Running) -> None:
    for _ in range(int(LIMITS["queue"])):
        client.submit_audit(STUDENT)
    start = time.monotonic()
    with pytest.raises(FaultError) as full:
        client.submit_audit(STUDENT)
    assert full.value.code == "queue_full"
    assert time.monotonic() - start < 10


def test_a_refusal_says_all_that_the_server_said(client: Client) -> None:
    with pytest.raises(RefusedError) as refused:
        client.submit_audit("nobody", dataset="portraits")
    error = refused.value
    assert (error.status, error.code, error.field) == (422, "unknown_classifier", "classifier")
    assert str(error) == error.message == "There is no classifier 'nobody'; see /v1/classifiers."
    assert error.request_id
    assert isinstance(error, InputError)
    with pytest.raises(RefusedError, match="There is no such job"):
        client.job("0" * 32)
    with pytest.raises(RefusedError):
        client.job("../classifiers")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with Client("http://127.0.0.1:9", patience=0) as client:
        assert not client.ready()
        with pytest.raises(FaultError, match=r"The server http://127\.0\.0\.1:9 cannot be reached") as fault:
            client.classifiers()
    assert isinstance(fault.value, OSError)


@pytest.mark.parametrize(
    "server", ["", "127.0.0.1:3000", "ftp://h", "http://", "http://h:x", "http://u:p@h", "http://h/?a=1", "http://h h"]
)
def test_an_address_that_is_none(server: str) -> None:
    with pytest.raises(InputError, match="server"):
        server_address(server)


# Events -----------------------------------------------------------------------------------------------------------


def work(server: Running, id: str) -> threading.Thread:
    """A worker's life in a thread: claims, reports twice and ends."""

    def live() -> None:
        jobs = server.backend.jobs
        assert server.claim().id == id
        for done in (1, 2):
            time.sleep(0.3)
            progress = {"stage": "auditing", "done": done, "total": 2, "seconds_left": 1.0}
            jobs.beat(id, "worker", progress, advanced=True)
        time.sleep(1.2)  # longer than a poll, so that the last progress is seen by one
        jobs.finish(id, "worker", JobState.FAILED, None, {"code": "bad_input", "message": "It cannot be read."})

    thread = threading.Thread(target=live)
    thread.start()
    return thread


def states(events: list[Event]) -> list[str]:
    return [event.data["state"] for event in events if event.kind == "state"]


@pytest.mark.parametrize("cut", [0, 2], ids=["whole", "broken off twice"])
def test_events_come_once_and_in_order(client: Client, server: Running, cut: int) -> None:
    job = client.submit_audit(STUDENT)
    server.way.cut = cut
    thread = work(server, job.id)
    events = list(client.events(job))
    thread.join()
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert states(events) == ["queued", "running", "failed"]
    told = [event.progress for event in events if event.kind == "progress"]
    assert [(one.stage, one.done, one.total) for one in told] == [("auditing", 1, 2), ("auditing", 2, 2)]
    assert server.way.count("GET", f"/v1/audits/{job.id}/events") == 1 + cut


def test_where_no_stream_comes_through_the_job_is_polled(
    client: Client, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAUSES", (0.01,))
    server.way.no_streams = True
    job = client.submit_audit(STUDENT)
    thread = work(server, job.id)
    seen: list[Event] = []
    ended = client.wait(job, seen.append)
    thread.join()
    assert server.way.count("GET", f"/v1/audits/{job.id}/events") == client_module.BROKEN_STREAMS
    assert states(seen)[-1] == "failed"
    assert seen[-1].data["error"] == {"code": "bad_input", "message": "It cannot be read."}
    assert any(event.kind == "progress" and event.progress.done == 2 for event in seen)
    assert all(event.number is None for event in seen)
    assert ended.error is not None and ended.error.message == "It cannot be read."


def test_a_cut_off_event_is_left_out() -> None:
    lines = [
        "id: 3",
        "event: state",
        'data: {"state":',
        'data:  "running"}',
        "",
        ": still here",
        "",
        "id: 4",
        "data: {",
    ]
    assert list(read_events(iter(lines))) == [Event(number=3, kind="state", data={"state": "running"})]


# Tokens -----------------------------------------------------------------------------------------------------------


def test_a_token_comes_from_the_argument_or_the_environment_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [{"name": name, "sha256": token_hash(secret), "scopes": ["read"]} for name, secret in TOKENS.items()]
    secret = TOKENS["alice"]
    with running(Configuration(folder=tmp_path / "data", workers=0, limits=LIMITS, tokens=tokens)) as server:
        monkeypatch.delenv("PFUNGST_TOKEN", raising=False)
        with Client(server.url) as nobody, pytest.raises(RefusedError) as refused:
            nobody.classifiers()
        assert refused.value.status == 401
        with Client(server.url, token=secret) as alice:
            assert alice.classifiers()
            with pytest.raises(RefusedError) as scope:
                alice.submit_audit(STUDENT)
            assert scope.value.status == 403
            assert secret not in f"{scope.value!r}{alice!r}{vars(alice)}"
        monkeypatch.setenv("PFUNGST_TOKEN", secret)
        with Client(server.url) as from_environment:
            assert from_environment.classifiers()
        monkeypatch.setenv("PFUNGST_TOKEN", "two words\n")
        with pytest.raises(InputError) as bad:
            Client(server.url)
        assert "two" not in str(bad.value)


# pfungst audit --server -------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_audit_on_a_server_leaves_what_an_audit_here_leaves(
    server: Running, audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("limit: 0.3\nmax_images: 50\n")
    asked: list[dict[str, Any]] = []

    def live() -> None:
        job = server.claim()
        asked.append(job.request)
        server.backend.jobs.beat(job.id, "worker", {"stage": "auditing", "done": 1, "total": 2, "seconds_left": 1.0})
        server.succeed(job.id, audited)

    thread = threading.Thread(target=live)
    thread.start()
    out = tmp_path / "out"
    argv = ["audit", "--server", server.url, "--world", "portraits", "--seed", "3", "--policy", str(policy)]
    assert main([*argv, "--out", str(out)]) == 1
    thread.join()
    assert files(out) == files(audited)
    assert (asked[0]["classifier"], asked[0]["dataset"], asked[0]["k"], asked[0]["seed"]) == (
        STUDENT,
        "portraits",
        1,
        3,
    )
    assert (asked[0]["policy"]["limit"], asked[0]["policy"]["max_images"]) == (0.3, 50)
    report = json.loads((audited / "report.json").read_text())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"FAIL: {report['headline']}"
    assert lines[1 : 1 + len(report["reasons"])] == [f"  {reason}" for reason in report["reasons"]]
    assert lines[-1] == f"Open {(out / 'report.html').resolve()}"
    assert main([*argv, "--out", str(out)]) == 2
    assert "holds an audit already" in capsys.readouterr().err


def test_what_was_uploaded_for_an_audit_is_removed_after_it(
    server: Running, audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("dark", "blond"):
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "1.png").write_bytes(png())
    asked: list[dict[str, Any]] = []

    def live() -> None:
        job = server.claim()
        asked.append(job.request)
        server.succeed(job.id, audited)

    thread = threading.Thread(target=live)
    thread.start()
    model = WEIGHTS / "portraits" / "student"
    argv = ["audit", "--server", server.url, "--classifier", str(model), "--data", str(tmp_path / "set")]
    assert main([*argv, "--prior", "portraits", "--out", str(tmp_path / "out")]) == 1
    thread.join()
    assert len(asked[0]["classifier"]) == len(asked[0]["dataset"]) == 32
    assert asked[0]["prior"] == "portraits"
    with Client(server.url) as client:
        assert {one.kind for one in client.classifiers()} | {one.kind for one in client.datasets()} == {"embedded"}


@pytest.mark.parametrize(
    ("state", "error", "code", "line"),
    [
        (JobState.FAILED, {"code": "bad_model", "message": "One logit."}, 2, "pfungst: error: One logit.\n"),
        (JobState.FAILED, {"code": "internal", "message": "Inside."}, 4, "pfungst: error: Inside.\n"),
        (JobState.CANCELLED, None, 130, "pfungst: interrupted\n"),
    ],
)
def test_an_audit_that_ends_without_a_verdict(
    server: Running,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: JobState,
    error: dict[str, str] | None,
    code: int,
    line: str,
) -> None:
    thread = threading.Thread(
        target=lambda: server.backend.jobs.finish(server.claim().id, "worker", state, None, error)
    )
    thread.start()
    out = tmp_path / "out"
    assert main(["audit", "--server", server.url, "--world", "portraits", "--out", str(out)]) == code
    thread.join()
    assert capsys.readouterr().err.endswith(line)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--world", "portraits", "--recipe", "r.json"], "--recipe does not go with --server"),
        (["--world", "portraits", "--revision", "0" * 40], "--revision does not go with --server"),
        (["--world", "portraits", "--verdicts", "v.json"], "--verdicts does not go with --server"),
        (["--world", "portraits", "--split", "test"], "--split does not go with --server"),
        (["--world", "portraits", "--label-column", "y"], "--label-column does not go with --server"),
        (["--world", "portraits", "--max-memory", "1GiB"], "--max-memory does not go with --server"),
        (["--world", "portraits", "--artifacts", "a"], "--artifacts does not go with --server"),
        (["--world", "portraits", "--cache", "c"], "--cache does not go with --server"),
        (["--world", "portraits", "--runtime", "onnx"], "--runtime does not go with --server"),
        (["--world", "portraits", "--data", "d"], "--data does not go with --world"),
        (["--classifier", STUDENT], "--classifier needs --data"),
        (["--classifier", "nobody", "--data", "portraits"], "is no classifier of the server and no path here"),
        (["--classifier", STUDENT, "--data", "nothing"], "is no data set of the server and no path here"),
        (["--classifier", "pyproject.toml", "--data", "portraits"], "cannot be sent"),
        (["--classifier", STUDENT, "--data", "pyproject.toml"], "cannot be sent"),
        (["--world", "portraits", "--policy", "nowhere.yaml"], "The policy nowhere.yaml cannot be read"),
        (["--world", "portraits", "--k", "99"], "k"),
    ],
)
def test_what_makes_no_sense_with_a_server_is_refused(
    server: Running,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(ROOT)
    before = server.backend.jobs.counts()
    assert main(["audit", "--server", server.url, *options, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1
    assert server.backend.jobs.counts() == before
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_an_id_and_a_path_is_asked_about(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "portraits" / "student").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "--server", server.url, "--classifier", STUDENT, "--data", "portraits"]) == 2
    assert f"for that write {tmp_path / 'portraits' / 'student'}" in capsys.readouterr().err


def test_a_server_that_is_away_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_audit, "PATIENCE", 0.0)
    out = tmp_path / "out"
    assert main(["audit", "--server", "http://127.0.0.1:9", "--world", "portraits", "--out", str(out)]) == 4
    assert capsys.readouterr().err.startswith("pfungst: error: The server http://127.0.0.1:9 cannot be reached")
    assert main(["audit", "--server", "localhost", "--world", "portraits", "--out", str(out)]) == 2


def test_ctrl_c_cancels_the_job(server: Running, tmp_path: Path) -> None:
    argv = ["audit", "--server", server.url, "--world", "portraits", "--out", str(tmp_path / "out")]
    # A shell starts background jobs with SIGINT ignored, and a child inherits that from the tests.
    heard = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from service import cli; "
    command = [sys.executable, "-c", heard + "sys.exit(cli.main(sys.argv[1:]))", *argv]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stderr is not None
    try:
        job = server.claim(120)
        until = time.monotonic() + 60
        while not server.way.count("GET", f"/v1/audits/{job.id}/events"):
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        while not server.backend.jobs.get(job.id).cancel_requested:  # type: ignore[union-attr]
            assert time.monotonic() < until
            time.sleep(0.02)
        server.backend.jobs.finish(job.id, "worker", JobState.CANCELLED)
        assert process.wait(30) == 130
        assert process.stderr.read().endswith(b"pfungst: interrupted\n")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../escape", "/etc/x", "a/../../b", "a\\b"])
def test_names_that_leave_the_folder_are_not_unpacked(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.zip").write_bytes(zip_of({"good": b"1", name: b"2"}))
    with pytest.raises(FaultError, match="not a plain path"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert files(tmp_path).keys() == {"a.zip"}


def test_an_archive_that_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zip_of({"good": b"1" * 1000})[:-30])
    with pytest.raises(FaultError, match="cut short"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


# A walk through a served service ----------------------------------------------------------------------------------


POLICY = {"min_images": 8, "min_per_direction": 4, "max_images": 48, "min_evaluator_agreement": 0.8}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_serve_register_audit_fail_download_stop(tmp_path: Path) -> None:
    """The poisoned student is found out, and the data that repairs it comes home."""
    (tmp_path / "pfungst.yaml").write_text(
        "folder: data\nworkers: 1\nthreads: 1\nnice: 0\nsurrogate_steps: 60\nsurrogate_pictures: 400\n"
    )
    served = serve(tmp_path)
    try:
        walk(served, tmp_path)
    finally:
        took = end(served)
    assert took < 10
    with Client(str(served.client.base_url), patience=0) as client:
        assert not client.ready()


def walk(served: Served, folder: Path) -> None:
    with Client(str(served.client.base_url), patience=120) as client:
        assert client.ready()
        assert client.register(STUDENT).labels == ("dark", "blond")
        verdict = client.gate(STUDENT, policy=POLICY, k=1, steps=12, wait_seconds=0)
        assert (verdict.verdict, verdict.exit_code) == (None, None)
        audit: Job = client.wait(client.job(verdict.audit))
        assert audit.state == "succeeded", audit.error
        verdict = client.verdict(audit)
        report = client.result(audit)
        assert (verdict.verdict, verdict.exit_code) == ("FAIL", 1), json.dumps(report["directions"]) + str(
            report["prerequisites"]
        )
        assert report["lower"] > report["limit"]
        learned = client.wait(client.submit_cfkd(audit))
        assert learned.state == "succeeded", learned.error
        n = client.result(learned)["counterfactuals"]
        assert n >= report["n_images"] * report["limit"]
        client.download(learned, "dataset.zip", folder / "set.zip")
    with zipfile.ZipFile(folder / "set.zip") as packed:
        assert packed.testzip() is None
        names = packed.namelist()
        card = json.loads(packed.read("set/set.json"))
    assert card["counterfactuals"] == n == sum(name.startswith("set/by_label/") for name in names)
