"""Interactive work on the device: questions of different requests answered together, one batch at a time.

One thread owns the device. It takes the oldest question and all others that wait for the same kind of work, up to a
batch, and answers them with one call of the engine, whose result for an image does not depend on its batch mates.
Requests that are still being read are known too, and a batch waits a moment for them: fifty questions asked at once
are then one batch of fifty, not one of five and one of forty-five that costs nearly as much as all.

A question can be given up at any time: by its time limit, or because its asker went away. A batch stops at its next
step once nobody waits for it any more, so a request that timed out leaves nothing behind that holds the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from engine.errors import Cancelled
from service.priority import lower_thread

WINDOW_SECONDS = 0.05
"""A batch begins once no further question came for so long and none is on its way …"""
LONGEST_SECONDS = 1.0
"""… or so long after its first question; and what takes longer to be read is not waited for."""

Q = TypeVar("Q")
A = TypeVar("A")


class Full(Exception):
    """As many questions wait as are let in."""


class Closed(Exception):
    """The device takes no more questions."""


@dataclass(eq=False)
class Asked(Generic[Q, A]):
    """A question that waits or is being answered."""

    kind: Hashable
    question: Q
    answer: Future[A] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)
    _given_up: threading.Event = field(default_factory=threading.Event)

    def give_up(self) -> None:
        """Nobody waits for this answer any more."""
        self._given_up.set()

    @property
    def given_up(self) -> bool:
        """Whether nobody waits."""
        return self._given_up.is_set()


class Coming:
    """A request that is being read: a question, or nothing, will come of it."""

    def __init__(self, withdraw: Callable[[Coming], None]) -> None:
        self.since = time.monotonic()
        self._withdraw = withdraw

    def __enter__(self) -> Coming:
        return self

    def __exit__(self, *exception: object) -> None:
        self.arrived()

    def arrived(self) -> None:
        """The question was asked, or there is none; once said, it may be said again."""
        self._withdraw(self)


class NobodyWaits:
    """A cancel token: set once every question of a batch was given up, or the device is to stop."""

    def __init__(self, batch: Sequence[Asked[Any, Any]], stopping: threading.Event) -> None:
        self.batch = batch
        self.stopping = stopping

    def is_set(self) -> bool:
        """What the engine asks at each step."""
        return self.stopping.is_set() or all(asked.given_up for asked in self.batch)


Work = Callable[[Any, Sequence[Q], NobodyWaits], Sequence[A | Exception]]
"""Answers questions of one kind; an answer that is an exception concerns that question alone."""


class Device(Generic[Q, A]):
    """One thread that answers questions in batches."""

    def __init__(
        self,
        work: Work[Q, A],
        *,
        batch: int,
        queue: int,
        window: float = WINDOW_SECONDS,
        longest: float = LONGEST_SECONDS,
        watch: Callable[[int, float], None] | None = None,
        prepare: Callable[[], None] | None = None,
        nice: int = 0,
    ) -> None:
        """`prepare` is called in the thread before its first question; `nice` is by how much the thread stands back."""
        self.work = work
        self.batch = batch
        self.queue = queue
        self.window = window
        self.longest = longest
        self.watch = watch
        self.prepare = prepare
        self.nice = nice
        self._waiting: deque[Asked[Q, A]] = deque()
        self._coming: set[Coming] = set()
        self._prepared = threading.Event()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._busy_since: float | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="pfungst-device", daemon=True)
        self._thread.start()

    def expect(self) -> Coming:
        """Says that a request is being read, which a batch that is about to begin waits for a moment."""
        coming = Coming(self._withdraw)
        with self._changed:
            self._coming.add(coming)
        return coming

    def ask(self, kind: Hashable, question: Q) -> Asked[Q, A]:
        """Puts a question into the queue; Full or Closed where it cannot be taken."""
        asked: Asked[Q, A] = Asked(kind, question)
        with self._changed:
            if self._stopping.is_set():
                raise Closed
            if self.waiting >= self.queue:
                raise Full
            self._waiting.append(asked)
            self._changed.notify_all()
        return asked

    @property
    def waiting(self) -> int:
        """Questions in the queue that somebody waits for."""
        return sum(not asked.given_up for asked in self._waiting.copy())

    @property
    def busy_seconds(self) -> float:
        """For how long the current batch has been worked on; 0 where there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def prepared(self) -> bool:
        """Whether the thread is through with what it does before its first question."""
        return self._prepared.is_set()

    def stop(self, timeout: float) -> bool:
        """Cancels everything and waits for the thread; whether it ended in time."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.alive

    def _withdraw(self, coming: Coming) -> None:
        with self._changed:
            if coming in self._coming:
                self._coming.remove(coming)
                self._changed.notify_all()

    def _run(self) -> None:
        lower_thread(self.nice)
        if self.prepare is not None:
            self.prepare()
        self._prepared.set()
        while batch := self._next():
            self._busy_since = time.monotonic()
            try:
                self._answer(batch)
            finally:
                if self.watch is not None:
                    self.watch(len(batch), self.busy_seconds)
                self._busy_since = None
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
        for asked in left:
            _settle(asked, Cancelled("The service is stopping."))

    def _next(self) -> list[Asked[Q, A]]:
        """The next batch; empty once the device is to stop."""
        while not self._stopping.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping.is_set())
                if self._stopping.is_set() or not self._waiting:
                    continue
                first = self._waiting[0]
                self._gather(first)
                batch = [asked for asked in self._waiting if asked.kind == first.kind and not asked.given_up]
                batch = batch[: self.batch]
                taken = set(map(id, batch))
                dropped = [asked for asked in self._waiting if asked.given_up]
                self._waiting = deque(a for a in self._waiting if id(a) not in taken and not a.given_up)
            for asked in dropped:
                _settle(asked, Cancelled("Nobody waits for the answer."))
            if batch:
                return batch
        return []

    def _gather(self, first: Asked[Q, A]) -> None:
        """Waits until a batch is full, or nothing more comes, or its first question has waited long enough."""
        until = first.since + self.longest
        while not self._stopping.is_set():
            alike = [asked for asked in self._waiting if asked.kind == first.kind and not asked.given_up]
            now = time.monotonic()
            if not alike or len(alike) >= self.batch or now >= until:
                return
            quiet = alike[-1].since + self.window
            if any(now - coming.since < self.longest for coming in self._coming):
                quiet = until
            if now >= quiet:
                return
            self._changed.wait(min(quiet, until) - now)

    def _answer(self, batch: list[Asked[Q, A]]) -> None:
        try:
            answers = self.work(batch[0].kind, [asked.question for asked in batch], NobodyWaits(batch, self._stopping))
        except Exception as error:
            for asked in batch:
                _settle(asked, error)
            return
        for asked, answer in zip(batch, answers, strict=True):
            _settle(asked, answer)


def _settle(asked: Asked[Any, Any], answer: Any) -> None:
    """Hands the answer over, if the asker has not cancelled the future."""
    if not asked.answer.set_running_or_notify_cancel():
        return
    if isinstance(answer, Exception):
        asked.answer.set_exception(answer)
    else:
        asked.answer.set_result(answer)
