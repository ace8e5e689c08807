"""What depends on weights alone is computed once, at export, and moves into the weights.

Passes over a traced graph, in this order:
    detaching      autograd's detach marks vanish
    constants      operators whose inputs are all constant become constants (flipped kernels, batch-norm scales)
    duplicates     equal operators on equal inputs are computed once
    pools          the adjoint of nearest upsampling after a convolution becomes that convolution's stride
    affine maps    per-channel scales and shifts beside a convolution go into its kernels and bias
    batch sizes    reshapes say -1 in place of a batch size that would have to be computed at run time
"""

import operator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def fold(graph: GraphModule) -> None:
    """All passes, in place."""
    drop_detaching(graph)
    fold_constants(graph, repeated=False)
    merge_duplicates(graph)
    absorb_pools(graph)
    while absorb_affine_maps(graph):
        pass
    loosen_views(graph)
    tidy(graph)


def drop_detaching(graph: GraphModule) -> None:
    """A detached value is the value itself in a graph without autograd."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default):
            replace(node, node.args[0])
    tidy(graph)


def fold_constants(graph: GraphModule, *, repeated: bool = True) -> None:
    """Evaluates every operator whose inputs are constants.

    Unless `repeated`, a constant that is repeated for every sample stays so: `tokens` makes it one for all.
    """
    values: dict[Node, Any] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            values[node] = constant(graph, node)
            continue
        if node.op != "call_function":
            continue
        if node.target is aten.ones_like.default and node.meta["val"].ndim == 0:
            # Where autograd starts: a one shaped like the loss, whose value nobody needs.
            values[node] = torch.ones((), dtype=node.meta["val"].dtype)
        elif not repeated and node.target is aten.expand.default:
            continue
        elif _pure(node) and all(n in values for n in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
        if isinstance(values.get(node), Tensor):
            with graph.graph.inserting_before(node):
                new = new_constant(graph, values[node])
            values[new] = values[node]
            replace(node, new)
    tidy(graph)


def merge_duplicates(graph: GraphModule) -> None:
    """Computes equal expressions once."""
    seen: dict[Any, Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            tensor = constant(graph, node)
            key: Any = ("get_attr", tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if not tensor.numel():
                continue
        elif node.op == "call_function" and _pure(node):
            key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        else:
            continue
        if key in seen:
            replace(node, seen[key])
        else:
            seen[key] = node
    tidy(graph)


def absorb_pools(graph: GraphModule) -> None:
    """A convolution of stride 1 and an average over s×s tiles are one convolution of stride s.

    Summing the tiles sums the kernel at s×s offsets: k + s - 1 taps a side, at a quarter of the positions for s = 2.
    """
    for pool in list(graph.graph.nodes):
        if pool.target is not aten.avg_pool2d.default or len(pool.args) > 3 or not _is_convolution(pool.args[0]):
            continue
        conv, tile = pool.args[0], list(pool.args[1])
        x, weight, bias, stride, padding, dilation, _, _, groups = conv.args
        kernel = constant(graph, weight)
        same = all(2 * p == k - 1 for p, k in zip(padding, kernel.shape[2:], strict=True))
        if len(conv.users) != 1 or list(pool.args[2]) != tile or list(stride) + list(dilation) != [1] * 4 or not same:
            continue
        ones = torch.ones(1, 1, *tile, dtype=torch.float64)
        flat = kernel.double().reshape(-1, 1, *kernel.shape[2:])
        wide = F.conv2d(flat, ones, padding=(tile[0] - 1, tile[1] - 1)) / (tile[0] * tile[1])
        wide = wide.reshape(*kernel.shape[:2], *wide.shape[2:]).to(kernel.dtype)
        with graph.graph.inserting_before(pool):
            args = (x, new_constant(graph, wide), bias, tile, padding, dilation, False, [0, 0], groups)
            replace(pool, graph.graph.call_function(aten.convolution.default, args))
    tidy(graph)


def absorb_affine_maps(graph: GraphModule) -> bool:
    """Per-channel scales before or after a convolution, and shifts after it; whether anything was found."""
    changed = False
    for node in list(graph.graph.nodes):
        changed |= _absorb_after(graph, node) or _absorb_before(graph, node)
    tidy(graph)
    return changed


def _absorb_after(graph: GraphModule, node: Node) -> bool:
    """scale·conv(x) + shift as one convolution."""
    kind = _affine_kind(node)
    if kind is None:
        return False
    conv: Any = node.args[0]
    other: Any = node.args[1]
    if not _is_convolution(conv) and kind in ("mul", "add"):
        conv, other = other, conv
    if not _is_convolution(conv) or len(conv.users) != 1:
        return False
    weight = constant(graph, conv.args[1])
    values = _per_channel(graph, other, weight.shape[0])
    if values is None:
        return False
    kernel = weight.double()
    bias = None if conv.args[2] is None else constant(graph, conv.args[2]).double()
    if kind in ("mul", "div"):
        factor = values if kind == "mul" else 1.0 / values
        kernel = kernel * factor.reshape(-1, 1, 1, 1)
        bias = None if bias is None else bias * factor
    else:
        shift = values if kind == "add" else -values
        bias = shift.expand(weight.shape[0]) if bias is None else bias + shift
    _replace_convolution(graph, node, conv, conv.args[0], kernel.to(weight.dtype), bias)
    return True


def _absorb_before(graph: GraphModule, node: Node) -> bool:
    """conv(scale·x): padding adds zeros, which no scale changes."""
    if not _is_convolution(node) or node.args[8] != 1:
        return False
    scaled: Any = node.args[0]
    if _affine_kind(scaled) not in ("mul", "div") or len(scaled.users) != 1:
        return False
    x, other = scaled.args
    kernel_node, bias_node = cast(Node, node.args[1]), node.args[2]
    weight = constant(graph, kernel_node)
    values = _per_channel(graph, other, weight.shape[1])
    if values is None and _affine_kind(scaled) == "mul":
        x, other = other, x
        values = _per_channel(graph, other, weight.shape[1])
    if values is None or not isinstance(x, Node):
        return False
    factor = values if _affine_kind(scaled) == "mul" else 1.0 / values
    kernel = (weight.double() * factor.reshape(1, -1, 1, 1)).to(weight.dtype)
    bias = constant(graph, bias_node).double() if isinstance(bias_node, Node) else None
    _replace_convolution(graph, node, node, x, kernel, bias)
    return True


def _replace_convolution(
    graph: GraphModule, node: Node, conv: Node, x: Any, kernel: Tensor, bias: Tensor | None
) -> None:
    with graph.graph.inserting_before(node):
        shift = None if bias is None else new_constant(graph, bias.to(kernel.dtype))
        args = (x, new_constant(graph, kernel), shift, *conv.args[3:])
        replace(node, graph.graph.call_function(aten.convolution.default, args))


def loosen_views(graph: GraphModule) -> None:
    """A reshape with one computed size says -1 for it, and an expansion keeps a size that is already there."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in VIEWS:
            shape = list(node.args[1])
            if sum(isinstance(size, Node) for size in shape) == 1 and -1 not in shape:
                node.args = (node.args[0], [-1 if isinstance(size, Node) else size for size in shape])


def constant(graph: GraphModule, node: Node) -> Tensor:
    """The tensor behind a get_attr node."""
    value: Any = graph
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value.detach()


def new_constant(graph: GraphModule, value: Tensor) -> Node:
    """A get_attr node for a new tensor."""
    number = sum(1 for name in graph._buffers if name.startswith("constant_"))
    while f"constant_{number}" in graph._buffers:
        number += 1
    name = f"constant_{number}"
    graph.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))
    return graph.graph.get_attr(name)


def replace(node: Node, new: Node) -> None:
    """All users of a node use another; what is known of its value moves along."""
    for key in ("val", "larger"):
        if key in node.meta:
            new.meta.setdefault(key, node.meta[key])
    node.replace_all_uses_with(new)


def tidy(graph: GraphModule) -> None:
    """Removes what nobody uses, constants too. The code follows at the end: to write it takes longer than a pass."""
    graph.graph.eliminate_dead_code()
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [name for name in (*graph._buffers, *graph._parameters, *vars(graph)) if _is_constant_name(name)]:
        if name not in used:
            delattr(graph, name)


def _is_constant_name(name: str) -> bool:
    return name.startswith(("constant_", "_tensor_constant", "_param_constant"))


def _pure(node: Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _is_convolution(node: Any) -> bool:
    return (
        isinstance(node, Node)
        and node.target is aten.convolution.default
        and not node.args[6]
        and isinstance(node.args[1], Node)
        and node.args[1].op == "get_attr"
        and (node.args[2] is None or (isinstance(node.args[2], Node) and node.args[2].op == "get_attr"))
    )


def _affine_kind(node: Any) -> str | None:
    if not isinstance(node, Node) or node.op != "call_function" or len(node.args) != 2 or node.kwargs:
        return None
    names: dict[Any, str] = {aten.mul: "mul", aten.div: "div", aten.add: "add", aten.sub: "sub"}
    return names.get(getattr(node.target, "overloadpacket", None))


def _per_channel(graph: GraphModule, value: Any, channels: int) -> Tensor | None:
    """A number, or a constant that has one value per channel, as float64 of shape [] or [C]."""
    if isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Node) or value.op != "get_attr":
        return None
    tensor = constant(graph, value)
    if tensor.numel() == 1:
        return tensor.double().reshape(())
    shape = [1] * (4 - tensor.ndim) + list(tensor.shape)
    return tensor.double().reshape(-1) if shape == [1, channels, 1, 1] else None


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _hashable(item)) for key, item in value.items()))
    # 1, 1.0 and True are equal as keys but not as arguments.
    return (type(value).__name__, value)
