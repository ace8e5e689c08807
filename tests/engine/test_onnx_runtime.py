"""ONNX Runtime as a runtime: the provider that was asked for, the graph that fits, and clear refusals.

Whole folders of graphs are tested in tests/export/test_artifact.py: only that room can write them.
"""

from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from engine.errors import InputError, ModelError, WeightsError
from engine.runtime.onnx_runtime import GraphFile, Port, check_shapes, open_session, pick_graph, read_manifest


def graph_file(largest: int, fixed: bool = True) -> GraphFile:
    return GraphFile(
        file=f"decoder-{largest}.onnx",
        sha256="",
        fixed_batch=fixed,
        largest_batch=largest,
        inputs=(Port(name="z", dtype="float32", shape=(None, 4, 8, 8)),),
        outputs=(Port(name="image", dtype="float32", shape=(None, 3, 32, 32)),),
    )


def doubling() -> bytes:
    """An ONNX file that computes x + x."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch"]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "doubling", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def test_the_smallest_graph_that_fits_is_picked() -> None:
    files = tuple(map(graph_file, (8, 1, 4)))
    assert [pick_graph("decoder", files, batch).largest_batch for batch in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]
    for batch in (0, 9):
        with pytest.raises(InputError, match=f"batch of {batch} is outside what decoder was exported for, 1 to 8"):
            pick_graph("decoder", files, batch)


def test_a_wrong_shape_is_named() -> None:
    check_shapes("decoder", graph_file(4), [torch.zeros(3, 4, 8, 8)])
    with pytest.raises(InputError, match=r"z \['B', 4, 8, 8\]; this is \[3, 4, 16, 16\]"):
        check_shapes("decoder", graph_file(4), [torch.zeros(3, 4, 16, 16)])


def test_a_session_runs_without_spinning_on_the_threads_it_was_given() -> None:
    session = open_session(doubling(), threads=1)
    options = session.get_session_options()
    assert options.intra_op_num_threads == 1
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.run(None, {"x": torch.tensor([1.0, 2.0]).numpy()})[0].tolist() == [2.0, 4.0]


def test_a_provider_that_is_not_there_is_never_replaced_in_silence() -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine has the provider")
    with pytest.raises(ModelError, match=r"no CUDAExecutionProvider here.*choose the provider cpu"):
        open_session(doubling(), provider="cuda")
    with pytest.raises(InputError, match="provider 'gpu' is unknown"):
        open_session(doubling(), provider="gpu")


def test_what_is_no_graph_is_one_clear_error() -> None:
    with pytest.raises(ModelError, match="ONNX Runtime cannot open the graph"):
        open_session(b"not a graph")


def test_a_folder_without_a_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="pfungst export"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(WeightsError, match="cannot be read as a manifest"):
        read_manifest(tmp_path)
