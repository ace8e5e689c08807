"""A traced graph as an ONNX model, operator by operator.

torch.onnx.export would record a graph twice more before it translates anything: once to capture it and once to
decompose it, which is most of its time. A traced graph is both already. Its operators are therefore translated as they
stand, by the functions that torch.onnx.export uses (torchlib); the exporter itself is asked only where an operator has
no such function. Its inner parts are called here, which torch being pinned to one version allows, and what comes out is
proven in any case.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from onnxscript import ir, optimizer, version_converter
from onnxscript.rewriter import onnx_fusions
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import extract_val
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.onnx._internal.exporter import _core, _ir_passes, _registration
from torch.onnx._internal.fx.passes import type_promotion

from export.fold import constant
from export.rules import UnsupportedOperator

OPSET = 20
IR_VERSION = 10
LARGEST_BATCH = 4096


def translate(
    graph: GraphModule, examples: Sequence[Tensor], free: Sequence[bool], inputs: Sequence[str], outputs: Sequence[str]
) -> torch.onnx.ONNXProgram:
    """The ONNX model of a traced graph; `free` marks inputs whose first axis is a batch of any size.

    An UnsupportedOperator if an operator can be translated in neither way.
    """
    with warnings.catch_warnings(), _quiet(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return _translated(graph, examples, free, inputs, outputs)
        except torch.onnx.OnnxExporterError:
            return _exported(graph, examples, free, inputs, outputs)


def _translated(
    graph: GraphModule, examples: Sequence[Tensor], free: Sequence[bool], inputs: Sequence[str], outputs: Sequence[str]
) -> torch.onnx.ONNXProgram:
    own = copy.copy(graph)  # the weights are shared, the list of operators is not
    own.graph = copy.deepcopy(graph.graph)
    _promote(own, examples, free)
    model = ir.Model(ir.Graph([], [], nodes=[], name="main_graph"), ir_version=IR_VERSION, producer_name="pfungst")
    settings: dict[str, Any] = {"owned_graphs": {}, "lower": "at_conversion", "registry": _registry()}
    _core._translate_fx_graph(own.graph, model, graph_like=model.graph, **settings)
    _ir_passes.add_opset_imports(model)
    version_converter.convert_version(model, OPSET, fallback=True)
    optimizer.optimize_ir(model)
    onnx_fusions.fuse(model)
    _ir_passes.rename_inputs(model, inputs)
    _ir_passes.rename_outputs(model, outputs)
    return torch.onnx.ONNXProgram(model, None)


class _Promotion(type_promotion._TypePromotionInterpreter):
    """Casts where types meet, which ONNX does not do by itself; and every value's shape, with the batch as a symbol."""

    def run_node(self, n: Node) -> Any:
        """The value of one operator, which is noted."""
        value = super().run_node(n)
        n.meta["val"] = extract_val(value)
        return value


def _promote(graph: GraphModule, examples: Sequence[Tensor], free: Sequence[bool]) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fake = [
        mode.from_tensor(
            x,
            # Axes of equal size share a symbol, so all batches are one.
            symbolic_context=StatelessSymbolicContext(
                [DimDynamic.DUCK if batch and axis == 0 else DimDynamic.STATIC for axis in range(x.ndim)]
            ),
        )
        for x, batch in zip(examples, free, strict=True)
    ]
    with mode, enable_python_dispatcher():
        _Promotion(graph, type_promotion.TypePromotionTable()).run(*fake)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = constant(graph, node)  # the weights themselves, to be written


def _exported(
    graph: GraphModule, examples: Sequence[Tensor], free: Sequence[bool], inputs: Sequence[str], outputs: Sequence[str]
) -> torch.onnx.ONNXProgram:
    axis = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    try:
        program = torch.onnx.export(
            graph,
            tuple(examples),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=tuple({0: axis} if batch else {} for batch in free),
            verbose=False,
            optimize=True,
            input_names=list(inputs),
            output_names=list(outputs),
        )
    except torch.onnx.OnnxExporterError as error:
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise UnsupportedOperator(f"The network cannot be written as ONNX: {reason}") from error
    assert program is not None
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, the exporter does not complain about each operator that its source line is unknown."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@cache
def _registry() -> Any:
    """Which function translates which operator."""
    return _registration.ONNXRegistry.from_torchlib(opset_version=OPSET)
