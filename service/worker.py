"""One worker: claims a job, does it, and says all the while that it lives. `python -m service.worker` runs one.

What a job has finished is on the disk before anybody is told: an audit's journal and pictures lie in work/JOB, and a
copy of them goes to the artifacts every few images, so that a worker on another machine can go on where this one
stopped. A worker may be killed at any moment; the next one that claims the job reads the journal.

A job ends early for one of three reasons, which one token holds: somebody cancelled it, the worker has to stop, or the
job is another worker's now. The engine asks the token at every guided step.

A full disk ends no job: it goes back to the queue with what it has finished, and a worker that has space goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import Cancelled, InputError, ModelError
from service.artifacts import ArtifactStore
from service.cases import AuditRequest, Case, CfkdRequest, job_case, job_repair, surrogate_recipes
from service.configuration import Configuration
from service.disk import is_full
from service.jobs import Job, JobState, JobTable
from service.priority import lower_process
from service.pulse import Pulse
from service.resuming import JOURNAL, AuditCopy, Busy, locked
from service.stop import Reason, Stop

if TYPE_CHECKING:
    from audit.cfkd import FinishedAudit
    from audit.classifier import Classifier, HuggingFaceClassifier
    from audit.explain import Explainer
    from audit.verdict import Judge
    from engine.recipe import Recipe

__all__ = ["Worker", "main"]

log = logging.getLogger("pfungst.worker")

IDLE_SECONDS = 1.0
"""Between two looks at an empty queue, unless somebody wakes the worker."""
RETENTION_SECONDS = 3600.0
FULL_SECONDS = 30.0
"""How long a worker leaves the queue alone after it met a full disk."""
WAITING_FOR_SPACE = {"stage": "waiting for space on the disk", "done": 0, "total": None, "seconds_left": None}
REPORTS = ("report.html", "report.json", "junit.xml", "summary.md")
ENDING = (signal.SIGTERM, signal.SIGINT)
ENDED_BY_SIGNAL = 128 + signal.SIGTERM


class Worker:
    """Does one job after another."""

    def __init__(
        self,
        configuration: Configuration,
        name: str | None = None,
        *,
        table: JobTable | None = None,
        store: ArtifactStore | None = None,
    ) -> None:
        self.configuration = configuration
        self.name = name or worker_name()
        self.table = table or open_table(configuration)
        self.store = store or ArtifactStore(configuration.artifacts_url)
        self._wake, self._ending = threading.Event(), threading.Event()
        self._stop = Stop()

    def run(self) -> None:
        """Works until `stop` is called."""
        log.info("worker %s is ready", self.name)
        cleaned = -RETENTION_SECONDS
        while not self._ending.is_set():
            self._wake.clear()
            if time.monotonic() - cleaned >= RETENTION_SECONDS:
                cleaned = time.monotonic()
                self._guarded(self.forget_old_jobs)
            if not self._guarded(self.run_one):
                self._wake.wait(IDLE_SECONDS)

    def run_one(self) -> bool:
        """Does the next job, if one waits; whether there was one."""
        if self._ending.is_set() or (job := self.table.claim(self.name)) is None:
            return False
        self._stop = Stop()
        if self._ending.is_set():  # `stop` may have come between the claim and the new token
            self._stop.set(Reason.STOPPING)
        log.info("job %s (%s): attempt %d", job.id, job.kind, job.attempts)
        with Pulse(self.table, job, self.name, self.configuration, self._stop) as pulse:
            state, result, error = self._outcome(job, pulse)
        self._end(job, state, result, error)
        if self._stop.reason == Reason.FULL:
            self._ending.wait(FULL_SECONDS)
        return True

    def stop(self) -> None:
        """Ends after the guided step that is being done; the job goes back to the others."""
        self._ending.set()
        self._stop.set(Reason.STOPPING)
        self._wake.set()

    def wake(self) -> None:
        """Looks at the queue now."""
        self._wake.set()

    def forget_old_jobs(self) -> None:
        """Removes jobs that are older than the retention, with all their files."""
        before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=self.configuration.retention_days)
        for id in self.table.expire(before):
            self.store.delete(id)
            shutil.rmtree(self.configuration.work_folder(id), ignore_errors=True)
            log.info("job %s is past its retention and was removed", id)

    # Inside -----------------------------------------------------------------------------------------------------

    def _outcome(self, job: Job, pulse: Pulse) -> tuple[JobState | None, dict[str, Any] | None, dict[str, Any] | None]:
        """Does a job; (the state it ends in or None where it is not ours to say, result, error)."""
        try:
            with locked(self.configuration.work_folder(job.id), self._stop):
                do = self._audit if job.kind == "audit" else self._cfkd
                return JobState.SUCCEEDED, do(job, pulse), None
        except Cancelled:
            if self._stop.reason == Reason.CANCELLED:
                return JobState.CANCELLED, None, None
            return (JobState.INTERRUPTED if self._stop.reason == Reason.STOPPING else None), None, None
        except InputError as error:
            log.info("job %s: %s", job.id, error)
            return JobState.FAILED, None, {"code": "bad_input", "message": self._sentence(error)}
        except ModelError as error:
            log.warning("job %s: %s", job.id, error)
            return JobState.FAILED, None, {"code": "bad_model", "message": self._sentence(error)}
        except Busy:
            return JobState.INTERRUPTED, None, None
        except Exception as error:
            if is_full(error):
                log.error("job %s: the disk is full; the job goes on when there is space: %s", job.id, error)
                self._stop.set(Reason.FULL)
                return JobState.INTERRUPTED, None, None
            number = uuid.uuid4().hex
            log.exception("job %s failed, request id %s", job.id, number)
            message = f"Something went wrong inside; the operator's log has it under the request id {number}."
            return JobState.FAILED, None, {"code": "internal", "message": message}

    def _sentence(self, error: Exception) -> str:
        """An error as one line, without the place of this worker's folder."""
        return " ".join(str(error).replace(f"{self.configuration.folder}/", "").split())

    def _end(
        self, job: Job, state: JobState | None, result: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> None:
        if state is None:
            log.warning("job %s was lost to another worker", job.id)
            return
        if state is JobState.INTERRUPTED and self._stop.reason in (Reason.STOPPING, Reason.FULL):
            if self._stop.reason == Reason.FULL:
                self.table.beat(job.id, self.name, WAITING_FOR_SPACE)
            self.table.interrupt(self.name)  # no fault of the job's: it does not count as an attempt
            return
        if not self.table.finish(job.id, self.name, state, result, error):
            log.warning("job %s was lost to another worker", job.id)
            return
        log.info("job %s: %s", job.id, state)
        if state.finished:
            shutil.rmtree(self.configuration.work_folder(job.id), ignore_errors=True)

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """A database that is away for a while does not end a worker."""
        try:
            return step()
        except Exception:
            log.exception("worker %s could not reach the jobs", self.name)
            self._ending.wait(IDLE_SECONDS)
            return None

    # Audits -----------------------------------------------------------------------------------------------------

    def _audit(self, job: Job, pulse: Pulse) -> dict[str, Any]:
        """Audits into work/JOB, from wherever an earlier worker stopped."""
        folder = self.configuration.work_folder(job.id)
        request = AuditRequest.of(job.request, self.configuration)

        from audit.policy import Policy

        policy = Policy(**request.policy)
        pulse.report("opening", 0, None)
        copy = AuditCopy(self.store, job.id, folder, self.configuration)
        copy.restore()
        self._stop.check()
        case = job_case(request, self.configuration, max_bad_share=policy.max_bad_files_share)
        changes = {"k": request.k} | ({} if request.steps is None else {"steps": request.steps})
        recipe = copy.keep_recipe(case.source.recipe.changed(**changes))
        copy.check_unchanged(case, recipe)
        explainer = self._explainer(case, case.classifier, pulse, copy, recipe)
        try:
            content = self._run_audit(case, explainer, policy, folder, request.seed, request.batch, pulse, copy)
        except Cancelled:
            if self._stop.reason == Reason.STOPPING:
                copy.sync()
            raise
        pulse.report("storing", 0, None)
        copy.sync()
        for name in REPORTS:
            self.store.put(job.id, name, folder / name)
        return _audit_result(content)

    def _explainer(
        self, case: Case, classifier: Classifier, pulse: Pulse, copy: AuditCopy | None, recipe: Recipe
    ) -> Explainer:
        """Distils the surrogates, or finds them in the cache."""
        from audit.explain import Explainer, distil_pair

        self._stop.check()
        guide, evaluator = surrogate_recipes(self.configuration)
        surrogates = distil_pair(
            classifier,
            case.pictures,
            self.configuration.cache_folder,
            guide=guide,
            evaluator=evaluator,
            progress=lambda role, done, total: pulse.report(f"distilling the {role}", done, total),
            cancel=self._stop,
        )
        if copy is not None:
            copy.keep_surrogates(classifier, case, surrogates)
        return Explainer(case.source.prior, classifier, surrogates, recipe)

    def _run_audit(
        self,
        case: Case,
        explainer: Explainer,
        policy: Any,
        out: Path,
        seed: int,
        batch: int,
        pulse: Pulse,
        copy: AuditCopy | None,
    ) -> dict[str, Any]:
        """Audits and writes the report; returns report.json."""
        from audit.report import build, write
        from audit.run import audit

        def watch(done: int, total: int, judge: Judge) -> None:
            pulse.report("auditing", done, total, advanced=True)
            self._stop.check()  # before the copy: where the job was lost, that is another worker's
            if copy is not None and done % self.configuration.sync_images == 0:
                copy.sync()

        self._stop.check()
        pulse.report("auditing", 0, min(policy.max_images, len(case.dataset)))
        found = audit(
            explainer,
            case.dataset,
            case.teacher,
            policy,
            out,
            seed=seed,
            batch=batch,
            progress=watch,
            cancel=self._stop,
        )
        pulse.report("reporting", 0, None)
        record = build(found, explainer, case.dataset, case.teacher, policy, case.names)
        write(record, found)
        return record.content

    # Repair -----------------------------------------------------------------------------------------------------

    def _cfkd(self, job: Job, pulse: Pulse) -> dict[str, Any]:
        """The debiasing set of an audit as set.zip, and if asked for the repaired classifier as classifier.zip."""
        request = CfkdRequest.of(job.request, self.configuration)
        source = self.table.get(request.audit)
        if source is None or source.kind != "audit" or source.state is not JobState.SUCCEEDED:
            raise InputError(f"There is no audit {request.audit!r:.40} that has succeeded.")

        from audit.cfkd import FinishedAudit, build_set
        from audit.verdict import Outcome

        folder = self.configuration.work_folder(job.id)
        pulse.report("opening", 0, None)
        first = folder / "audit"
        for name in self.store.names(source.id):
            if name in (JOURNAL, *REPORTS) or name.startswith("counterfactuals/"):
                self._stop.check()
                if not (first / name).is_file():
                    self.store.fetch(source.id, name, first / name)
        audit = FinishedAudit.read(first)
        if not any(audit.lessons(request.include_true)):
            nothing = {"counterfactuals": 0, "labels": {}, "verdict": str(audit.outcome)}
            return nothing | {"exit_code": 0 if audit.outcome is Outcome.PASS else 3}
        repaired = {}
        if request.finetune:
            repaired = self._repair(request, source, audit, folder, pulse)
        else:
            pulse.report("building the set", 0, None)
            build_set(first, folder / "set", include_true=request.include_true)
        pulse.report("storing", 0, None)
        card = json.loads((folder / "set" / "set.json").read_text(encoding="utf-8"))
        self._put_zip(job.id, "set.zip", folder / "set")
        if request.finetune:
            self._put_zip(job.id, "classifier.zip", folder / "classifier")
            self.store.put(job.id, "cfkd.json", folder / "cfkd.json")
        content = {key: card[key] for key in ("counterfactuals", "originals", "labels", "directions", "digest")}
        return content | {"verdict": str(audit.outcome), "exit_code": 0} | repaired

    def _repair(
        self, request: CfkdRequest, source: Job, audit: FinishedAudit, folder: Path, pulse: Pulse
    ) -> dict[str, Any]:
        """Fine-tunes with the set; the numbers before and after."""
        from audit.cfkd import repair
        from audit.finetune_settings import FinetuneSettings
        from audit.images import read_image

        asked = AuditRequest.of(source.request, self.configuration)
        size = int(read_image(audit.picture(audit.images[0].original)).shape[-1])
        case = job_repair(request, asked.classifier, size, self.configuration)

        @contextmanager
        def watch(title: str) -> Iterator[Callable[[int, int], None]]:
            def step(done: int, total: int) -> None:
                pulse.report(title, done, total)
                self._stop.check()

            yield step

        content = repair(
            case.classifier,
            case.source,
            audit.folder,
            case.originals,
            case.ordinary,
            case.test,
            folder,
            rounds=request.rounds,
            seed=request.seed,
            include_true=request.include_true,
            settings=FinetuneSettings(steps=request.steps, rate=request.rate),
            audit_again=self._audit_again(asked, audit, pulse) if request.audit_again else None,
            watch=watch,
        )
        return {"gain": content["gain"]} | {
            f"{name}_{when}": content[f"{name}_{when}"]
            for name in ("verdict", "worst_group", "aga", "accuracy", "poisoned", "ece")
            for when in ("before", "after")
        }

    def _audit_again(
        self, asked: AuditRequest, audit: FinishedAudit, pulse: Pulse
    ) -> Callable[[HuggingFaceClassifier, Path], None]:
        """Audits a repaired classifier as the first one was: same data, prior, recipe, policy and order of images."""
        from audit.policy import Policy

        case, hashes = job_case(asked, self.configuration), audit.hashes
        for name, now in (("data", case.dataset.content_hash), ("prior", case.source.prior.content_hash)):
            if hashes[name] != now:
                raise InputError(f"The {name} changed since the audit; audit again, then repair.")

        def again(classifier: HuggingFaceClassifier, out: Path) -> None:
            recipe = case.source.recipe.changed(**audit.report["recipe"])
            explainer = self._explainer(case, classifier, pulse, None, recipe)
            policy = Policy(**audit.report["policy"])
            self._run_audit(case, explainer, policy, out, hashes["seed"], hashes["batch"], pulse, None)

        return again

    def _put_zip(self, job_id: str, name: str, folder: Path) -> None:
        """Stores a folder as one zip file; the same files give the same bytes."""
        target = folder.parent / name
        with zipfile.ZipFile(target, "w") as packed:
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                self._stop.check()
                entry = zipfile.ZipInfo(file.relative_to(folder.parent).as_posix(), (1980, 1, 1, 0, 0, 0))
                entry.external_attr = 0o644 << 16
                # PNG and safetensors hardly shrink, and packing them costs more than sending them.
                with file.open("rb") as source, packed.open(entry, "w", force_zip64=True) as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
        self.store.put(job_id, name, target)


def open_table(configuration: Configuration) -> JobTable:
    """The configuration's job table."""
    return JobTable(
        configuration.database_url,
        stale_seconds=configuration.stale_seconds,
        max_attempts=configuration.max_attempts,
    )


def worker_name() -> str:
    """A name that no other worker has or had."""
    return f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _audit_result(content: dict[str, Any]) -> dict[str, Any]:
    from audit.verdict import Outcome

    kept = ("verdict", "reliance", "limit", "n_images", "flip_rate", "worst_direction", "headline", "reasons")
    return {name: content[name] for name in kept if name in content} | {
        "bounds": [content["lower"], content["upper"]],
        "findings": content["findings"],
        "exit_code": int(Outcome(content["verdict"]).exit_code),
    }


# The process -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Runs a worker until SIGTERM or SIGINT, or until the process that started it is gone."""
    parser = argparse.ArgumentParser(prog="python -m service.worker", description=__doc__, allow_abbrev=False)
    parser.add_argument("--name", help="name in the job table (default: made of host and process)")
    parser.add_argument(
        "--supervised",
        action="store_true",
        help="read the configuration as JSON from the first line of stdin; each further line wakes the worker, and the "
        "end of stdin ends it",
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A thread waits for signals: a handler would run in the main thread, and not before torch gives it back.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        configuration = Configuration(**json.loads(_first_line())) if args.supervised else Configuration.load()
    except InputError as error:
        print(f"pfungst: error: {error}", file=sys.stderr)
        return 2
    threads = str(configuration.threads_per_worker)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read when torch is imported, which is later
        os.environ.setdefault(variable, threads)
    lower_process(configuration.nice)
    worker = Worker(configuration, args.name)
    for listen in (_await_signal, _await_supervisor) if args.supervised else (_await_signal,):
        threading.Thread(target=listen, args=(worker,), name=listen.__name__, daemon=True).start()
    worker.run()
    worker.table.close()
    return 0


def _first_line() -> bytes:
    """The first line of stdin, read without a buffer: a thread that waits in one cannot be ended in good order."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return bytes(line)


def _await_supervisor(worker: Worker) -> None:
    """Wakes the worker for every line; at the end of stdin the process that started it is gone, and it ends too."""
    while os.read(sys.stdin.fileno(), 4096):
        worker.wake()
    _end(worker)


def _await_signal(worker: Worker) -> None:
    signal.sigwait(ENDING)
    _end(worker)


def _end(worker: Worker) -> None:
    """Ends the worker after its step. One that takes too long is left behind: what is finished is on the disk."""
    worker.stop()
    time.sleep(worker.configuration.grace_seconds)
    try:
        worker.table.interrupt(worker.name)
    finally:
        os._exit(ENDED_BY_SIGNAL)


if __name__ == "__main__":
    sys.exit(main())
