"""The jobs of a service in one table, on SQLite or PostgreSQL, for any number of workers on any number of machines.

    queued ──→ running ──→ succeeded, failed, cancelled
      ↑           │
      └ interrupted ←─ the worker had to stop, or was lost

A worker claims a job, says at every heartbeat that it lives, and finishes it. One that falls silent loses its job to
the next that claims; from then on it can neither beat nor finish it. Each change of a job and its event are one
transaction. Times are UTC; on PostgreSQL they are the database's, since the clocks of machines differ.
"""

from __future__ import annotations

import builtins
import datetime
import errno
import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, OperationalError
from sqlalchemy.schema import CreateIndex, CreateTable

from engine.errors import InputError
from service.disk import database_is_full

__all__ = ["ConflictError", "Event", "Job", "JobState", "JobTable", "QueueFullError", "Signal"]

KINDS = ("audit", "cfkd")
SCHEMA = 1
LOCK = 1_907_1874  # any number that others do not lock by
BUSY_SECONDS = 20.0
MOST_LISTED = 1_000
MAX_KEY = 200
STALE_SECONDS = 30.0
MAX_ATTEMPTS = 5


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """Its worker had to stop; the next one that is free goes on with it."""

    @property
    def finished(self) -> bool:
        """Whether nothing will change any more."""
        return self in FINISHED


FINISHED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
WAITING = (JobState.QUEUED, JobState.INTERRUPTED)


class Signal(StrEnum):
    """What a heartbeat is answered."""

    CONTINUE = "continue"
    CANCEL = "cancel"
    """Somebody asked for the job to end."""
    LOST = "lost"
    """The job is another worker's now, or is gone."""


class ConflictError(InputError):
    """An idempotency key was used before, for another request."""


class QueueFullError(InputError):
    """So many jobs wait already that another one is refused."""


@dataclass(frozen=True)
class Job:
    """One row of the table."""

    id: str
    kind: str
    owner: str
    state: JobState
    request: dict[str, Any]
    progress: dict[str, Any]
    """stage, done, total and seconds_left, as far as they are known."""
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    """code and message."""
    attempts: int
    """Claims since the job last got further; workers that stopped in good order are not counted."""
    created: datetime.datetime
    started: datetime.datetime | None
    finished: datetime.datetime | None
    heartbeat: datetime.datetime | None
    cancel_requested: bool
    idempotency_key: str | None
    worker: str | None


@dataclass(frozen=True)
class Event:
    """One change of a job; numbers of a job count 1, 2, 3 … without gaps."""

    number: int
    time: datetime.datetime
    kind: str
    """state or progress."""
    data: dict[str, Any]


_metadata = sa.MetaData()
_schema = sa.Table("pfungst_schema", _metadata, sa.Column("version", sa.Integer, primary_key=True))
# Objects are stored as JSON text with sorted keys, so that equal requests are equal texts on every database.
_jobs = sa.Table(
    "pfungst_jobs",
    _metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("kind", sa.String(20), nullable=False),
    sa.Column("owner", sa.String(100), nullable=False),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("request", sa.Text, nullable=False),
    sa.Column("progress", sa.Text, nullable=False),
    sa.Column("result", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("created", sa.Double, nullable=False),
    sa.Column("started", sa.Double),
    sa.Column("finished", sa.Double),
    sa.Column("heartbeat", sa.Double),
    sa.Column("cancel_requested", sa.Boolean(create_constraint=False), nullable=False),
    sa.Column("idempotency_key", sa.String(MAX_KEY)),
    sa.Column("worker", sa.String(200)),
    sa.Column("last_event", sa.Integer, nullable=False),
    sa.UniqueConstraint("owner", "idempotency_key"),
)
_events = sa.Table(
    "pfungst_events",
    _metadata,
    sa.Column("job", sa.String(32), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("time", sa.Double, nullable=False),
    sa.Column("kind", sa.String(20), nullable=False),
    sa.Column("data", sa.Text, nullable=False),
)
_indexes = (
    sa.Index("pfungst_jobs_state", _jobs.c.state, _jobs.c.created),
    sa.Index("pfungst_jobs_owner", _jobs.c.owner, _jobs.c.created),
)


class JobTable:
    """The table at a SQLAlchemy URL; it is made where it is not there. Safe to use from many threads."""

    def __init__(
        self,
        url: str,
        *,
        stale_seconds: float = STALE_SECONDS,
        max_attempts: int = MAX_ATTEMPTS,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Opens the table; `clock` gives seconds since 1970 in place of the machine's or the database's."""
        self.stale_seconds, self.max_attempts, self._clock = stale_seconds, max_attempts, clock
        self._engine = _open(url)
        try:
            self._create()
        except BaseException:
            self._engine.dispose()
            raise

    def close(self) -> None:
        """Gives all connections back."""
        self._engine.dispose()

    # For those who ask ------------------------------------------------------------------------------------------

    def submit(
        self,
        kind: str,
        owner: str,
        request: dict[str, Any],
        idempotency_key: str | None = None,
        *,
        most_waiting: int | None = None,
    ) -> tuple[Job, bool]:
        """Queues a job; (job, whether it is new). The same key, owner and request give the job that is there already.

        A QueueFullError where `most_waiting` jobs wait: then nothing is stored.
        """
        if kind not in KINDS:
            raise InputError(f"There are jobs of the kind {' and '.join(KINDS)}, not {kind!r:.40}.")
        _check_key(idempotency_key)
        text = _dump(request)
        for last_try in (False, True):
            try:
                with self._writing() as connection:
                    known = self._same(connection, kind, owner, text, idempotency_key)
                    if known is not None:
                        return known, False
                    self._check_queue(connection, most_waiting)
                    return self._insert(connection, kind, owner, text, idempotency_key), True
            except IntegrityError:  # on PostgreSQL another submit of this key may have come in between
                if last_try:
                    raise
        raise AssertionError("unreachable")

    def get(self, id: str, owner: str | None = None) -> Job | None:
        """A job by its id; with an owner, only where it is theirs."""
        query = sa.select(_jobs).where(_jobs.c.id == id)
        if owner is not None:
            query = query.where(_jobs.c.owner == owner)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else _job(row)

    def list(
        self,
        owner: str | None = None,
        state: JobState | str | None = None,
        limit: int = 50,
        before: str | None = None,
        kind: str | None = None,
    ) -> list[Job]:
        """The newest jobs first; `before` is the id of the last job of the page before."""
        query = sa.select(_jobs).order_by(_jobs.c.created.desc(), _jobs.c.id.desc())
        if owner is not None:
            query = query.where(_jobs.c.owner == owner)
        if state is not None:
            query = query.where(_jobs.c.state == JobState(state).value)
        if kind is not None:
            query = query.where(_jobs.c.kind == kind)
        with self._reading() as connection:
            if before is not None:
                created = connection.execute(sa.select(_jobs.c.created).where(_jobs.c.id == before)).scalar()
                if created is None:
                    raise InputError(f"There is no job {before!r:.40} to list the jobs before.")
                place = sa.tuple_(_jobs.c.created, _jobs.c.id)
                query = query.where(place < sa.tuple_(sa.literal(created), sa.literal(before)))
            rows = connection.execute(query.limit(max(1, min(limit, MOST_LISTED)))).all()
        return [_job(row) for row in rows]

    def events(self, id: str, after: int = 0, limit: int = MOST_LISTED) -> builtins.list[Event]:
        """What happened to a job since the event number `after`, oldest first."""
        query = sa.select(_events).where(_events.c.job == id, _events.c.number > after)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(_events.c.number).limit(limit)).all()
        return [Event(row.number, _datetime(row.time), row.kind, json.loads(row.data)) for row in rows]

    def counts(self) -> dict[str, int]:
        """How many jobs are in each state."""
        query = sa.select(_jobs.c.state, sa.func.count()).group_by(_jobs.c.state)
        with self._reading() as connection:
            found = {state: int(n) for state, n in connection.execute(query).all()}
        return {state.value: found.get(state.value, 0) for state in JobState}

    def request_cancel(self, id: str) -> JobState | None:
        """Asks for a job to end and returns its state: what waits is cancelled now, what runs at its next step.

        A finished job stays as it is; None where there is no such job.
        """
        with self._writing() as connection:
            row = self._locked(connection, id)
            if row is None:
                return None
            state = JobState(row.state)
            if state in WAITING:
                self._set_state(connection, id, JobState.CANCELLED, cancel_requested=True)
                return JobState.CANCELLED
            if state is JobState.RUNNING and not row.cancel_requested:
                connection.execute(sa.update(_jobs).where(_jobs.c.id == id).values(cancel_requested=True))
                self._note(connection, id, "state", {"state": state.value, "cancel_requested": True})
            return state

    # For workers ------------------------------------------------------------------------------------------------

    def claim(self, worker: str) -> Job | None:
        """The oldest job that waits or whose worker fell silent, which is this worker's from now on; None without one.

        A job that lost `max_attempts` workers in a row without getting further has failed: it is not tried for ever.
        """
        while True:
            with self._writing() as connection:
                now = self._now(connection)
                silent = sa.and_(_jobs.c.state == JobState.RUNNING.value, _jobs.c.heartbeat < now - self.stale_seconds)
                waiting = _jobs.c.state.in_([state.value for state in WAITING])
                row = connection.execute(
                    sa.select(_jobs)
                    .where(sa.or_(waiting, silent))
                    .order_by(_jobs.c.created, _jobs.c.id)
                    .limit(1)
                    .with_for_update(skip_locked=True)  # SQLite has no such words: there the transaction is exclusive
                ).one_or_none()
                if row is None:
                    return None
                if row.cancel_requested:
                    self._set_state(connection, row.id, JobState.CANCELLED)
                    continue
                if row.attempts >= self.max_attempts:
                    self._set_state(connection, row.id, JobState.FAILED, error=_lost_too_often(row.attempts))
                    continue
                self._set_state(
                    connection,
                    row.id,
                    JobState.RUNNING,
                    worker=worker,
                    attempts=row.attempts + 1,
                    heartbeat=now,
                    started=row.started or now,
                )
                claimed = connection.execute(sa.select(_jobs).where(_jobs.c.id == row.id)).one()
            return _job(claimed)

    def beat(self, id: str, worker: str, progress: dict[str, Any] | None = None, *, advanced: bool = False) -> Signal:
        """Says that the worker lives and how far it is; the answer says whether to go on.

        `advanced` says that something was finished that no crash can take back: lost workers count anew from here.
        """
        with self._writing() as connection:
            row = self._locked(connection, id)
            if row is None or row.worker != worker or row.state != JobState.RUNNING.value:
                return Signal.LOST
            values: dict[str, Any] = {"heartbeat": self._now(connection)}
            if advanced:
                values["attempts"] = 1
            if progress is not None and (text := _dump(progress)) != row.progress:
                values["progress"] = text
                self._note(connection, id, "progress", progress)
            connection.execute(sa.update(_jobs).where(_jobs.c.id == id).values(**values))
        return Signal.CANCEL if row.cancel_requested else Signal.CONTINUE

    def finish(
        self,
        id: str,
        worker: str,
        state: JobState,
        result: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> bool:
        """Ends a job, or with INTERRUPTED hands it back; False where it is no longer this worker's."""
        if state in (JobState.QUEUED, JobState.RUNNING):
            raise ValueError(f"a job does not end {state}")
        with self._writing() as connection:
            row = self._locked(connection, id)
            if row is None or row.worker != worker or row.state != JobState.RUNNING.value:
                return False
            self._set_state(connection, id, state, result=result, error=error)
        return True

    def interrupt(self, worker: str, *, lost: bool = False) -> builtins.list[str]:
        """Hands back what a worker is at; ids of those jobs. `lost` says that it died: then it counts as an attempt."""
        with self._writing() as connection:
            query = sa.select(_jobs).where(_jobs.c.worker == worker, _jobs.c.state == JobState.RUNNING.value)
            rows = connection.execute(query.with_for_update()).all()
            for row in rows:
                attempts = row.attempts if lost else max(0, row.attempts - 1)
                state = JobState.CANCELLED if row.cancel_requested else JobState.INTERRUPTED
                self._set_state(connection, row.id, state, attempts=attempts)
        return [row.id for row in rows]

    def expire(self, before: datetime.datetime) -> builtins.list[str]:
        """Forgets jobs that finished before a time; ids of those jobs, whose artifacts can go too."""
        finished = _jobs.c.state.in_([state.value for state in FINISHED])
        with self._writing() as connection:
            query = sa.select(_jobs.c.id).where(finished, _jobs.c.finished < _seconds(before))
            ids = list(connection.execute(query.with_for_update(skip_locked=True)).scalars())
            for id in ids:
                connection.execute(sa.delete(_events).where(_events.c.job == id))
                connection.execute(sa.delete(_jobs).where(_jobs.c.id == id))
        return ids

    # Inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except OperationalError as error:
            if not database_is_full(error.orig):
                raise
            raise OSError(errno.ENOSPC, "The job table's disk is full") from error

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._engine.connect().execution_options(reading=True) as connection:
            yield connection

    def _now(self, connection: sa.Connection) -> float:
        if self._clock is not None:
            return self._clock()
        if connection.dialect.name == "postgresql":
            return float(connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
        return time.time()

    def _create(self) -> None:
        with self._engine.begin() as connection:
            if connection.dialect.name == "postgresql":  # IF NOT EXISTS alone does not keep two creators apart there
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
            for table in _metadata.sorted_tables:
                connection.execute(CreateTable(table, if_not_exists=True))
            for index in _indexes:
                connection.execute(CreateIndex(index, if_not_exists=True))
            version = connection.execute(sa.select(_schema.c.version)).scalar()
            if version is None:
                connection.execute(sa.insert(_schema).values(version=SCHEMA))
            elif version != SCHEMA:
                raise InputError(
                    f"The job table is of version {version}, but this is version {SCHEMA}; name another database."
                )

    def _same(self, connection: sa.Connection, kind: str, owner: str, text: str, key: str | None) -> Job | None:
        """The job that this key made; a ConflictError where it was asked for something else."""
        if key is None:
            return None
        query = sa.select(_jobs).where(_jobs.c.owner == owner, _jobs.c.idempotency_key == key)
        row = connection.execute(query).one_or_none()
        if row is None:
            return None
        if (row.kind, row.request) != (kind, text):
            raise ConflictError("This idempotency key was used for another request; choose a new one.")
        return _job(row)

    def _check_queue(self, connection: sa.Connection, most: int | None) -> None:
        if most is None:
            return
        waiting = _jobs.c.state.in_([state.value for state in WAITING])
        n = connection.execute(sa.select(sa.func.count()).select_from(_jobs).where(waiting)).scalar_one()
        if n >= most:
            raise QueueFullError(f"{n} jobs wait already; try again later.")

    def _insert(self, connection: sa.Connection, kind: str, owner: str, text: str, key: str | None) -> Job:
        id = uuid.uuid4().hex
        connection.execute(
            sa.insert(_jobs).values(
                id=id,
                kind=kind,
                owner=owner,
                state=JobState.QUEUED.value,
                request=text,
                progress="{}",
                attempts=0,
                created=self._now(connection),
                cancel_requested=False,
                idempotency_key=key,
                last_event=0,
            )
        )
        self._note(connection, id, "state", {"state": JobState.QUEUED.value})
        return _job(connection.execute(sa.select(_jobs).where(_jobs.c.id == id)).one())

    def _locked(self, connection: sa.Connection, id: str) -> Any:
        """A row that nobody else changes before this transaction ends."""
        return connection.execute(sa.select(_jobs).where(_jobs.c.id == id).with_for_update()).one_or_none()

    def _set_state(self, connection: sa.Connection, id: str, state: JobState, **values: Any) -> None:
        """Moves a job and notes it; only a running job has a worker."""
        for name in ("result", "error"):
            if name in values:
                values[name] = None if values[name] is None else _dump(values[name])
        if state is not JobState.RUNNING:
            values["worker"] = None
        if state.finished:
            values["finished"] = self._now(connection)
        connection.execute(sa.update(_jobs).where(_jobs.c.id == id).values(state=state.value, **values))
        error = json.loads(values["error"]) if values.get("error") else None
        self._note(connection, id, "state", {"state": state.value} | ({} if error is None else {"error": error}))

    def _note(self, connection: sa.Connection, id: str, kind: str, data: dict[str, Any]) -> None:
        """Appends an event. Counting in the job's own row keeps the numbers in the order of the commits."""
        counted = sa.update(_jobs).where(_jobs.c.id == id).values(last_event=_jobs.c.last_event + 1)
        number = connection.execute(counted.returning(_jobs.c.last_event)).scalar_one()
        now = self._now(connection)
        connection.execute(sa.insert(_events).values(job=id, number=number, time=now, kind=kind, data=_dump(data)))


def _open(url: str) -> sa.Engine:
    """An engine whose transactions are exclusive on SQLite from their first statement, but for those that only read."""
    try:
        parsed = sa.make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise InputError("Jobs are kept in SQLite or PostgreSQL; name such a database.")
        if parsed.get_backend_name() == "sqlite":
            return _open_sqlite(parsed)
        return sa.create_engine(parsed, pool_pre_ping=True)
    except (ArgumentError, NoSuchModuleError, ImportError):
        raise InputError("The database's URL cannot be used; it is like postgresql+psycopg://user@host/name.") from None


def _open_sqlite(url: sa.URL) -> sa.Engine:
    if not url.database or url.database == ":memory:":
        raise InputError("Jobs in memory would be another table for each worker; name a file: sqlite:///jobs.sqlite")
    Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS})

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions begin where this module says so, not where the driver guesses
        # Readers do not wait for the writer. The mode is kept in the file; asking first spares a lock.
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode=WAL")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A transaction that reads first and writes later would fail where another wrote in between: lock at once.
        reading = connection.get_execution_options().get("reading", False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    return engine


def _job(row: Any) -> Job:
    return Job(
        id=row.id,
        kind=row.kind,
        owner=row.owner,
        state=JobState(row.state),
        request=json.loads(row.request),
        progress=json.loads(row.progress),
        result=None if row.result is None else json.loads(row.result),
        error=None if row.error is None else json.loads(row.error),
        attempts=row.attempts,
        created=_datetime(row.created),
        started=None if row.started is None else _datetime(row.started),
        finished=None if row.finished is None else _datetime(row.finished),
        heartbeat=None if row.heartbeat is None else _datetime(row.heartbeat),
        cancel_requested=bool(row.cancel_requested),
        idempotency_key=row.idempotency_key,
        worker=row.worker,
    )


def _lost_too_often(attempts: int) -> dict[str, str]:
    return {
        "code": "worker_lost",
        "message": f"{attempts} workers in a row were lost with this job and finished nothing of it; it may need more "
        "memory than a worker has.",
    }


def _check_key(key: str | None) -> None:
    if key is not None and not (1 <= len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        raise InputError(f"An idempotency key has 1 to {MAX_KEY} printable ASCII characters.")


def _dump(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"A job holds JSON alone: {error}.") from None


def _datetime(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _seconds(moment: datetime.datetime) -> float:
    if moment.tzinfo is None:
        raise ValueError("a time has to say its zone")
    return moment.timestamp()
