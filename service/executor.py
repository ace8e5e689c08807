"""Who does the jobs of a service: an executor keeps workers alive, and the job table alone says what they do.

Workers are processes: torch in the serving process would keep its event loop waiting. Whatever else an executor may be
one day, it starts workers that claim from the same table, on this machine or on others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from service.configuration import Configuration
from service.jobs import JobTable
from service.worker import open_table, worker_name

__all__ = ["Executor", "LocalExecutor"]

log = logging.getLogger("pfungst.executor")

ROOT = Path(__file__).parent.parent
LOOK_SECONDS = 0.2
LONGEST_PAUSE = 30.0
HEALTHY_SECONDS = 60.0
"""A worker that lived so long is started again at once; one that dies young, after a pause that doubles."""


class Executor(Protocol):
    """Keeps workers at work."""

    def start(self) -> None:
        """Starts them."""
        ...

    def stop(self, timeout: float = 10.0) -> None:
        """Ends them within `timeout` seconds; what they were at goes back to the queue."""
        ...

    def wake(self) -> None:
        """Says that a job was submitted; without it workers find out a little later."""
        ...

    def alive(self) -> int:
        """How many workers live."""
        ...


@dataclass
class _Place:
    """Where one worker runs, and the next one after it."""

    process: subprocess.Popen[bytes] | None = None
    name: str = ""
    since: float = 0.0
    pause: float = 0.5
    due: float = field(default_factory=time.monotonic)


class LocalExecutor:
    """Worker processes on this machine, watched by a thread that starts a new one where one died.

    A worker hears through its stdin: the configuration, then a line for each call of `wake`, and the end of the stream
    when this process is gone, however that happened. So no worker outlives its service, and no secret touches the disk.
    """

    def __init__(self, configuration: Configuration, table: JobTable | None = None) -> None:
        self.configuration = configuration
        self._table = table
        self._places = [_Place() for _ in range(configuration.workers)]
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the workers and the thread that watches them."""
        if self._thread is not None:
            raise RuntimeError("the executor was started before")
        self._table = self._table or open_table(self.configuration)
        self._look()
        self._thread = threading.Thread(target=self._watch, name="pfungst-executor", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Ends all workers: first they are asked, and what is left after `timeout` seconds is killed."""
        until = time.monotonic() + timeout
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            running = [place for place in self._places if place.process is not None]
            for place in running:
                assert place.process is not None
                place.process.terminate()
            for place in running:
                self._bury(place, until)

    def wake(self) -> None:
        """Makes idle workers look at the queue."""
        with self._lock:
            for place in self._places:
                if place.process is not None and place.process.stdin is not None:
                    with contextlib.suppress(OSError):  # it died, and the thread will see
                        place.process.stdin.write(b"\n")
                        place.process.stdin.flush()

    def alive(self) -> int:
        """How many workers live. Without the lock, which is held while a dead worker's job is handed back: health
        checks do not wait for the database."""
        processes = [place.process for place in self._places]
        return sum(process is not None and process.poll() is None for process in processes)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        with self._lock:
            return [p.process.pid for p in self._places if p.process is not None and p.process.poll() is None]

    # Inside -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ending.wait(LOOK_SECONDS):
            try:
                self._look()
            except Exception:
                log.exception("the workers could not be looked after")

    def _look(self) -> None:
        """Starts what is due; where a worker died, its job goes back at once instead of when its silence is noticed."""
        with self._lock:
            now = time.monotonic()
            for place in self._places:
                if place.process is not None and (code := place.process.poll()) is not None:
                    lived = now - place.since
                    place.pause = 0.5 if lived > HEALTHY_SECONDS else min(LONGEST_PAUSE, place.pause * 2)
                    place.due = now + (0.0 if lived > HEALTHY_SECONDS else place.pause)
                    log.warning("worker %s ended with %d after %.0f s", place.name, code, lived)
                    self._hand_back(place)
                if place.process is None and now >= place.due and not self._ending.is_set():
                    self._start(place, now)

    def _start(self, place: _Place, now: float) -> None:
        place.name, place.since = worker_name(), now
        threads = str(self.configuration.threads_per_worker)
        known = os.environ.get("PYTHONPATH")
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([known] if known else [])]),
        }
        place.process = subprocess.Popen(
            [sys.executable, "-m", "service.worker", "--supervised", "--name", place.name],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the service, which then asks its workers to end
        )
        assert place.process.stdin is not None
        with contextlib.suppress(OSError):
            # Workers know nobody's token: they only work.
            settings = self.configuration.model_dump_json(exclude={"tokens", "host"})
            place.process.stdin.write(settings.encode() + b"\n")
            place.process.stdin.flush()

    def _bury(self, place: _Place, until: float) -> None:
        """Waits for a worker that was asked to end, and kills it where it does not."""
        process = place.process
        assert process is not None
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("worker %s did not end and is killed", place.name)
            process.kill()
            process.wait()
        self._hand_back(place)

    def _hand_back(self, place: _Place) -> None:
        process, place.process = place.process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if self._table is not None:
            self._table.interrupt(place.name, lost=True)
