"""What a worker says of its job while torch is busy with it: how far it is, and that the worker lives."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from service.configuration import Configuration
from service.jobs import Job, JobTable, Signal
from service.stop import Reason, Stop

log = logging.getLogger("pfungst.worker")

PROGRESS_SECONDS = 0.5
"""Least time between two reports of progress."""


class Pulse:
    """A thread that reports progress and hears whether to go on; torch may be busy for long in the other one."""

    def __init__(self, table: JobTable, job: Job, worker: str, configuration: Configuration, stop: Stop) -> None:
        self.table, self.job, self.worker, self.stop = table, job, worker, stop
        self.every, self.patience = configuration.heartbeat_seconds, configuration.stale_seconds
        self._lock, self._news, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self._progress: dict[str, Any] | None = None
        self._untold, self._advanced = False, False
        self._passed: list[dict[str, Any]] = []  # stages that ended before a beat told of them
        self._stage, self._stage_start, self._stage_done = "", time.monotonic(), 0
        self._thread = threading.Thread(target=self._run, name=f"pulse-{job.id[:8]}", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._news.set()
        self._thread.join()

    def report(self, stage: str, done: int, total: int | None, *, advanced: bool = False) -> None:
        """Says how far the job is; `advanced` says that what is done survives a crash."""
        with self._lock:
            now = time.monotonic()
            if stage != self._stage:
                if self._untold and self._progress is not None:
                    self._passed.append(self._progress)
                # What an earlier worker did is no measure of this one's pace: the first report of a stage is its start.
                self._stage, self._stage_start, self._stage_done = stage, now, max(0, done - 1)
            gained = done - self._stage_done
            left = None
            if total is not None and gained > 0:
                left = round((total - done) * (now - self._stage_start) / gained, 1)
            self._progress = {"stage": stage, "done": done, "total": total, "seconds_left": left}
            self._untold, self._advanced = True, self._advanced or advanced
        self._news.set()

    def _run(self) -> None:
        heard = time.monotonic()
        while not self._ended.is_set():
            with self._lock:
                progress, advanced, self._advanced = self._progress, self._advanced, False
                passed, self._passed, self._untold = self._passed, [], False
                self._news.clear()
            try:
                while passed:
                    self.table.beat(self.job.id, self.worker, passed[0])
                    del passed[0]
                answer = self.table.beat(self.job.id, self.worker, progress, advanced=advanced)
                heard = time.monotonic()
                if answer is Signal.CANCEL:
                    self.stop.set(Reason.CANCELLED)
                elif answer is Signal.LOST:
                    self.stop.set(Reason.LOST)
            except Exception:
                log.exception("job %s: the heartbeat did not reach the jobs", self.job.id)
                with self._lock:
                    self._passed, self._untold = passed + self._passed, True
                    self._advanced = self._advanced or advanced
                if time.monotonic() - heard > self.patience:  # another worker may have it by now
                    self.stop.set(Reason.LOST)
            self._ended.wait(min(PROGRESS_SECONDS, self.every))
            self._news.wait(max(0.0, self.every - PROGRESS_SECONDS))
        if self._passed:
            self._tell_last()

    def _tell_last(self) -> None:
        """Tells of stages that passed since the last beat; the job is over, and no answer matters any more."""
        try:
            for stage in (*self._passed, self._progress):
                self.table.beat(self.job.id, self.worker, stage)
        except Exception:
            log.exception("job %s: its last stages did not reach the jobs", self.job.id)
