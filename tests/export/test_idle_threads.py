"""Torch's threads make room for ONNX Runtime's, and come back."""

import os
import sys

import pytest
import torch

from engine.runtime import onnx_runtime


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_idle_threads_end_and_start_again() -> None:
    if onnx_runtime._gnu_openmp() is None:
        pytest.skip("this torch does not bring GNU's OpenMP")
    before = torch.get_num_threads()
    x = torch.ones(4_000_000)
    torch.set_num_threads(2)
    try:
        for _ in range(2):
            assert (x + 1).sum() == 8_000_000
            working = len(os.listdir("/proc/self/task"))
            onnx_runtime.release_idle_threads()
            assert len(os.listdir("/proc/self/task")) == working - 1
    finally:
        torch.set_num_threads(before)
