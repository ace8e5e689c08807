"""The job table on SQLite, and on PostgreSQL where PFUNGST_TEST_POSTGRES names a database that may be emptied."""

import datetime
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import sqlalchemy as sa

from engine.errors import InputError
from service.jobs import ConflictError, Job, JobState, JobTable, QueueFullError, Signal

POSTGRES = os.environ.get("PFUNGST_TEST_POSTGRES")
TABLES = ("pfungst_events", "pfungst_jobs", "pfungst_schema")


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param(
            "postgresql", marks=pytest.mark.skipif(not POSTGRES, reason="PFUNGST_TEST_POSTGRES names no database")
        ),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    assert POSTGRES is not None
    engine = sa.create_engine(POSTGRES)
    with engine.begin() as connection:
        for table in TABLES:
            connection.execute(sa.text(f"DROP TABLE IF EXISTS {table}"))
    engine.dispose()
    return POSTGRES


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(url: str, clock: Clock) -> Iterator[JobTable]:
    table = JobTable(url, stale_seconds=30, max_attempts=3, clock=clock)
    yield table
    table.close()


def submit(table: JobTable, owner: str = "ann", **request: object) -> Job:
    return table.submit("audit", owner, dict(request))[0]


def must(job: Job | None) -> Job:
    assert job is not None
    return job


def states(table: JobTable, id: str) -> list[str]:
    return [event.data["state"] for event in table.events(id, 0) if event.kind == "state"]


def test_a_job_lives_from_queue_to_result(table: JobTable) -> None:
    job, new = table.submit("audit", "ann", {"classifier": "portraits/student", "limit": 0.2})
    assert new
    assert (job.state, job.attempts, job.progress, job.worker) == (JobState.QUEUED, 0, {}, None)
    assert job.created.tzinfo is datetime.UTC
    claimed = must(table.claim("w1"))
    assert (claimed.id, claimed.state, claimed.worker, claimed.attempts) == (job.id, JobState.RUNNING, "w1", 1)
    assert claimed.started is not None and claimed.started > job.created
    assert table.claim("w2") is None
    assert (
        table.beat(job.id, "w1", {"stage": "auditing", "done": 3, "total": 9, "seconds_left": 1.5}) is Signal.CONTINUE
    )
    assert must(table.get(job.id)).progress["done"] == 3
    assert table.finish(job.id, "w1", JobState.SUCCEEDED, {"verdict": "FAIL", "text": "dark → blond"})
    ended = must(table.get(job.id))
    assert (ended.state, ended.result, ended.error) == (
        JobState.SUCCEEDED,
        {"verdict": "FAIL", "text": "dark → blond"},
        None,
    )
    assert ended.finished is not None and ended.worker is None
    assert ended.request == {"classifier": "portraits/student", "limit": 0.2}
    assert states(table, job.id) == ["queued", "running", "succeeded"]


def test_the_same_key_and_request_give_the_same_job(table: JobTable) -> None:
    first, new = table.submit("audit", "ann", {"a": 1, "b": [2]}, "key")
    again, newer = table.submit("audit", "ann", {"b": [2], "a": 1}, "key")
    assert (first.id, new, newer) == (again.id, True, False)
    with pytest.raises(ConflictError, match="another request"):
        table.submit("audit", "ann", {"a": 2}, "key")
    with pytest.raises(ConflictError, match="another request"):
        table.submit("cfkd", "ann", {"a": 1, "b": [2]}, "key")
    assert table.submit("audit", "bob", {"a": 2}, "key")[1]  # keys are an owner's own
    assert table.submit("audit", "ann", {"a": 1})[1]
    assert table.submit("audit", "ann", {"a": 1})[1]  # without a key each is new
    assert table.counts()["queued"] == 4


def test_submits_with_one_key_at_one_time_make_one_job(url: str, table: JobTable) -> None:
    ready = threading.Barrier(8)

    def one(_: int) -> tuple[Job, bool]:
        ready.wait()
        return table.submit("audit", "ann", {"a": 1}, "key")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    assert len({job.id for job, _ in found}) == 1
    assert [new for _, new in found].count(True) == 1


@pytest.mark.parametrize("key", ["", "x" * 201, "a\nb", "a\x00b", "ü"])
def test_a_key_that_a_header_could_not_carry_is_refused(table: JobTable, key: str) -> None:
    with pytest.raises(InputError, match="printable ASCII"):
        table.submit("audit", "ann", {}, key)
    assert table.list() == []


def test_what_is_not_json_or_no_kind_is_refused(table: JobTable) -> None:
    with pytest.raises(InputError, match="JSON alone"):
        table.submit("audit", "ann", {"limit": float("nan")})
    with pytest.raises(InputError, match="of the kind audit and cfkd"):
        table.submit("dance", "ann", {})
    assert table.list() == []


def test_a_full_queue_takes_no_more_but_knows_its_keys(table: JobTable) -> None:
    first, _ = table.submit("audit", "ann", {}, "key", most_waiting=1)
    with pytest.raises(QueueFullError, match="1 jobs wait already"):
        table.submit("audit", "ann", {}, most_waiting=1)
    assert table.submit("audit", "ann", {}, "key", most_waiting=1) == (first, False)
    table.claim("w")
    assert table.submit("audit", "ann", {}, most_waiting=1)[1]


def test_another_owner_s_job_is_not_there(table: JobTable) -> None:
    job = submit(table, "ann")
    assert table.get(job.id, "bob") is None
    assert must(table.get(job.id, "ann")).id == job.id
    assert table.get("0" * 32) is None
    assert [one.id for one in table.list("bob")] == []


def test_lists_are_newest_first_and_go_on_where_a_page_ended(table: JobTable) -> None:
    ids = [submit(table, n=n).id for n in range(5)]
    table.claim("w")
    pages = [table.list("ann", limit=2)]
    while pages[-1]:
        pages.append(table.list("ann", limit=2, before=pages[-1][-1].id))
    assert [job.id for page in pages for job in page] == ids[::-1]
    assert [job.id for job in table.list(state=JobState.RUNNING)] == [ids[0]]
    assert [job.id for job in table.list(state="queued", limit=1)] == [ids[4]]
    with pytest.raises(InputError, match="no job"):
        table.list(before="f" * 32)


def test_lists_of_one_kind_leave_the_others_out(table: JobTable) -> None:
    audits = [table.submit("audit", "ann", {"n": n})[0].id for n in range(2)]
    learned = table.submit("cfkd", "ann", {"audit": audits[0]})[0].id
    assert [job.id for job in table.list("ann", kind="cfkd")] == [learned]
    assert [job.id for job in table.list("ann", kind="audit", limit=1)] == audits[1:]
    assert [job.id for job in table.list("ann", kind="audit", before=audits[1])] == audits[:1]


def test_jobs_submitted_in_the_same_instant_are_all_listed(url: str) -> None:
    table = JobTable(url, clock=lambda: 1_800_000_000.0)
    ids = {submit(table).id for _ in range(4)}
    first = table.list(limit=2)
    second = table.list(limit=2, before=first[-1].id)
    assert {job.id for job in first + second} == ids
    table.close()


@pytest.mark.parametrize("own_table", [False, True], ids=["one table", "a table each"])
def test_each_job_is_claimed_once(url: str, own_table: bool) -> None:
    table = JobTable(url)
    ids = {submit(table, n=n).id for n in range(40)}
    ready = threading.Barrier(6)

    def work(name: str) -> list[str]:
        mine = JobTable(url) if own_table else table
        ready.wait()
        found = []
        while (job := mine.claim(name)) is not None:
            found.append(job.id)
            assert mine.finish(job.id, name, JobState.SUCCEEDED)
        if own_table:
            mine.close()
        return found

    with ThreadPoolExecutor(6) as pool:
        claimed = [id for found in pool.map(work, [f"w{n}" for n in range(6)]) for id in found]
    assert sorted(claimed) == sorted(ids)
    assert table.counts()["succeeded"] == 40
    table.close()


def test_processes_that_open_a_new_table_together_all_get_it(url: str) -> None:
    script = "import sys; from service.jobs import JobTable; print(JobTable(sys.argv[1]).counts()['queued'])"
    started = [
        subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    assert [process.communicate(timeout=60) for process in started] == [(b"0\n", b"")] * 4


def test_the_oldest_job_is_next(table: JobTable) -> None:
    ids = [submit(table, n=n).id for n in range(3)]
    assert [must(table.claim("w")).id for _ in range(3)] == ids


def test_a_silent_worker_loses_its_job(table: JobTable, clock: Clock) -> None:
    job = submit(table)
    table.claim("silent")
    clock.now += 29
    assert table.claim("next") is None
    table.beat(job.id, "silent", None)
    clock.now += 29
    assert table.claim("next") is None
    clock.now += 2
    taken = must(table.claim("next"))
    assert (taken.id, taken.worker, taken.attempts) == (job.id, "next", 2)
    assert table.beat(job.id, "silent", {"stage": "late"}) is Signal.LOST
    assert not table.finish(job.id, "silent", JobState.SUCCEEDED, {"verdict": "PASS"})
    found = must(table.get(job.id))
    assert (found.state, found.result, found.progress) == (JobState.RUNNING, None, {})
    assert table.finish(job.id, "next", JobState.FAILED, error={"code": "bad_input", "message": "no"})
    assert must(table.get(job.id)).error == {"code": "bad_input", "message": "no"}
    assert table.beat(job.id, "next") is Signal.LOST
    assert not table.finish(job.id, "next", JobState.SUCCEEDED)


def test_a_job_that_kills_every_worker_has_failed(table: JobTable, clock: Clock) -> None:
    job = submit(table)
    for attempt in range(3):
        assert must(table.claim(f"w{attempt}")).attempts == attempt + 1
        clock.now += 31
    assert table.claim("w3") is None
    ended = must(table.get(job.id))
    assert ended.state is JobState.FAILED
    assert ended.error is not None and ended.error["code"] == "worker_lost"
    assert "3 workers in a row" in ended.error["message"]


def test_a_job_that_gets_further_is_not_given_up(table: JobTable, clock: Clock) -> None:
    job = submit(table)
    for attempt in range(10):
        assert must(table.claim(f"w{attempt}")).id == job.id
        assert table.beat(job.id, f"w{attempt}", {"done": attempt}, advanced=True) is Signal.CONTINUE
        clock.now += 31
    assert must(table.claim("last")).attempts == 2


def test_a_poisoned_job_does_not_hold_up_the_next(table: JobTable, clock: Clock) -> None:
    submit(table)
    for attempt in range(3):
        table.claim(f"w{attempt}")
        clock.now += 31
    healthy = submit(table)
    assert must(table.claim("w")).id == healthy.id


def test_a_worker_that_stops_in_good_order_costs_no_attempt(table: JobTable) -> None:
    job = submit(table)
    for _ in range(10):
        table.claim("w")
        assert table.interrupt("w") == [job.id]
        found = must(table.get(job.id))
        assert (found.state, found.attempts, found.worker) == (JobState.INTERRUPTED, 0, None)
    for _ in range(3):
        table.claim("w")
        assert table.interrupt("w", lost=True) == [job.id]
    assert table.claim("w") is None
    assert must(table.get(job.id)).state is JobState.FAILED
    assert table.interrupt("w") == []


def test_cancel(table: JobTable) -> None:
    waiting, running, stopped = (submit(table, n=n) for n in range(3))
    assert must(table.claim("w")).id == waiting.id
    assert table.interrupt("w") == [waiting.id]
    assert table.request_cancel(waiting.id) is JobState.CANCELLED  # nobody is at it: at once
    assert must(table.claim("w")).id == running.id
    assert table.request_cancel(running.id) is JobState.RUNNING
    assert table.request_cancel(running.id) is JobState.RUNNING
    assert table.beat(running.id, "w") is Signal.CANCEL
    assert table.finish(running.id, "w", JobState.CANCELLED)
    assert table.request_cancel(running.id) is JobState.CANCELLED
    assert table.request_cancel(stopped.id) is JobState.CANCELLED
    assert table.claim("w") is None
    assert table.request_cancel("0" * 32) is None
    assert table.counts()["cancelled"] == 3
    done = submit(table)
    table.claim("w")
    table.finish(done.id, "w", JobState.SUCCEEDED)
    assert table.request_cancel(done.id) is JobState.SUCCEEDED
    assert not must(table.get(done.id)).cancel_requested


def test_a_cancelled_job_whose_worker_died_is_not_started_again(table: JobTable, clock: Clock) -> None:
    job = submit(table)
    table.claim("w")
    table.request_cancel(job.id)
    clock.now += 31
    assert table.claim("next") is None
    assert must(table.get(job.id)).state is JobState.CANCELLED
    other = submit(table)
    table.claim("w")
    table.request_cancel(other.id)
    table.interrupt("w", lost=True)
    assert must(table.get(other.id)).state is JobState.CANCELLED


def test_events_are_numbered_without_gaps_and_can_be_read_on(table: JobTable) -> None:
    job = submit(table)
    table.claim("w")
    for done in (1, 1, 2):
        table.beat(job.id, "w", {"stage": "auditing", "done": done})
    table.request_cancel(job.id)
    table.finish(job.id, "w", JobState.FAILED, error={"code": "internal", "message": "m"})
    events = table.events(job.id, 0)
    assert [event.number for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event.kind for event in events] == ["state", "state", "progress", "progress", "state", "state"]
    assert [event.data.get("done") for event in events[2:4]] == [1, 2]  # what did not change is no event
    assert events[4].data == {"state": "running", "cancel_requested": True}
    assert events[5].data == {"state": "failed", "error": {"code": "internal", "message": "m"}}
    assert all(a.time < b.time for a, b in pairwise(events))
    assert table.events(job.id, 4) == events[4:]
    assert table.events(job.id, 6) == []
    assert table.events("0" * 32, 0) == []


def test_events_of_two_who_write_at_once_stay_in_order(url: str) -> None:
    table = JobTable(url)
    job = submit(table)
    table.claim("w")

    def write(n: int) -> None:
        for done in range(20):
            table.beat(job.id, "w", {"from": n, "done": done})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [event.number for event in table.events(job.id, 0)] == list(range(1, 83))
    table.close()


def test_old_jobs_are_forgotten(table: JobTable, clock: Clock) -> None:
    old, running = submit(table, n=0), submit(table, n=1)
    for _ in range(2):
        table.claim("w")
    table.finish(old.id, "w", JobState.SUCCEEDED)
    clock.now += 100
    new, _ = table.submit("audit", "ann", {}, "key")
    table.request_cancel(new.id)
    before = datetime.datetime.fromtimestamp(clock.now - 50, datetime.UTC)
    assert table.expire(before) == [old.id]
    assert table.get(old.id) is None
    assert table.events(old.id, 0) == []
    assert table.expire(before) == []
    assert {job.id for job in table.list()} == {running.id, new.id}
    clock.now += 100
    assert table.expire(datetime.datetime.fromtimestamp(clock.now, datetime.UTC)) == [new.id]
    assert table.submit("audit", "ann", {"other": 1}, "key")[1]  # its key is free again
    with pytest.raises(ValueError, match="zone"):
        table.expire(datetime.datetime(2026, 1, 1))


def test_counts_name_every_state(table: JobTable) -> None:
    assert table.counts() == dict.fromkeys(["queued", "running", "succeeded", "failed", "cancelled", "interrupted"], 0)


def test_a_table_of_another_version_is_refused(url: str) -> None:
    JobTable(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE pfungst_schema SET version = 99"))
    engine.dispose()
    with pytest.raises(InputError, match="version 99"):
        JobTable(url)


def test_without_a_clock_times_are_now_in_utc(url: str) -> None:
    table = JobTable(url)
    job = submit(table)
    assert abs((datetime.datetime.now(datetime.UTC) - job.created).total_seconds()) < 60
    table.close()


@pytest.mark.parametrize("bad", ["", "nonsense", "mysql://host/db", "sqlite://", "sqlite:///:memory:"])
def test_a_url_that_cannot_be_used_is_refused(bad: str) -> None:
    with pytest.raises(InputError):
        JobTable(bad)


def test_sqlite_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    table = JobTable(url)
    job = submit(table)
    writer = sa.create_engine(url)
    with writer.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    with writer.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.exec_driver_sql("UPDATE pfungst_jobs SET owner = 'bob'")
        assert must(table.get(job.id)).owner == "ann"
        assert table.counts()["queued"] == 1
        connection.rollback()
    writer.dispose()
    table.close()
