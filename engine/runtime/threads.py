"""Torch's threads beside those of another runtime, on the same cores."""

import ctypes
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

OMP_PAUSE_SOFT = 1


def lonely_pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads run torch's operators each by itself; none are started if `threads` is 0.

    A thread that calls torch would otherwise get a team of helpers of its own. Even asleep, they make OpenMP believe
    that there are more threads than cores, and then every team of the process sleeps between operators: eager torch
    was measured at half its speed. Torch keeps one number of threads for threads to come and one for each thread; the
    first is put back.
    """
    if not threads:
        return ThreadPoolExecutor(1)
    everybody = threading.Barrier(threads)

    def start() -> None:
        torch.get_num_threads()  # the first look takes the common number over, which a later one then leaves alone
        torch.set_num_threads(1)
        everybody.wait()

    with one_thread():
        pool = ThreadPoolExecutor(threads, thread_name_prefix="share")
        for started in [pool.submit(start) for _ in range(threads)]:
            started.result()
    return pool


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's operators in this thread run in it alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def release_idle_threads() -> None:
    """Ends the calling thread's OpenMP team, which torch starts again when it next needs one.

    After a parallel operator of torch its other threads busy-wait for the next one, for about 10^7 cycles each, and
    take a core that a session could compute on. A no-op where torch brings another OpenMP library than GNU's.
    """
    library = _gnu_openmp()
    if library is not None:
        library.omp_pause_resource_all(OMP_PAUSE_SOFT)


@cache
def _gnu_openmp() -> Any:
    """The library that torch itself has loaded, never a second copy of it."""
    for file in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            library = ctypes.CDLL(str(file), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue
        if hasattr(library, "omp_pause_resource_all"):
            return library
    return None
