"""The BentoML service: it hosts the application of `service.http`; everything else stands in the configuration.

Of BentoML's own addresses /livez and /readyz stay, which ask the backend. One process serves. Audits run in worker
processes beside it, interactive work in one thread that owns the device.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

os.environ.setdefault("BENTOML_DO_NOT_TRACK", "True")  # read when bentoml is imported

import bentoml
from anyio import to_thread
from starlette.types import ASGIApp, Receive, Scope, Send

from service.configuration import Configuration
from service.http.app import build_app, door_settings
from service.http.backend import Backend
from service.http.door import Door
from service.http.errors import envelope
from service.http.metrics import Metrics

LONGEST_REQUEST_SECONDS = 900.0
"""Where BentoML breaks a request off that nothing was answered to. Routes that wait have a shorter limit of their own,
which stops their work too. BentoML keeps a timer of this length for every request, also after it was answered: an hour
of them would be a hundred thousand."""

log = logging.getLogger("pfungst.serving")
configuration = Configuration.load()
metrics = Metrics()


class Mounted:
    """What BentoML mounts when the class is made; the application behind it comes with the instance."""

    app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on."""
        answer = self.app or envelope(503, "The service is starting.")
        await answer(scope, receive, send)


mounted = Mounted()


def settings() -> dict[str, Any]:
    """What BentoML is told."""
    return {
        "workers": 1,
        "resources": {"gpu": configuration.gpus} if configuration.gpus else {"cpu": "1"},
        "traffic": {"timeout": LONGEST_REQUEST_SECONDS},
        "http": {"host": configuration.host},
        # BentoML's figures have a series for every address that was ever asked, ids and nonsense included.
        "metrics": {"enabled": False},
        "logging": {"access": {"enabled": False}},  # the door keeps its own, with request ids and without addresses
    }


@bentoml.service(name="pfungst", **settings())
@bentoml.asgi_app(mounted, path="/")
class Audit:
    """Audits of deployed image classifiers."""

    def __init__(self) -> None:
        logging.getLogger("pfungst").setLevel(logging.INFO)
        self.backend = Backend.open(configuration, metrics)
        self.backend.start()
        mounted.app = build_app(self.backend)
        _tell_when_asked_to_end(self.backend.stopping)

    @bentoml.on_shutdown
    def close(self) -> None:
        """Ends workers and device; jobs that were running go back to the queue."""
        mounted.app = None
        self.backend.stop()

    async def __is_alive__(self) -> bool:
        return self.backend.alive

    async def __is_ready__(self) -> bool:
        problems = await to_thread.run_sync(self.backend.problems)
        if problems:
            log.warning("not ready: %s", "; ".join(problems))
        return not problems


Audit.add_asgi_middleware(Door, **door_settings(configuration, metrics))  # type: ignore[attr-defined]  # a Service


def _tell_when_asked_to_end(stopping: threading.Event) -> None:
    """The server waits for open streams before it ends, so they have to hear of the signal that it got."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)

        def end(signum: int, frame: FrameType | None, before: Any = before) -> None:
            stopping.set()
            if callable(before):
                before(signum, frame)

        signal.signal(number, end)
