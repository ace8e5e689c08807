"""Who stands back when there is not enough of the processor: audits first, then explanations, answers last of all."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

__all__ = ["lower_process", "lower_thread"]

AUTOGROUP = Path("/proc/self/autogroup")


def lower_process(by: int) -> None:
    """Makes this process stand back; to be called before it has other threads, which inherit it.

    Linux may treat every session as one group and share the processor between groups, whatever the niceness of their
    members. A process that leads its own session therefore lowers its group too.
    """
    niceness = os.nice(by)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # another system, or one without such groups
            AUTOGROUP.write_text(str(niceness))


def lower_thread(by: int) -> None:
    """Makes this thread, and those that it starts, stand back behind the others of its process; on Linux alone."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + by)
