"""A traced graph becomes ONNX by torchlib's own functions, for any batch, and the graph itself stays as it was."""

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.onnx_runtime import open_session
from export import translate
from export.rules import UnsupportedOperator
from export.trace import trace


def run(program: torch.onnx.ONNXProgram, folder: Path, **feed: Tensor) -> list[Tensor]:
    program.save(str(folder / "graph.onnx"))
    onnx.checker.check_model(str(folder / "graph.onnx"))
    session = open_session((folder / "graph.onnx").read_bytes())
    return [torch.from_numpy(x) for x in session.run(None, {name: x.numpy() for name, x in feed.items()})]


def test_types_that_meet_are_cast_and_the_batch_stays_free(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def function(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return (x.half() * n[:, None]) @ weight.half(), x.reshape(len(x) * 2, 2) * 0.1 + n.sum()

    examples = (torch.randn(2, 4), torch.tensor([1, 2]))
    graph = trace(function, examples, [True, True], gradient=False)
    before = str(graph.code)
    program = translate.translate(graph, examples, [True, True], ["x", "n"], ["product", "folded"])
    assert str(graph.code) == before
    assert [value.name for value in program.model.graph.outputs] == ["product", "folded"]
    x, n = torch.randn(5, 4), torch.arange(5)
    for found, expected in zip(run(program, tmp_path, x=x, n=n), function(x, n), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_an_operator_without_a_function_goes_the_long_way(tmp_path: Path) -> None:
    known = {entry[0].fx_target for entry in translate._registry().functions.values()}
    assert torch.ops.aten.softshrink.default not in known  # else this test needs another operator
    x = torch.randn(2, 3)
    program = translate.translate(trace(F.softshrink, (x,), gradient=False), (x,), [False], ["x"], ["y"])
    torch.testing.assert_close(run(program, tmp_path, x=x)[0], F.softshrink(x))


def test_what_nobody_can_translate_is_named() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(UnsupportedOperator, match="hypot"):
        translate.translate(trace(torch.hypot, (x, x), gradient=False), (x, x), [False] * 2, ["x", "y"], ["z"])
