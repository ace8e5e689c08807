"""Who stands back: a process with its whole session, a thread with those that it starts."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from service.priority import lower_thread

LOWERED = """
import os
from pathlib import Path
from service.priority import lower_process

lower_process(7)
group = Path("/proc/self/autogroup")
print(os.nice(0), group.read_text() if group.exists() else "")
"""


@pytest.mark.parametrize("leads", [True, False])
def test_a_process_lowers_its_session_only_where_it_leads_it(leads: bool) -> None:
    """Otherwise the shell that a worker was started from would stand back with it."""
    found = subprocess.run(
        [sys.executable, "-c", LOWERED],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=leads,
    )
    own, _, group = found.stdout.strip().partition(" ")
    assert int(own) == os.nice(0) + 7
    assert not group or group.endswith("nice 7") is leads


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux alone")
def test_a_thread_stands_back_with_those_it_starts_and_without_the_others() -> None:
    found: list[int] = []

    def note() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def work() -> None:
        lower_thread(5)
        note()
        inner = threading.Thread(target=note)
        inner.start()
        inner.join()

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    note()
    assert found == [before + 5, before + 5, before]
