"""A client of the service: what its addresses take and give, as functions and records.

    with Client("http://127.0.0.1:3000") as client:
        job = client.submit_audit("portraits/student", policy={"max_images": 60})
        for event in client.events(job):
            print(event.kind, event.data)
        print(client.verdict(job).verdict)

What only reads is asked again while the server is away, for `patience` seconds. A submission carries an idempotency
key, so it is asked again too, and still runs once. Nothing else is ever sent twice.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
import shutil
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import InputError

__all__ = [
    "Classifier",
    "Client",
    "Dataset",
    "Event",
    "Explanation",
    "FaultError",
    "Job",
    "Prior",
    "Progress",
    "RefusedError",
    "Runtime",
    "ServiceError",
    "Verdict",
    "unpack",
]

VARIABLE = "PFUNGST_TOKEN"
TIMEOUT = 30.0
OPENING_SECONDS = 600.0
"""A server that opens its first model loads the libraries for it, too."""
PATIENCE = 30.0
PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds before a question is asked again; the last one repeats."""
POLL_SECONDS = 1.0
SILENCE_SECONDS = 60.0
"""The server says at least every 15 s that a stream of events lives."""
BROKEN_STREAMS = 3
"""Streams in a row that brought nothing; then the way to the server lets none through, and it is polled."""
CHUNK = 1 << 18
AWAY = (502, 503, 504)
MODEL_FILES = (".safetensors", ".json", ".txt", ".md")
DATA_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".csv", ".parquet", ".txt", ".json", ".md")
"""What of a folder is sent; the server refuses archives that hold anything else."""

Collection = Literal["audits", "cfkd"]
R = TypeVar("R", bound="_Answer")


# Errors ----------------------------------------------------------------------------------------------------------


class ServiceError(Exception):
    """What a server answered instead of what was asked for; `code` is a stable word, `message` one sentence."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        status: int | None = None,
        field: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.status = message, code, status
        self.field, self.request_id = field, request_id

    def __str__(self) -> str:
        return self.message


class RefusedError(ServiceError, InputError):
    """The server does not do what it was asked: the request, or what it names, has to change."""


class FaultError(ServiceError, OSError):
    """The server cannot be reached, or something went wrong inside it: the same request may work another time."""


# Answers ---------------------------------------------------------------------------------------------------------


class _Answer(BaseModel):
    # A later server may say more than this client knows.
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class Classifier(_Answer):
    """A classifier that requests can name."""

    id: str
    kind: str
    name: str
    labels: tuple[str, ...] | None = None
    size: tuple[int, ...] | None = None
    sha256: str | None = None
    created: datetime.datetime | None = None


class Dataset(_Answer):
    """A data set that requests can name."""

    id: str
    kind: str
    name: str
    created: datetime.datetime | None = None


class Prior(_Answer):
    """A generative prior that requests can name."""

    name: str
    kind: str
    ready: bool
    loaded: bool


class Runtime(_Answer):
    """What the server's networks can run on."""

    name: str
    ready: bool
    version: str | None
    detail: str


class Progress(_Answer):
    """How far a job is; None is not known."""

    stage: str | None = None
    done: int | None = None
    total: int | None = None
    seconds_left: float | None = None


class Failure(_Answer):
    """Why a job failed."""

    code: str
    message: str


class Job(_Answer):
    """An audit or a cfkd job."""

    id: str
    kind: Literal["audit", "cfkd"]
    state: str
    progress: Progress
    error: Failure | None
    cancel_requested: bool
    created: datetime.datetime
    started: datetime.datetime | None
    finished: datetime.datetime | None
    request: dict[str, Any]
    links: dict[str, str]

    @property
    def collection(self) -> Collection:
        """Where it is on the server."""
        return "audits" if self.kind == "audit" else "cfkd"

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("succeeded", "failed", "cancelled")


class Event(_Answer):
    """A change of a job. Events that were polled have no number."""

    number: int | None
    kind: str
    """state or progress."""
    data: dict[str, Any]

    @property
    def progress(self) -> Progress:
        """What an event of the kind progress says."""
        return Progress.model_validate(self.data)


class Verdict(_Answer):
    """What a pipeline branches on."""

    audit: str
    state: str
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"] | None
    exit_code: int | None
    headline: str | None
    reasons: tuple[str, ...]
    error: Failure | None
    progress: Progress


class Counterfactual(_Answer):
    """One counterfactual; pictures are PNG files."""

    flipped: bool
    evaluator_flipped: bool
    target_probability: float
    edited_area: float
    image: bytes
    mask: bytes


class Explanation(_Answer):
    """Counterfactuals of one image."""

    classifier: str
    prior: str
    source: str
    target: str
    source_probability: float
    original: bytes
    counterfactuals: tuple[Counterfactual, ...]
    seed: int
    recipe: dict[str, Any]
    hashes: dict[str, str]


# The client ------------------------------------------------------------------------------------------------------


class Client:
    """A connection to one server. Every method is one request, but for `events` and `wait`."""

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
    ) -> None:
        """`token` is the secret that the operator gave, or else PFUNGST_TOKEN; it is sent to this server alone."""
        address = server_address(server)
        secret = token if token is not None else os.environ.get(VARIABLE)
        headers = {"Accept": "application/json"} | _authorization(secret)
        self.server, self.patience = address, patience
        # Redirects are not followed, so the token goes nowhere else; a proxy is no way to this machine itself.
        self._http = httpx.Client(
            base_url=address, headers=headers, timeout=timeout, trust_env=not _is_loopback(address)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._http.close()

    # What there is

    def ready(self) -> bool:
        """Whether the server takes work now; False too where it cannot be reached."""
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def classifiers(self) -> list[Classifier]:
        """All classifiers that can be named."""
        return _listed(Classifier, self._ask("GET", "/v1/classifiers"), "classifiers")

    def datasets(self) -> list[Dataset]:
        """All data sets that can be named."""
        return _listed(Dataset, self._ask("GET", "/v1/datasets"), "datasets")

    def priors(self) -> list[Prior]:
        """All priors that can be named."""
        return _listed(Prior, self._ask("GET", "/v1/priors"), "priors")

    def runtimes(self) -> list[Runtime]:
        """What the server's networks can run on."""
        return _listed(Runtime, self._ask("GET", "/v1/runtimes"), "runtimes")

    def metrics(self) -> str:
        """Prometheus' text."""
        return self._ask("GET", "/metrics").text

    def register(self, source: str) -> Classifier:
        """Has the server open and ask a classifier of its configuration; needs the scope admin."""
        return _read(Classifier, self._ask("POST", "/v1/classifiers", json={"source": source}, timeout=OPENING_SECONDS))

    def upload_classifier(self, path: Path, name: str | None = None) -> Classifier:
        """Sends an ONNX file, with what model.json says beside it, or a Hugging Face folder of safetensors."""
        form = {"name": name or path.name}
        if path.is_dir():
            with packed(path, MODEL_FILES) as archive:
                return _read(Classifier, self._send("/v1/classifiers/upload", form, archive))
        stated = path.with_suffix(".json")
        if stated.is_file():
            form["settings"] = stated.read_text(encoding="utf-8")
        with path.open("rb") as file:
            return _read(Classifier, self._send("/v1/classifiers/upload", form, file))

    def delete_classifier(self, id: str) -> None:
        """Removes an upload."""
        self._ask("DELETE", f"/v1/classifiers/{_part(id)}")

    def upload_dataset(self, path: Path, name: str | None = None) -> Dataset:
        """Sends a zip file, or a folder as one: pictures with manifest.csv, or in folders named by class."""
        form = {"name": name or path.name}
        if path.is_dir():
            with packed(path, DATA_FILES) as archive:
                return _read(Dataset, self._send("/v1/datasets/upload", form, archive))
        with path.open("rb") as file:
            return _read(Dataset, self._send("/v1/datasets/upload", form, file))

    def delete_dataset(self, id: str) -> None:
        """Removes an upload."""
        self._ask("DELETE", f"/v1/datasets/{_part(id)}")

    # Work

    def explain(self, image: bytes | Path, classifier: str, *, timeout: float = 120.0, **settings: Any) -> Explanation:
        """Counterfactuals of one picture; `settings` are prior, target, k, steps and seed."""
        content = image.read_bytes() if isinstance(image, Path) else image
        body = {
            "classifier": classifier,
            "image": base64.b64encode(content).decode(),
            "timeout_seconds": timeout,
            **settings,
        }
        answer = self._ask("POST", "/v1/explain", json=body, timeout=timeout + TIMEOUT)
        return _read(Explanation, answer, _with_pictures)

    def submit_audit(self, classifier: str, *, key: str | None = None, **request: Any) -> Job:
        """Queues an audit; `request` is dataset, prior, teacher, policy, k, steps, batch and seed. A key of your own
        makes a later call with the same request find the same job."""
        return _read(Job, self._submit("/v1/audits", {"classifier": classifier, **request}, key))

    def gate(self, classifier: str, *, wait_seconds: float = 0.0, key: str | None = None, **request: Any) -> Verdict:
        """Queues an audit and waits for its verdict, which is None if it took longer."""
        body = {"classifier": classifier, "wait_seconds": wait_seconds, **request}
        return _read(Verdict, self._submit("/v1/gate", body, key, timeout=wait_seconds + TIMEOUT))

    def verdict(self, audit: Job | str, wait_seconds: float = 0.0) -> Verdict:
        """The verdict of an audit, waited for so long."""
        id = audit if isinstance(audit, str) else audit.id
        answer = self._ask(
            "GET", f"/v1/gate/{_part(id)}", params={"wait_seconds": wait_seconds}, timeout=wait_seconds + TIMEOUT
        )
        return _read(Verdict, answer)

    def submit_cfkd(self, audit: Job | str, *, key: str | None = None, **request: Any) -> Job:
        """Queues the debiasing set of an audit, and with finetune=True the repair."""
        id = audit if isinstance(audit, str) else audit.id
        return _read(Job, self._submit("/v1/cfkd", {"audit": id, **request}, key))

    # Jobs

    def job(self, id: str, collection: Collection = "audits") -> Job:
        """A job as it is now."""
        return _read(Job, self._ask("GET", f"/v1/{collection}/{_part(id)}"))

    def jobs(
        self,
        collection: Collection = "audits",
        *,
        state: str | None = None,
        limit: int = 50,
        before: str | None = None,
    ) -> list[Job]:
        """Your jobs, the newest first; `before` is the id of the last one of the page before."""
        asked = {"state": state, "limit": limit, "before": before}
        params = {name: value for name, value in asked.items() if value is not None}
        return _listed(Job, self._ask("GET", f"/v1/{collection}", params=params), "jobs")

    def cancel(self, job: Job) -> Job:
        """Ends a job: at once where it waits, at its next step where it runs. RefusedError where it had ended."""
        return _read(Job, self._ask("POST", f"/v1/{job.collection}/{job.id}/cancel"))

    def events(self, job: Job, after: int = 0) -> Iterator[Event]:
        """Every change of a job until it has ended; over a way that lets no stream through, those that polling sees."""
        broken = 0
        while broken < BROKEN_STREAMS:
            try:
                for event in self._stream(job, after):
                    after, broken = event.number or after, 0
                    yield event
            except (httpx.TransportError, _NoStream):
                broken += 1
                time.sleep(PAUSES[min(broken, len(PAUSES)) - 1])
                continue
            # A stream ends with its job, or with a server that has to go; then the next one goes on with the job.
            if self.job(job.id, job.collection).ended:
                return
            time.sleep(PAUSES[0])
        yield from self._polled(job)

    def wait(self, job: Job, watch: Callable[[Event], None] | None = None) -> Job:
        """The job when it has ended; `watch` is told every event."""
        for event in self.events(job):
            if watch is not None:
                watch(event)
        return self.job(job.id, job.collection)

    def result(self, job: Job) -> dict[str, Any]:
        """report.json of an audit, or what a cfkd job found."""
        found: dict[str, Any] = self._ask("GET", f"/v1/{job.collection}/{job.id}/result").json()
        return found

    def download(self, job: Job, part: str, file: Path) -> None:
        """Writes a part of a job that succeeded into a file: report.html, junit.xml, summary.md or archive.zip of an
        audit; dataset.zip or classifier.zip of a cfkd job."""
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
        try:
            self._patiently(lambda: self._save(f"/v1/{job.collection}/{job.id}/{part}", temporary))
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    # Inside

    def _stream(self, job: Job, after: int) -> Iterator[Event]:
        """One stream of server-sent events."""
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_SECONDS)
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        address = f"/v1/{job.collection}/{job.id}/events"
        with self._http.stream("GET", address, headers=headers, timeout=timeout) as answer:
            if answer.status_code in AWAY:
                raise _NoStream
            _check(answer)
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise _NoStream
            yield from read_events(answer.iter_lines())

    def _polled(self, job: Job) -> Iterator[Event]:
        """State and progress as they change between two looks."""
        state, progress = None, None
        while True:
            now = self.job(job.id, job.collection)
            if now.progress != progress and now.progress.stage is not None:
                progress = now.progress
                yield Event(number=None, kind="progress", data=progress.model_dump())
            if now.state != state:
                state = now.state
                error = {} if now.error is None else {"error": now.error.model_dump()}
                yield Event(number=None, kind="state", data={"state": state} | error)
            if now.ended:
                return
            time.sleep(POLL_SECONDS)

    def _submit(self, address: str, body: dict[str, Any], key: str | None, **options: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return self._patiently(lambda: self._once("POST", address, json=body, headers=headers, **options))

    def _send(self, address: str, form: Mapping[str, str], file: IO[bytes]) -> httpx.Response:
        """One file with its form; the name that it has here stays here."""
        return self._once(
            "POST",
            address,
            data=dict(form),
            files={"file": ("upload", file, "application/octet-stream")},
            timeout=OPENING_SECONDS,
        )

    def _ask(self, method: str, address: str, **options: Any) -> httpx.Response:
        if method == "GET":
            return self._patiently(lambda: self._once(method, address, **options))
        return self._once(method, address, **options)

    def _once(self, method: str, address: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, address, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        _check(answer)
        return answer

    def _save(self, address: str, file: Path) -> None:
        try:
            with self._http.stream("GET", address) as answer, file.open("wb") as sink:
                _check(answer)
                for part in answer.iter_bytes(CHUNK):
                    sink.write(part)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        """Asks again while the server is away."""
        until, turn = time.monotonic() + self.patience, 0
        while True:
            try:
                return ask()
            except FaultError as error:
                pause = PAUSES[min(turn, len(PAUSES) - 1)]
                # A full queue is said with 503 too, by a server that is there.
                away = error.status is None or (error.status in AWAY and error.code not in ("queue_full", "timeout"))
                if not away or time.monotonic() + pause > until:
                    raise
                turn += 1
                time.sleep(pause)

    def _unreachable(self, error: httpx.TransportError) -> FaultError:
        late = isinstance(error, httpx.TimeoutException)
        what = "did not answer in time" if late else "cannot be reached"
        return FaultError(f"The server {self.server} {what}; is it running?", code="timeout" if late else "unreachable")


class _NoStream(Exception):
    """What should be a stream of events is something else."""


def server_address(server: str) -> str:
    """An http or https address without its last slash; an InputError says what is wrong with any other."""
    try:
        parts = urlsplit(server)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known or not server.isprintable() or " " in server:
        raise InputError("The server has to be an address such as http://127.0.0.1:3000.")
    if parts.username is not None or parts.password is not None:
        raise InputError(f"The server's address holds a user or password; give the token in {VARIABLE} instead.")
    if parts.query or parts.fragment:
        raise InputError("The server's address ends with its path; leave out what follows ? or #.")
    return server.rstrip("/")


def read_events(lines: Iterator[str]) -> Iterator[Event]:
    """Server-sent events of a stream's lines; an event that is cut off is left out."""
    number: int | None = None
    kind, data = "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield Event(number=number, kind=kind, data=json.loads("\n".join(data)))
            kind, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id" and value.isascii() and value.isdigit():
            number = int(value)
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)


@contextmanager
def packed(folder: Path, endings: tuple[str, ...]) -> Iterator[IO[bytes]]:
    """A folder's files of these endings as a zip file that is gone afterwards; hidden ones are left out."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and file.suffix.lower() in endings
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise InputError(f"{folder} holds none of the files that a server takes: {', '.join(endings)}.")
    with tempfile.TemporaryFile() as archive:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as target:
            for file in files:
                entry = zipfile.ZipInfo(file.relative_to(folder).as_posix(), (1980, 1, 1, 0, 0, 0))
                entry.external_attr = 0o644 << 16
                with file.open("rb") as source, target.open(entry, "w", force_zip64=True) as sink:
                    shutil.copyfileobj(source, sink, CHUNK)
        archive.seek(0)
        yield archive


def unpack(archive: Path, folder: Path, last: tuple[str, ...] = ()) -> list[str]:
    """Unpacks what a server sent into a folder; names of the files. Each appears whole, those of `last` at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as opened:
            names = opened.namelist()
            for name in names:
                parts = PurePosixPath(name).parts
                if not parts or name.startswith("/") or "\\" in name or ".." in parts:
                    raise FaultError(f"The server sent the file name {name!r:.80}, which is not a plain path.")
            for name in sorted(names, key=lambda name: (name in last, name)):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(f".{target.name}.part")
                with opened.open(name) as source, temporary.open("wb") as sink:
                    shutil.copyfileobj(source, sink, CHUNK)
                temporary.replace(target)
            return names
    except zipfile.BadZipFile:
        raise FaultError("The server sent an archive that is cut short or damaged.") from None


# Inside ----------------------------------------------------------------------------------------------------------


def _authorization(token: str | None) -> dict[str, str]:
    if not token:
        return {}
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(f"The token in {VARIABLE} holds blanks or characters that a header cannot carry.")
    return {"Authorization": f"Bearer {token}"}


def _part(id: str) -> str:
    """An id as one part of an address, whatever it holds."""
    return quote(id, safe="")


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check(answer: httpx.Response) -> None:
    """The error of an answer that is none."""
    status = answer.status_code
    if 200 <= status < 300:
        return
    try:
        answer.read()
        problem = answer.json()["error"]
        message, code = str(problem["message"]), str(problem["code"])
        field = None if problem.get("field") is None else str(problem["field"])
    except (ValueError, KeyError, TypeError):
        # A proxy, or no Pfungst at all.
        message, code, field = f"The server answered with status {status} and no reason.", "", None
    kind = RefusedError if 300 <= status < 500 else FaultError
    raise kind(message, code=code, status=status, field=field, request_id=answer.headers.get("x-request-id"))


def _read(kind: type[R], answer: httpx.Response, change: Callable[[Any], Any] = lambda found: found) -> R:
    try:
        return kind.model_validate(change(answer.json()))
    except (ValidationError, ValueError, KeyError, TypeError):
        raise FaultError(f"The server's answer is no {kind.__name__.lower()}; is it a Pfungst service?") from None


def _listed(kind: type[R], answer: httpx.Response, name: str) -> list[R]:
    try:
        return [kind.model_validate(one) for one in answer.json()[name]]
    except (ValidationError, ValueError, KeyError, TypeError):
        raise FaultError(f"The server's answer lists no {name}; is it a Pfungst service?") from None


def _with_pictures(found: dict[str, Any]) -> dict[str, Any]:
    def decoded(record: dict[str, Any], *names: str) -> dict[str, Any]:
        return record | {name: base64.b64decode(record[name], validate=True) for name in names}

    counterfactuals = [decoded(one, "image", "mask") for one in found["counterfactuals"]]
    return decoded(found, "original") | {"counterfactuals": counterfactuals}
