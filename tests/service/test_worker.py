"""Workers: what a job leaves behind, how it ends early, and that a killed one loses nothing."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.classifier import load_classifier
from audit.dataset import open_dataset
from audit.pictures import save_png, to_pil
from audit.policy import Policy
from audit.report import Names, build, write
from audit.run import audit as run_audit
from audit.teachers import OracleTeacher
from engine.counterfactual import Cost, CounterfactualSet
from engine.rate import Rate
from engine.recipe import Recipe
from service import worker as worker_module
from service.artifacts import ArtifactStore
from service.cases import AuditRequest, job_case
from service.configuration import Configuration
from service.executor import LocalExecutor
from service.jobs import Job, JobState, JobTable
from service.pulse import Pulse
from service.resuming import locked
from service.stop import Stop
from service.worker import Worker, open_table
from tests.audit.test_run import StubExplainer, reported
from worlds import WORLDS
from worlds import store as store_module
from worlds.store import WEIGHTS, open_classifier

REPORTS = {"report.html", "report.json", "junit.xml", "summary.md", "journal.jsonl"}
IMAGES = 8
REQUEST: dict[str, Any] = {
    "classifier": "portraits/student",
    "dataset": "small",
    "policy": {"min_images": 2, "min_per_direction": 1, "max_images": IMAGES, "limit": 0.9},
    "k": 1,
    "steps": 6,
    "batch": 1,
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pictures of the portraits world as an image folder."""
    folder = tmp_path_factory.mktemp("pictures")
    world = WORLDS["portraits"]
    sample = world.sample(40, 5)
    for n, (image, label) in enumerate(zip(sample.images, sample.labels.tolist(), strict=True)):
        home = folder / world.labels[label]
        home.mkdir(exist_ok=True)
        save_png(to_pil(image), home / f"{n:03d}.png")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def configuration(tmp_path: Path, pictures: Path, cache: Path) -> Configuration:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cache").symlink_to(cache)  # surrogates are distilled once for all tests
    return configured(tmp_path / "data", pictures)


def configured(folder: Path, pictures: Path, **more: Any) -> Configuration:
    small = {"path": pictures, "teacher": WEIGHTS / "portraits" / "oracle", "prior": "portraits"}
    settings: dict[str, Any] = {
        "datasets": {"small": small},
        "surrogate_steps": 3,
        "surrogate_pictures": 20,
        "heartbeat_seconds": 0.2,
        "stale_seconds": 20,
        "sync_images": 2,
        "threads": 1,
    }
    return Configuration(folder=folder, **{**settings, **more})


@pytest.fixture
def table(configuration: Configuration) -> Iterator[JobTable]:
    table = open_table(configuration)
    yield table
    table.close()


def submit(table: JobTable, kind: str = "audit", **changes: Any) -> Job:
    request = {**REQUEST, **changes} if kind == "audit" else changes
    return table.submit(kind, "ann", request)[0]


def now(table: JobTable, job: Job) -> Job:
    found = table.get(job.id)
    assert found is not None
    return found


def until(what: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Waits for something to be true and returns it."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return found


def journal_of(store: ArtifactStore, job: Job) -> list[bytes]:
    with store.open(job.id, "journal.jsonl") as stream:
        return stream.read().splitlines()


def check_whole(store: ArtifactStore, job: Job) -> None:
    """Every image is there once, with all its pictures, and the report counts the same ones."""
    images = [json.loads(line) for line in journal_of(store, job)[1:]]
    assert len({image["row"] for image in images}) == len(images) == job.result["n_images"]  # type: ignore[index]
    named = {name for one in images for name in [one["original"], *(c["file"] for c in one["counterfactuals"])]}
    names = set(store.names(job.id))
    assert REPORTS | named <= names
    with store.open(job.id, "report.json") as stream:
        assert json.load(stream)["images"] == images


# An audit from the queue to its artifacts -------------------------------------------------------------------------


@pytest.mark.slow
def test_an_audit_job_ends_with_its_verdict_and_files(configuration: Configuration, table: JobTable) -> None:
    job = submit(table)
    worker = Worker(configuration, table=table)
    assert worker.run_one()
    assert not worker.run_one()
    ended = now(table, job)
    assert ended.state is JobState.SUCCEEDED, ended.error
    result = ended.result
    assert result is not None
    assert result["verdict"] in ("PASS", "FAIL", "INCONCLUSIVE")
    assert result["exit_code"] == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}[result["verdict"]]
    assert len(result["bounds"]) == 2
    assert result["n_images"] <= IMAGES
    assert {"reliance", "headline", "reasons", "findings"} <= result.keys()
    check_whole(worker.store, ended)
    stages = [e.data["stage"] for e in table.events(job.id) if e.kind == "progress"]
    assert "auditing" in stages
    assert all(set(e.data) == {"stage", "done", "total", "seconds_left"} for e in table.events(job.id)[2:-1])
    assert not configuration.work_folder(job.id).exists()


@pytest.mark.slow
def test_another_machine_goes_on_where_a_worker_was_stopped(
    configuration: Configuration, table: JobTable, tmp_path: Path, pictures: Path
) -> None:
    """It has the job table and the artifacts, and neither the folder nor the surrogates of the first one."""
    job, store = submit(table), ArtifactStore(configuration.artifacts_url)
    first = Worker(configuration, table=table, store=store)
    thread = threading.Thread(target=first.run_one)
    thread.start()
    until(lambda: store.has(job.id, "journal.jsonl"))
    first.stop()
    thread.join(60)
    stopped = now(table, job)
    assert (stopped.state, stopped.attempts, stopped.worker) == (JobState.INTERRUPTED, 0, None)
    copied = journal_of(store, job)
    assert len(copied) >= 3  # what is audited, and two images

    second = Worker(configured(tmp_path / "elsewhere", pictures), table=table, store=store)
    assert second.run_one()
    ended = now(table, job)
    assert ended.state is JobState.SUCCEEDED, ended.error
    check_whole(store, ended)
    assert journal_of(store, ended)[: len(copied)] == copied


@pytest.mark.slow
def test_an_audit_keeps_the_recipe_it_began_with(
    configuration: Configuration, table: JobTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade that brings another recipe for the same prior concerns later audits."""
    job, first = submit(table), Worker(configuration, table=table)
    thread = threading.Thread(target=first.run_one)
    thread.start()
    until(lambda: first.store.has(job.id, "journal.jsonl"))
    first.stop()
    thread.join(60)
    copied = journal_of(first.store, job)
    before = store_module.open_recipe(WORLDS["portraits"])
    monkeypatch.setattr(store_module, "open_recipe", lambda *_: before.changed(beta=2 * before.beta))
    assert Worker(configuration, table=table).run_one()
    ended = now(table, job)
    assert ended.state is JobState.SUCCEEDED, ended.error
    check_whole(first.store, ended)
    assert journal_of(first.store, ended)[: len(copied)] == copied
    assert json.loads(copied[0])["recipe"] == before.changed(k=1, steps=6).digest


@pytest.mark.parametrize("kept", [{}, {"colour": "red"}])
def test_an_audit_that_cannot_go_on_as_it_began_fails_with_its_sentence(
    configuration: Configuration, table: JobTable, kept: dict[str, str], tmp_path: Path
) -> None:
    """The recipe of an earlier version: one that the finished images did not come from, or that has no meaning now."""
    job, worker = submit(table), Worker(configuration, table=table)
    case = job_case(AuditRequest.of(job.request, configuration), configuration)
    hashes = (case.classifier.content_hash, case.dataset.content_hash, case.source.prior.content_hash)
    began = dict(zip(("classifier", "data", "prior"), hashes, strict=True)) | {"recipe": "0" * 64}
    folder = configuration.work_folder(job.id)
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text(json.dumps(began) + "\n")
    if kept:
        (tmp_path / "recipe.json").write_text(json.dumps(kept))
        worker.store.put(job.id, "resume/recipe.json", tmp_path / "recipe.json")
    assert worker.run_one()
    message = "The recipe changed since the audit began; submit it again."
    assert now(table, job).error == {"code": "bad_input", "message": message}


@pytest.mark.slow
def test_a_cancel_ends_a_running_audit_at_its_next_step(configuration: Configuration, table: JobTable) -> None:
    # Enough images that it cannot end by itself in between.
    job = submit(table, policy={"min_images": 40, "max_images": 40}, steps=20)
    worker = Worker(configuration, table=table)
    thread = threading.Thread(target=worker.run_one)
    thread.start()
    until(lambda: now(table, job).progress.get("stage") == "auditing")
    assert table.request_cancel(job.id) is JobState.RUNNING
    thread.join(20)
    assert not thread.is_alive()
    ended = now(table, job)
    assert (ended.state, ended.result, ended.error) == (JobState.CANCELLED, None, None)
    assert not configuration.work_folder(job.id).exists()
    assert not worker.run_one()


# What goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"classifier": "nobody"}, "The classifier 'nobody' is unknown; there are: portraits/student"),
        ({"classifier": "portraits/../student"}, "is unknown"),
        ({"classifier": "0" * 32}, "is unknown"),
        ({"dataset": "nothing"}, "The data set 'nothing' is unknown; there are: portraits, histology, small."),
        ({"dataset": "portraits", "prior": "histology"}, "goes with the prior portraits alone"),
        ({"dataset": "portraits", "teacher": "portraits/twin"}, "brings its own teacher"),
        ({"prior": "/etc"}, "The prior '/etc' is unknown"),
        ({"teacher": "nobody"}, "The classifier 'nobody' is unknown"),
        ({"runtime": "abacus"}, "The runtime 'abacus' is unknown"),
        ({"k": 9}, "The request's k is 9; at most 8 are allowed."),
        ({"k": 0}, "'k' should be greater than or equal to 1"),
        ({"steps": 10**6}, "The request's steps is 1000000"),
        ({"seed": -1}, "'seed' should be greater"),
        ({"policy": {"limit": 2}}, "'limit' should be less than 1"),
        ({"policy": {"colour": "red"}}, "has no setting 'colour'"),
    ],
)
def test_a_request_that_cannot_be_used_fails_with_its_sentence(
    configuration: Configuration, table: JobTable, changes: dict[str, Any], sentence: str
) -> None:
    job, worker = submit(table, **changes), Worker(configuration, table=table)
    assert worker.run_one()
    ended = now(table, job)
    assert ended.state is JobState.FAILED
    assert ended.error is not None
    assert ended.error["code"] == "bad_input"
    assert sentence in ended.error["message"]
    assert worker.store.names(job.id) == []
    assert not worker.run_one()


def test_a_fault_inside_is_told_by_its_number_and_stands_in_the_log(
    configuration: Configuration,
    table: JobTable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a detail for nobody else")

    monkeypatch.setattr(worker_module, "job_case", broken)
    job = submit(table)
    with caplog.at_level(logging.ERROR, "pfungst.worker"):
        Worker(configuration, table=table).run_one()
    error = now(table, job).error
    assert error is not None
    assert error["code"] == "internal"
    assert "detail" not in error["message"]
    number = error["message"].rpartition(" ")[2].rstrip(".")
    assert number in caplog.text
    assert "a detail for nobody else" in caplog.text


def test_a_worker_that_lost_its_job_leaves_it_alone(
    configuration: Configuration, table: JobTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(table)
    slow = Worker(configuration, "slow", table=table)

    def meanwhile(*_: object, **__: object) -> None:
        table.interrupt("slow", lost=True)
        taken = table.claim("other")
        assert taken is not None
        until(slow._stop.is_set)
        slow._stop.check()

    monkeypatch.setattr(worker_module, "job_case", meanwhile)
    assert slow.run_one()
    found = now(table, job)
    assert (found.state, found.worker, found.error) == (JobState.RUNNING, "other", None)
    assert configuration.work_folder(job.id).exists()  # the other one may be on this machine


def test_two_processes_never_work_in_one_folder(configuration: Configuration, table: JobTable) -> None:
    """One that was suspended and lost its job may still write there; the next one waits until it let go."""
    job = submit(table)
    folder = configuration.work_folder(job.id)
    with locked(folder, Stop()):
        stop = Stop()
        waiting = threading.Thread(target=lambda: locked(folder, stop).__enter__())
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()


def test_old_jobs_go_with_their_files(tmp_path: Path, pictures: Path) -> None:
    configuration = configured(tmp_path, pictures, retention_days=1)
    clock = [time.time() - 2 * 86_400]
    table = JobTable(configuration.database_url, clock=lambda: clock[0])
    worker = Worker(configuration, table=table)
    old = submit(table)
    table.request_cancel(old.id)
    clock[0] = time.time()
    new = submit(table)
    table.request_cancel(new.id)
    for job in (old, new):
        worker.store.put(job.id, "report.html", next(pictures.rglob("*.png")))
        configuration.work_folder(job.id).mkdir(parents=True)
    worker.forget_old_jobs()
    assert [job.id for job in table.list()] == [new.id]
    assert worker.store.names(old.id) == []
    assert worker.store.names(new.id) == ["report.html"]
    assert not configuration.work_folder(old.id).exists()
    assert configuration.work_folder(new.id).exists()
    table.close()


# The data that repairs --------------------------------------------------------------------------------------------


def finished_audit(table: JobTable, store: ArtifactStore, out: Path, hans: bool) -> Job:
    """A job with the artifacts of an audit that found, or did not find, false counterfactuals."""
    job = submit(table)
    reported(out, hans)
    store.put_tree(job.id, out)
    assert table.claim("w") is not None
    assert table.finish(job.id, "w", JobState.SUCCEEDED, {})
    return now(table, job)


def test_a_cfkd_job_packs_the_set_of_an_audit(configuration: Configuration, table: JobTable, tmp_path: Path) -> None:
    worker = Worker(configuration, table=table)
    audit = finished_audit(table, worker.store, tmp_path / "audit", hans=True)
    packed = []
    for _ in range(2):
        job = submit(table, "cfkd", audit=audit.id)
        assert worker.run_one()
        ended = now(table, job)
        assert ended.state is JobState.SUCCEEDED, ended.error
        assert ended.result is not None
        assert ended.result["exit_code"] == 0
        assert ended.result["verdict"] == "FAIL"
        with worker.store.open(job.id, "set.zip") as stream:
            packed.append(stream.read())
        with worker.store.open(job.id, "set.zip") as stream, zipfile.ZipFile(stream) as opened:
            assert opened.testzip() is None
            names = opened.namelist()
            card = json.loads(opened.read("set/set.json"))
        assert {"set/README.md", "set/manifest.parquet"} <= set(names)
        assert card["counterfactuals"] == ended.result["counterfactuals"] > 0
        assert sum(name.startswith("set/by_label/") for name in names) == card["counterfactuals"]
        assert sum(ended.result["labels"].values()) == card["counterfactuals"]
    assert packed[0] == packed[1]


def test_an_audit_that_found_nothing_false_has_nothing_to_repair(
    configuration: Configuration, table: JobTable, tmp_path: Path
) -> None:
    worker = Worker(configuration, table=table)
    audit = finished_audit(table, worker.store, tmp_path / "audit", hans=False)
    job = submit(table, "cfkd", audit=audit.id)
    assert worker.run_one()
    assert now(table, job).result == {"counterfactuals": 0, "labels": {}, "verdict": "PASS", "exit_code": 0}
    assert worker.store.names(job.id) == []


def test_only_an_audit_that_succeeded_can_be_learned_from(configuration: Configuration, table: JobTable) -> None:
    cancelled = submit(table)
    table.request_cancel(cancelled.id)
    for id in (cancelled.id, "0" * 32, "../x"):
        job = submit(table, "cfkd", audit=id)
        Worker(configuration, table=table).run_one()
        error = now(table, job).error
        assert error is not None
        assert error["code"] == "bad_input"
        assert "that has succeeded" in error["message"]


class Liar(StubExplainer):
    """Answers every picture of the embedded student with another one that the student gives the target."""

    def __init__(self, pool: Tensor) -> None:
        super().__init__(hans=True)
        student: Any = open_classifier(WORLDS["portraits"], "student")
        self.classifier, self.recipe = student, Recipe(k=1)
        self.pool = {target: pool[student.probabilities(pool).argmax(1) == target] for target in (0, 1)}

    def _one(self, x: Tensor, target: int, seed: int) -> CounterfactualSet:
        x_cf = self.pool[target][seed % len(self.pool[target])]
        p = self.classifier.probabilities(torch.stack([x, x_cf])).log()
        return CounterfactualSet(
            x0=x,
            source=1 - target,
            target=target,
            images=x_cf[None],
            soft_masks=torch.ones(1, 1, *x.shape[1:]),
            edit_masks=torch.ones(1, 1, *x.shape[1:], dtype=torch.bool),
            flipped=(True,),
            logits=p[1:],
            source_logits=p[0],
            seed=seed,
            recipe=self.recipe,
            factors=(1.0,),
            hashes={},
            costs=(Cost(),),
            setup=Cost(),
        )


def test_a_cfkd_job_repairs_the_classifier(tmp_path: Path, pictures: Path) -> None:
    tested = tmp_path / "tested"
    shutil.copytree(pictures, tested)
    names = sorted(file.relative_to(tested) for file in tested.rglob("*.png"))
    rows = [f"{name},{name.parent},{n % 2}" for n, name in enumerate(names)]
    (tested / "manifest.csv").write_text("image,label,group\n" + "\n".join(rows) + "\n")
    configuration = configured(
        tmp_path / "data",
        pictures,
        datasets={"small": {"path": pictures}, "tested": {"path": tested}},
        classifiers={"mine": WEIGHTS / "portraits" / "student"},
    )
    table = open_table(configuration)
    worker = Worker(configuration, table=table)
    audit = submit(table, classifier="mine")
    dataset = open_dataset(pictures, size=64)
    explainer: Any = Liar(dataset.images(range(len(dataset))))
    teacher = OracleTeacher(lambda x: torch.tensor([[1.0, 0.0]]).repeat(len(x), 1), Rate.of(99, 100))
    policy = Policy(min_images=10, max_images=20)
    found = run_audit(explainer, dataset, teacher, policy, tmp_path / "audit")
    write(build(found, explainer, dataset, teacher, policy, Names()), found)
    worker.store.put_tree(audit.id, tmp_path / "audit")
    assert table.claim("w") is not None
    assert table.finish(audit.id, "w", JobState.SUCCEEDED, {})

    asked = {"audit": audit.id, "finetune": True, "steps": 2, "train": "small"}
    lacking = submit(table, "cfkd", **asked)
    whole = submit(table, "cfkd", **asked, test="tested", group_column="group")
    assert worker.run_one() and worker.run_one()
    error = now(table, lacking).error
    assert error is not None and "train, test and group_column have to be named" in error["message"]
    ended = now(table, whole)
    assert ended.state is JobState.SUCCEEDED, ended.error
    assert ended.result is not None
    assert {"gain", "worst_group_before", "worst_group_after", "aga_after", "verdict_before"} <= ended.result.keys()
    assert ended.result["counterfactuals"] > 0
    assert worker.store.names(whole.id) == ["cfkd.json", "classifier.zip", "set.zip"]
    with worker.store.open(whole.id, "classifier.zip") as stream, zipfile.ZipFile(stream) as packed:
        packed.extractall(tmp_path / "repaired")
    repaired = load_classifier(tmp_path / "repaired" / "classifier")
    assert repaired.labels == explainer.classifier.labels
    assert any(e.data.get("stage") == "round 1: fine-tuning" for e in table.events(whole.id))
    table.close()


def test_a_stage_that_is_over_before_the_next_beat_is_told_all_the_same(
    configuration: Configuration, table: JobTable
) -> None:
    job = submit(table)
    assert table.claim("w") is not None
    with Pulse(table, job, "w", configuration, Stop()) as pulse:
        for stage in ("opening", "fine-tuning", "storing"):
            pulse.report(stage, 1, 2)
    told = dict.fromkeys(e.data["stage"] for e in table.events(job.id) if e.kind == "progress")
    assert list(told)[:2] == ["opening", "fine-tuning"]


def test_stages_that_a_beat_could_not_tell_are_told_by_a_later_one(
    configuration: Configuration, table: JobTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(table)
    assert table.claim("w") is not None
    beat, away = table.beat, threading.Event()

    def once_away(*given: Any, **named: Any) -> Any:
        if given[2] is not None and not away.is_set():
            away.set()
            raise OSError("the database is away")
        return beat(*given, **named)

    monkeypatch.setattr(table, "beat", once_away)
    with Pulse(table, job, "w", configuration, Stop()) as pulse:
        for stage in ("opening", "fine-tuning", "storing"):
            pulse.report(stage, 1, 2)
        assert away.wait(10)
    told = dict.fromkeys(e.data["stage"] for e in table.events(job.id) if e.kind == "progress")
    assert list(told)[:2] == ["opening", "fine-tuning"]


# Processes --------------------------------------------------------------------------------------------------------


def test_an_executor_keeps_its_workers_alive_and_ends_them(configuration: Configuration, table: JobTable) -> None:
    executor = LocalExecutor(configuration, table)
    executor.start()
    try:
        first = executor.pids
        with executor._lock:  # held while a lost worker's job is handed back, which may wait for the database
            assert executor.alive() == 1
        assert len(first) == 1
        assert os.getpriority(os.PRIO_PROCESS, 0) <= 10
        until(lambda: os.getpriority(os.PRIO_PROCESS, first[0]) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10))
        os.kill(first[0], signal.SIGKILL)
        until(lambda: executor.pids not in ([], first))
        executor.wake()
        job = submit(table, classifier="nobody")
        executor.wake()
        until(lambda: now(table, job).state is JobState.FAILED)
    finally:
        start = time.monotonic()
        executor.stop()
    assert time.monotonic() - start < 10
    assert executor.alive() == 0


def test_a_worker_does_not_outlive_whoever_started_it(configuration: Configuration) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "service.worker", "--supervised"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(configuration.model_dump_json().encode() + b"\n")
    process.stdin.flush()
    for line in process.stderr:
        if b"is ready" in line:
            break
    process.stdin.close()
    assert process.wait(10) == 0
    process.stderr.close()


def test_a_worker_with_a_bad_configuration_says_so(tmp_path: Path) -> None:
    file = tmp_path / "pfungst.yaml"
    file.write_text("workers: many")
    done = subprocess.run(
        [sys.executable, "-m", "service.worker"],
        env=os.environ | {"PFUNGST_CONFIG": str(file)},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert done.stderr.startswith("pfungst: error: The configuration's setting 'workers' should be a valid integer")


@pytest.mark.slow
def test_an_audit_survives_kill_9_and_sigterm(configuration: Configuration, table: JobTable) -> None:
    """Killed after its first images and stopped after more; whatever was finished stays, and nothing is done twice."""
    job, store = submit(table), ArtifactStore(configuration.artifacts_url)
    journal = configuration.work_folder(job.id) / "journal.jsonl"

    def finished() -> list[bytes]:
        content = journal.read_bytes() if journal.is_file() else b""
        return content[: content.rfind(b"\n") + 1].splitlines()

    executor = LocalExecutor(configuration, table)
    executor.start()
    try:
        until(lambda: len(finished()) >= 2)
        os.kill(executor.pids[0], signal.SIGKILL)
        until(lambda: not executor.pids or now(table, job).state is not JobState.RUNNING)
        after_kill = finished()
        until(lambda: len(finished()) > len(after_kill))
        start = time.monotonic()
        executor.stop(10)
        assert time.monotonic() - start < 11
    finally:
        executor.stop(0)
    stopped = now(table, job)
    assert stopped.state is JobState.INTERRUPTED
    after_stop = finished()
    assert after_stop[: len(after_kill)] == after_kill
    assert len(after_stop) < IMAGES + 1, "it ended before it could be stopped"

    assert Worker(configuration, table=table, store=store).run_one()
    ended = now(table, job)
    assert ended.state is JobState.SUCCEEDED, ended.error
    check_whole(store, ended)
    assert journal_of(store, ended)[: len(after_stop)] == after_stop
    assert ended.result is not None
    assert ended.result["n_images"] == IMAGES
    states = [e.data["state"] for e in table.events(job.id) if e.kind == "state"]
    assert states == ["queued", "running", "interrupted", "running", "interrupted", "running", "succeeded"]
