"""TensorRT takes every graph: TensorRT-RTX parses and builds them on the CPU, strongly typed, for three GPUs.

The graphs of the embedded priors are built in test_prove.py.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.roofline import filled, resnet_18, sd3_medium
from engine.errors import InputError
from engine.recipe import Recipe
from export import rtx
from export.graphs import contracts, traced, write_graph

pytestmark = [
    pytest.mark.rtx,
    pytest.mark.skipif(not rtx.available(), reason="TensorRT-RTX is not installed (extra `rtx`)"),
]


@pytest.mark.slow
def test_a_full_width_shallow_sd3_builds_at_128_pixels(tmp_path: Path) -> None:
    """SD3-medium's widths with a ResNet-18 guide; depth repeats what is built here."""
    # Two layers, for the last is of another build than those before it; one block per level of the decoder.
    prior = filled(sd3_medium(layers=2, blocks=1))
    made = contracts(prior, resnet_18("cpu", torch.float32), Recipe(), 128, 128, "fp16")
    for name in ("velocity", "guidance"):
        file = tmp_path / f"{name}.onnx"
        write_graph(made[name], traced(made[name], 1), file, 1)
        built = rtx.build(file, None)
        assert built.error is None and built.bytes > 0, (name, built)
        assert built.capabilities == ("SM80", "SM89", "SM120")


def test_a_file_that_is_no_graph_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    assert rtx.build(tmp_path / "broken.onnx", None).error
    with pytest.raises(InputError, match="SM90"):
        rtx.build(tmp_path / "broken.onnx", None, ("SM80", "SM90"))
