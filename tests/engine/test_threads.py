"""Torch's threads make room for ONNX Runtime's, and come back."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.runtime import threads


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_idle_threads_end_and_start_again() -> None:
    if threads._gnu_openmp() is None:
        pytest.skip("this torch does not bring GNU's OpenMP")
    before = torch.get_num_threads()
    x = torch.ones(4_000_000)
    torch.set_num_threads(2)
    try:
        for _ in range(2):
            assert (x + 1).sum() == 8_000_000
            working = len(os.listdir("/proc/self/task"))
            threads.release_idle_threads()
            assert len(os.listdir("/proc/self/task")) == working - 1
    finally:
        torch.set_num_threads(before)


def test_threads_of_a_lonely_pool_call_torch_alone_and_leave_others_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool = threads.lonely_pool(2)
        assert [pool.submit(torch.get_num_threads).result() for _ in range(4)] == [1] * 4
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as newcomer:
            assert newcomer.submit(torch.get_num_threads).result() == 3
        with threads.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
