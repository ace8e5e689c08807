"""A function that calls autograd, recorded as one graph of forward operators.

torch.export alone cannot capture `torch.autograd.grad`; `make_fx` can, because it records what autograd dispatches. The
rules rewrite backward operators while they are recorded, and `fold` then moves all that depends on weights alone into
the weights.

A free batch size is found by difference: the function is recorded at two batch sizes, and a number that grows with the
batch is a multiple of it. make_fx's symbolic mode would take upsampling apart into indexing, which runs slowly.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.errors import ModelError
from export.fold import constant, fold
from export.layout import lay_out_in_steps, meet_layouts
from export.rules import FORWARD_RULES, RULES, Rule, UnsupportedOperator
from export.tokens import simplify

aten = torch.ops.aten


def trace(
    function: Callable[..., Any], examples: Sequence[Tensor], dynamic: Sequence[bool] = (), *, gradient: bool = True
) -> GraphModule:
    """The graph of `function` at inputs like the examples; `dynamic` marks those whose first axis is a free batch.

    Nothing is computed but constants: inputs are fake. Weights are frozen tensors that the function closes over.
    Without `gradient` some operators need not be taken apart.
    """
    rules = RULES if gradient else FORWARD_RULES
    graph = record(function, examples, rules)
    if any(dynamic):
        larger = [torch.cat([x, x[:1]]) if free else x for x, free in zip(examples, dynamic, strict=True)]
        first = list(dynamic).index(True)
        free_batch(graph, record(function, larger, rules), first, len(examples[first]))
    fold(graph)
    simplify(graph)
    meet_layouts(graph)
    lay_out_in_steps(graph)
    graph.graph.lint()
    graph.recompile()
    refuse_backward_operators(graph)
    return graph


def record(function: Callable[..., Any], examples: Sequence[Tensor], rules: dict[Any, Rule]) -> GraphModule:
    """What `function` dispatches at these shapes, with backward operators rewritten and attention written out."""
    recorder = make_fx(function, decomposition_table=rules, tracing_mode="fake", _allow_non_fake_inputs=True)
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    # Otherwise half-precision attention would be recorded as float32 products; softmax has its own rule.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            graph = recorder(*examples)
        return graph if not _mutates(graph) else without_mutation(graph, examples)
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedOperator(f"The network cannot be traced for export: {_first_line(error)}") from error
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def without_mutation(graph: GraphModule, examples: Sequence[Tensor]) -> GraphModule:
    """The same graph with every write as a new tensor: folding a view would lose what is written to it."""
    functional = torch.func.functionalize(graph, remove="mutations")
    return make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)


def _mutates(graph: GraphModule) -> bool:
    targets = (node.target for node in graph.graph.nodes)
    return any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in targets)


def free_batch(graph: GraphModule, larger: GraphModule, placeholder: int, batch: int) -> None:
    """Numbers that differ between `graph`, recorded at `batch`, and `larger`, at batch + 1, are read off the input."""
    nodes, others = list(graph.graph.nodes), list(larger.graph.nodes)
    if [str(n.target) for n in nodes] != [str(n.target) for n in others]:
        raise UnsupportedOperator(
            "The network runs different operators for different batch sizes; export static sizes."
        )
    inputs = [node for node in nodes if node.op == "placeholder"]
    with graph.graph.inserting_after(inputs[-1]):
        size = graph.graph.call_function(aten.sym_size.int, (inputs[placeholder], 0))
    size.meta.update(val=batch, larger=batch + 1)

    def freed(value: Any, other: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(freed(a, b) for a, b in zip(value, other, strict=True))
        if isinstance(value, Node) or value == other:
            return value
        times = value // batch if isinstance(value, int) else 0
        if (value, other) != (times * batch, times * (batch + 1)):
            raise UnsupportedOperator("The network depends on the batch size other than by shape; export static sizes.")
        if times == 1:
            return size
        product = graph.graph.call_function(operator.mul, (size, times))
        product.meta.update(val=value, larger=other)
        return product

    for node, other in zip(nodes, others, strict=True):
        if node.op == "get_attr" and constant(graph, node).shape != constant(larger, other).shape:
            raise UnsupportedOperator("The network holds a constant for each sample of a batch; export static sizes.")
        if "val" in other.meta:
            node.meta["larger"] = other.meta["val"]
        if node.op == "call_function":
            with graph.graph.inserting_before(node):
                node.args = freed(node.args, other.args)
                node.kwargs = {name: freed(value, other.kwargs[name]) for name, value in node.kwargs.items()}
    graph.recompile()


def refuse_backward_operators(graph: GraphModule) -> None:
    """An UnsupportedOperator names a backward operator that no rule has rewritten."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and "backward" in str(node.target):
            raise UnsupportedOperator(
                f"The gradient of the network needs {node.target}, which has no rule for export. Replace that layer, "
                "or distil the default surrogate from the classifier's predictions."
            )


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
