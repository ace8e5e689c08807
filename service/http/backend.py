"""What the routes work with: jobs, artifacts, workers and the device of one service, started and stopped together."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from service.artifacts import ArtifactStore
from service.configuration import Configuration
from service.executor import Executor, LocalExecutor
from service.http.batching import Device
from service.http.explanations import Explanations, Question
from service.http.metrics import Metrics
from service.http.registry import Registry
from service.jobs import JobTable
from service.worker import open_table

log = logging.getLogger("pfungst.http")

STUCK_SECONDS = 900.0
"""A batch that takes longer has met a classifier that hangs; no thread can be stopped, but traffic can be sent away."""
DEVICE_NICE = 5
"""By how much explanations stand back behind the answers of the same process; audits stand back further."""
STOP_SECONDS = 5.0
"""The supervisor above takes a few more; all of it has to end within ten."""


@dataclass
class Backend:
    """All that stands behind the HTTP half."""

    configuration: Configuration
    jobs: JobTable
    artifacts: ArtifactStore
    executor: Executor
    explanations: Explanations
    registry: Registry
    metrics: Metrics
    device: Device[Question, dict[str, Any]] = field(init=False)
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the service is to end: streams and requests that wait then end by themselves."""

    def __post_init__(self) -> None:
        limits = self.configuration.limits
        self.device = Device(
            self.explanations,
            batch=limits.batch,
            queue=limits.queue,
            watch=self.metrics.batch,
            prepare=self.explanations.prepare,
            nice=DEVICE_NICE,
        )
        self.metrics.figure("pfungst_jobs", "Jobs by state.", "state", self.jobs.counts)
        self.metrics.figure("pfungst_workers", "Workers that live.", "kind", lambda: {"audit": self.executor.alive()})
        self.metrics.figure(
            "pfungst_questions_waiting",
            "Questions in the device's queue.",
            "kind",
            lambda: {"explain": self.device.waiting},
        )
        self.metrics.figure("pfungst_device_bytes", "Memory that tensors hold on the device.", "device", device_bytes)

    @classmethod
    def open(cls, configuration: Configuration, metrics: Metrics | None = None) -> Backend:
        """The backend that a configuration describes, not yet started."""
        jobs, metrics = open_table(configuration), metrics or Metrics()
        return cls(
            configuration,
            jobs,
            ArtifactStore(configuration.artifacts_url),
            LocalExecutor(configuration, jobs),
            Explanations(configuration, metrics.stage),
            Registry(configuration),
            metrics,
        )

    def start(self) -> None:
        """Starts workers and device."""
        self.executor.start()
        self.device.start()

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Ends both within `timeout` seconds; what the workers were at goes back to the queue."""
        self.stopping.set()
        self.device.stop(0.0)
        self.executor.stop(timeout)
        if not self.device.stop(1.0):
            log.warning("the device is still at a step that does not end")
        self.jobs.close()

    def problems(self) -> list[str]:
        """Why the service is not ready; empty where it is."""
        found = []
        try:
            self.jobs.counts()
        except Exception:
            log.exception("the jobs cannot be reached")
            found.append("the job table cannot be reached")
        if self.configuration.workers and not self.executor.alive():
            found.append("no worker lives")
        if not self.device.alive:
            found.append("the device's thread ended")
        elif not self.device.prepared:
            found.append("the device is being prepared")
        elif self.device.busy_seconds > STUCK_SECONDS:
            found.append("the device has been at one batch for too long")
        return found

    @property
    def alive(self) -> bool:
        """Whether a restart would not help."""
        return self.device.alive


def device_bytes() -> dict[str, float]:
    """Memory on each accelerator; nothing before torch was needed, for asking would import it."""
    if "torch" not in sys.modules:
        return {}

    from audit.answers import device_memory

    return {name: float(n) for name, n in device_memory().items()}
