"""Why a job ends early: the token that the engine asks at every guided step."""

from engine.errors import Cancelled


class Reason:
    """Why a job stops before its end."""

    CANCELLED = "cancelled"
    STOPPING = "the worker has to stop"
    LOST = "the job is another worker's"
    FULL = "the disk is full"


class Stop:
    """A cancel token that knows why; the first reason stays."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def is_set(self) -> bool:
        """Whether to stop."""
        return self.reason is not None

    def set(self, reason: str) -> None:
        """Stops at the next guided step."""
        self.reason = self.reason or reason

    def check(self) -> None:
        """Cancelled, where it is set."""
        if self.is_set():
            raise Cancelled(f"The job was stopped: {self.reason}.")
