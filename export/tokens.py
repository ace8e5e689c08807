"""What a transformer's graph says in many small operators, in few: on a CPU each costs more than its arithmetic.

Passes over a folded graph, in this order:
    copies         clones, and expansions and reshapes that change nothing, vanish
    shared values  what is the same for every sample of a batch is computed once and broadcast
    rows           a batch of products with one constant matrix is one product of all rows
    linear maps    linear maps of one input are one
    norms          a layer norm that is scaled and shifted does both itself
    attention      products over batch and heads need no reshape; queries, keys and values are laid out by one transpose
    reshapes       sums, activations and norms between linear maps work on rows, as those do

Sizes are pairs, at the batch size that was recorded and at one larger: equal pairs are equal for every batch.
"""

import operator
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from export.fold import VIEWS, constant, fold_constants, merge_duplicates, new_constant, replace, tidy

aten = torch.ops.aten
Sizes = tuple[tuple[int, int], ...]
RESHAPES = (*VIEWS, aten.unsqueeze.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
# Operators with the place of the axis that they work along; samples stay apart if it is not the first.
ALONG_AN_AXIS: dict[Any, int] = {
    aten.unsqueeze.default: 1,
    aten.slice.Tensor: 1,
    aten._softmax.default: 1,
    aten.cat.default: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}


def simplify(graph: GraphModule) -> None:
    """All passes, in place."""
    drop_copies(graph)
    share_over_batch(graph)
    fold_constants(graph, repeated=False)
    products_of_rows(graph)
    fold_constants(graph)
    drop_copies(graph)
    merge_duplicates(graph)
    merge_linear_maps(graph)
    merge_splits(graph)
    norms_with_scale_and_shift(graph)
    products_over_heads(graph)
    drop_copies(graph)
    transpose_before_splitting(graph)
    join_before_splitting(graph)
    reshape_last(graph)
    drop_copies(graph)
    merge_duplicates(graph)


def drop_copies(graph: GraphModule) -> None:
    """Every view is a reshape of what is really there, and none of them keeps a shape as it is."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        is_expansion = node.target is aten.expand.default
        if node.target is aten.clone.default or (is_expansion and sizes(graph, node) == sizes(graph, node.args[0])):
            replace(node, node.args[0])
        elif node.target in RESHAPES:
            source = node.args[0]
            while source.target in RESHAPES:
                source = source.args[0]
            with graph.graph.inserting_before(node):
                same = sizes(graph, node) == sizes(graph, source)
                new = source if same else reshaped(graph, source, sizes(graph, node))
            if new is not None:
                replace(node, new)
    tidy(graph)


def products_of_rows(graph: GraphModule) -> None:
    """bmm(x, W repeated) + b, as torch records a linear map of a tensor with gaps, is one linear map of all rows."""
    for node in list(graph.graph.nodes):
        if node.target is not aten.bmm.default:
            continue
        x, repeated = node.args
        matrix = _without_expansion(repeated)
        width, out = sizes(graph, node.args[0])[-1][0], sizes(graph, node)
        if matrix.op != "get_attr" or constant(graph, matrix).numel() != width * out[-1][0]:
            continue
        if sum(a != b for a, b in out) > 1:
            continue
        add = _sole_user(_past_views(node))
        bias = _vector(graph, add, node) if add is not None and add.target is aten.add.Tensor else None
        last = node if bias is None else add
        assert last is not None
        with graph.graph.inserting_before(last):
            rows = emit(graph, aten.reshape.default, x, [-1, width])
            if constant(graph, matrix).ndim != 2:
                matrix = new_constant(graph, constant(graph, matrix).reshape(width, -1))
            product = (
                emit(graph, aten.mm.default, rows, matrix)
                if bias is None
                else emit(graph, aten.addmm.default, bias, rows, matrix)
            )
            new = reshaped(graph, product, sizes(graph, last))
        assert new is not None
        replace(last, new)
    tidy(graph)


def share_over_batch(graph: GraphModule) -> None:
    """What starts as one value repeated for every sample stays one value until it meets what differs.

    All that follows from the timestep alone is such a value: its embedding and every modulation of a norm.
    """
    batch = next((node for node in graph.graph.nodes if node.target is aten.sym_size.int), None)
    single: dict[Node, Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "call_function":
            with graph.graph.inserting_before(node):
                new = _single(graph, node, single, batch)
            if new is not None:
                single[node] = new
    for node, new in single.items():
        others = [user for user in node.users if user not in single]
        if not others or not isinstance(new.meta["val"], Tensor):
            continue
        count, *rest = sizes(graph, node)
        with graph.graph.inserting_after(node):
            times = batch if count[0] != count[1] else count[0]
            full = emit(graph, aten.expand.default, new, [times, *(a for a, _ in rest)])
        for user in others:
            user.replace_input_with(node, full)
    tidy(graph)


def _single(graph: GraphModule, node: Node, single: dict[Node, Node], batch: Node | None) -> Node | None:
    """The same operator for one sample, if its value is the same for all; broadcasts in place if only an input is."""
    target: Any = node.target
    args: Any = node.args
    if target is operator.getitem:
        return emit(graph, target, single[args[0]], args[1]) if args[0] in single else None
    if not isinstance(node.meta.get("val"), Tensor) and target not in (*SPLITS, aten.native_layer_norm.default):
        return None
    if target is aten.expand.default:
        return _single_expansion(graph, node, single, batch)
    shared = [n for n in node.all_input_nodes if n in single]
    if not shared:
        return None
    others = [n for n in node.all_input_nodes if n not in single]
    own = map_arg(args, lambda n: single.get(n, n))
    axes = len(sizes(graph, shared[0]))
    if target is aten.bmm.default:
        return None if others else emit(graph, target, *own)
    if target is aten.mm.default or target is aten.addmm.default:
        alone = args[-2] in single and all(n.op == "get_attr" for n in others)
        return emit(graph, target, *own, **node.kwargs) if alone else None
    if target is aten.native_layer_norm.default:
        alone = args[0] in single and len(args[1]) < axes and all(n.op == "get_attr" for n in others)
        return emit(graph, target, *own) if alone else None
    if target in ALONG_AN_AXIS:
        place = ALONG_AN_AXIS[target]
        axis = args[place] if len(args) > place else 0
        axis = int(axis) % (axes + (target is aten.unsqueeze.default))
        return emit(graph, target, *own, **node.kwargs) if axis > 0 and not others else None
    if target is aten.reshape.default:
        before, after = sizes(graph, args[0]), sizes(graph, node)
        if before[0] != after[0] or any(a != b for a, b in after[1:]):
            return None
        return emit(graph, target, own[0], [1, *(a for a, _ in after[1:])])
    return _single_pointwise(graph, node, own, shared, others)


def _single_expansion(graph: GraphModule, node: Node, single: dict[Node, Node], batch: Node | None) -> Node | None:
    x: Any = node.args[0]
    sizes_given: Any = node.args[1]
    before, after = sizes(graph, x), sizes(graph, node)
    if x in single:
        same = len(before) == len(after) and before[0] == after[0]
        return emit(graph, aten.expand.default, single[x], [1, *sizes_given[1:]]) if same else None
    count = after[0]
    if count == (1, 1) or (count[0] != count[1] and (batch is None or count != _ints(batch))):
        return None
    if len(before) == len(after) and before[0] != (1, 1):
        return None
    return emit(graph, aten.expand.default, x, [1, *sizes_given[1:]])


def _single_pointwise(graph: GraphModule, node: Node, own: Any, shared: list[Node], others: list[Node]) -> Node | None:
    target: Any = node.target
    if torch.Tag.pointwise not in getattr(target, "tags", ()) and target is not aten._to_copy.default:
        return None
    out = sizes(graph, node)
    if any(len(sizes(graph, n)) != len(out) for n in shared):
        return None
    differ = [n for n in others if _is_tensor(graph, n) and len(sizes(graph, n)) == len(out)]
    if all(sizes(graph, n)[0] == (1, 1) for n in differ):
        return emit(graph, target, *own, **node.kwargs)
    new = emit(graph, target, *own, **node.kwargs)
    if sizes(graph, new) == out:
        replace(node, new)
    return None


def merge_linear_maps(graph: GraphModule) -> None:
    """Linear maps of one input, as one whose outputs are taken apart: queries, keys and values; all modulations."""
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.target is aten.addmm.default and not node.kwargs:
            bias, x, matrix = node.args
            if bias.op == matrix.op == "get_attr" and constant(graph, bias).ndim == 1:
                groups[x].append(node)
    for x, nodes in groups.items():
        if len(nodes) < 2:
            continue
        biases = [constant(graph, node.args[0]) for node in nodes]  # type: ignore[arg-type]
        matrices = [constant(graph, node.args[2]) for node in nodes]  # type: ignore[arg-type]
        with graph.graph.inserting_before(nodes[0]):
            bias, matrix = new_constant(graph, torch.cat(biases)), new_constant(graph, torch.cat(matrices, dim=1))
            whole = emit(graph, aten.addmm.default, bias, x, matrix)
            parts = emit(graph, aten.split_with_sizes.default, whole, [len(b) for b in biases], 1)
            for place, node in enumerate(nodes):
                replace(node, emit(graph, operator.getitem, parts, place))
    tidy(graph)


def merge_splits(graph: GraphModule) -> None:
    """Parts of parts along the last of two axes, as one split."""
    for node in list(graph.graph.nodes):
        if node.target is not aten.split_with_sizes.default or len(node.meta["val"][0].shape) != 2:
            continue
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        widths: list[int] = []
        moved: list[tuple[Node, int]] = []
        for place, width in enumerate(node.args[1]):
            part = parts.get(place)
            inner = _sole_user(part) if part is not None else None
            if inner is not None and inner.target in SPLITS and _axis(inner) in (1, -1):
                moved += [(user, len(widths) + _arguments(user)[1]) for user in inner.users]
                widths += [piece.shape[1] for piece in inner.meta["val"]]
                continue
            if part is not None:
                moved.append((part, len(widths)))
            widths.append(width)
        if len(widths) == len(node.args[1]):
            continue
        with graph.graph.inserting_before(node):
            # The parts of a single row are vectors, which norms take as they are.
            vector = sizes(graph, node.args[0])[0] == (1, 1)
            row = emit(graph, aten.reshape.default, node.args[0], [-1]) if vector else node.args[0]
            whole = emit(graph, aten.split_with_sizes.default, row, widths, 0 if vector else 1)
        for user, place in moved:
            with graph.graph.inserting_before(user):
                part = emit(graph, operator.getitem, whole, place)
                replace(user, emit(graph, aten.reshape.default, part, [1, -1]) if vector else part)
    tidy(graph)


def norms_with_scale_and_shift(graph: GraphModule) -> None:
    """norm(x)·a + b with one a and b for all rows: the norm takes them as its own weight and bias."""
    for add in list(graph.graph.nodes):
        if add.target is not aten.add.Tensor or add.kwargs:
            continue
        for mul, shift in (_arguments(add), _arguments(add)[::-1]):
            if not isinstance(mul, Node) or mul.target is not aten.mul.Tensor or list(mul.users) != [add]:
                continue
            for normed, scale in (_arguments(mul), _arguments(mul)[::-1]):
                norm = _plain_norm(normed)
                if norm is None or _sole_user(normed) is not mul:
                    continue
                x, shape, _, _, epsilon = _arguments(norm)
                if not all(_one_row(graph, row, shape, x) for row in (scale, shift)):
                    continue
                with graph.graph.inserting_before(add):
                    rows = [emit(graph, aten.reshape.default, row, list(shape)) for row in (scale, shift)]
                    whole = emit(graph, aten.native_layer_norm.default, x, shape, *rows, epsilon)
                    replace(add, emit(graph, operator.getitem, whole, 0))
    tidy(graph)


def products_over_heads(graph: GraphModule) -> None:
    """bmm between reshapes that lay batch and heads together and apart again: a product over both axes."""
    for node in list(graph.graph.nodes):
        product = _arguments(node)[0] if node.target is aten.reshape.default else None
        if not isinstance(product, Node) or product.target is not aten.bmm.default or list(product.users) != [node]:
            continue
        if any(not isinstance(x, Node) or x.target is not aten.reshape.default for x in product.args):
            continue
        a, b = (x.args[0] for x in _arguments(product))
        axes = [sizes(graph, x) for x in (a, b, node)]
        inner = [sizes(graph, x) for x in (*product.args, product)]
        if any(len(s) != 4 or s[:2] != axes[2][:2] for s in axes):
            continue
        if any(whole[2:] != flat[1:] for whole, flat in zip(axes, inner, strict=True)):
            continue
        with graph.graph.inserting_before(node):
            replace(node, emit(graph, aten.matmul.default, a, b))
    tidy(graph)


def transpose_before_splitting(graph: GraphModule) -> None:
    """Parts of a linear map that are each cut into heads and transposed: one cut, one transpose, then the parts."""
    for node in list(graph.graph.nodes):
        if node.target is not aten.split_with_sizes.default or _axis(node) != 1 or len(node.meta["val"][0].shape) != 2:
            continue
        parts = sorted(node.users, key=lambda user: user.args[1])
        heads = [_sole_user(part) for part in parts]
        turned = [None if cut is None else _sole_user(cut) for cut in heads]
        if len(parts) != len(node.args[1]) or any(
            not _is_cut_and_turned(*pair) for pair in zip(heads, turned, strict=True)
        ):
            continue
        shapes = [sizes(graph, cut) for cut in heads]
        counts = [shape[2][0] for shape in shapes]
        wanted = (*shapes[0][:2], (sum(counts), sum(counts)), shapes[0][3])
        if any((*shape[:2], shape[3]) != (*wanted[:2], wanted[3]) for shape in shapes):
            continue
        if [count * wanted[3][0] for count in counts] != list(node.args[1]):
            continue
        with graph.graph.inserting_before(node):
            cut = reshaped(graph, node.args[0], wanted)
            if cut is None:
                continue
            whole = emit(graph, aten.transpose.int, cut, 1, 2)
            split = emit(graph, aten.split_with_sizes.default, whole, counts, 1)
            for place, old in enumerate(turned):
                assert old is not None
                replace(old, emit(graph, operator.getitem, split, place))
    tidy(graph)


def _is_cut_and_turned(cut: Node | None, turned: Node | None) -> bool:
    if cut is None or turned is None or cut.target is not aten.reshape.default or len(cut.meta["val"].shape) != 4:
        return False
    return turned.target is aten.transpose.int and sorted(turned.args[1:]) == [1, 2]  # type: ignore[type-var]


def join_before_splitting(graph: GraphModule) -> None:
    """First parts of some tensors joined, second parts joined, and so on: the tensors joined, then taken apart."""
    groups: dict[Any, dict[int, Node]] = defaultdict(dict)
    for node in graph.graph.nodes:
        if node.target is not aten.cat.default or len(node.args) != 2:
            continue
        if all(x.target is operator.getitem and x.args[0].target in SPLITS for x in node.args[0]):
            places = {x.args[1] for x in node.args[0]}
            if len(places) == 1:
                groups[tuple(x.args[0] for x in node.args[0]), node.args[1]][places.pop()] = node
    for (splits, axis), cats in groups.items():
        first = splits[0]
        widths, along = list(first.args[1]) if isinstance(first.args[1], (list, tuple)) else [], _axis(first)
        same = all(s.target is aten.split_with_sizes.default and list(s.args[1]) == widths for s in splits)
        same = same and all(_axis(s) == along for s in splits)
        if not same or axis == along or min(axis, along) < 0 or sorted(cats) != list(range(len(widths))):
            continue
        if any(len(user.users) != 1 for split in splits for user in split.users):
            continue
        ordered = [node for node in graph.graph.nodes if node in cats.values()]
        with graph.graph.inserting_before(ordered[0]):
            whole = emit(graph, aten.cat.default, [split.args[0] for split in splits], axis)
            parts = emit(graph, aten.split_with_sizes.default, whole, widths, along)
            for place, node in cats.items():
                replace(node, emit(graph, operator.getitem, parts, place))
    tidy(graph)


def reshape_last(graph: GraphModule) -> None:
    """Work on each element, and norms of rows, come before the reshapes of what they work on, so that these meet."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        with graph.graph.inserting_before(node):
            new = _norm_before_reshape(graph, node) or _pointwise_before_reshape(graph, node)
        if new is not None:
            replace(node, new)
    tidy(graph)


def _norm_before_reshape(graph: GraphModule, node: Node) -> Node | None:
    norm: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if norm is None or norm.target is not aten.native_layer_norm.default or len(norm.args[1]) != 1:
        return None
    rows = _source_of_rows(graph, norm.args[0])
    if rows is None:
        return None
    whole = emit(graph, norm.target, rows, *norm.args[1:])
    return reshaped(graph, emit(graph, operator.getitem, whole, 0), sizes(graph, node))


def _pointwise_before_reshape(graph: GraphModule, node: Node) -> Node | None:
    """Every operand is a number, a row for all, or as large as the result, and one of these is reshaped."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    out = sizes(graph, node)
    if not out or sum(a != b for a, b in out) > 1:
        return None
    operands = [n for n in node.all_input_nodes if _is_tensor(graph, n)]
    shapes = {n: sizes(graph, n) for n in operands}
    rows = next((rows for n in operands if shapes[n] == out and (rows := _source_of_rows(graph, n)) is not None), None)
    if rows is None:
        return None
    wanted = sizes(graph, rows)
    new: dict[Node, Node] = {}
    for n in operands:
        if shapes[n] == out:
            source = _source_of_rows(graph, n)
            moved = source if source is not None and sizes(graph, source) == wanted else reshaped(graph, n, wanted)
        elif shapes[n] and all(axis == (1, 1) for axis in shapes[n][:-1]) and shapes[n][-1] == out[-1]:
            moved = n if len(shapes[n]) == 1 else emit(graph, aten.reshape.default, n, [-1])
        elif not shapes[n]:
            moved = n
        else:
            moved = None
        if moved is None:
            return None
        new[n] = moved
    result = emit(graph, node.target, *map_arg(node.args, lambda n: new.get(n, n)), **node.kwargs)
    return reshaped(graph, result, out)


def _source_of_rows(graph: GraphModule, x: Any) -> Node | None:
    """What a reshape was made of, if both have the same last axis and the source has fewer."""
    if not isinstance(x, Node) or x.target is not aten.reshape.default:
        return None
    source: Any = x.args[0]
    before, after = sizes(graph, source), sizes(graph, x)
    kept = bool(before) and bool(after) and before[-1] == after[-1] and len(before) < len(after)
    return source if kept and sum(a != b for a, b in before) <= 1 else None


def emit(graph: GraphModule, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new operator that knows its sizes."""
    node = graph.graph.call_function(target, args, kwargs)
    for key in ("val", "larger"):
        hollow = partial(_hollow, graph, key=key)
        node.meta[key] = target(*map_arg(args, hollow), **map_arg(kwargs, hollow))
    return node


def sizes(graph: GraphModule, node: Any) -> Sizes:
    """The axes of a tensor, each at two batch sizes."""
    first, second = (_hollow(graph, node, key) for key in ("val", "larger"))
    return tuple(zip(first.shape, second.shape, strict=True))


def reshaped(graph: GraphModule, x: Any, wanted: Sizes) -> Node | None:
    """x in another shape; None if two axes depend on the batch."""
    if sum(a != b for a, b in wanted) > 1:
        return None
    return emit(graph, aten.reshape.default, x, [a if a == b else -1 for a, b in wanted])


def _hollow(graph: GraphModule, node: Node, key: str) -> Any:
    """A value without content, or a number."""
    if node.op == "get_attr":
        return torch.empty_like(constant(graph, node), device="meta")
    value = node.meta.get(key, node.meta.get("val"))
    return map_aggregate(
        value, lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, Tensor) else v
    )


def _arguments(node: Node) -> Any:
    """An operator's arguments, whose types only the operator knows."""
    return node.args


def _axis(split: Node) -> int:
    return int(_arguments(split)[2]) if len(split.args) > 2 else 0


def _is_tensor(graph: GraphModule, node: Node) -> bool:
    return node.op == "get_attr" or isinstance(node.meta.get("val"), Tensor)


def _ints(node: Node) -> tuple[int, int]:
    return node.meta["val"], node.meta["larger"]


def _sole_user(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _past_views(node: Node) -> Node:
    """The node itself, or the last of the reshapes that follow it alone."""
    user = _sole_user(node)
    return _past_views(user) if user is not None and user.target in VIEWS else node


def _without_expansion(node: Any) -> Any:
    while node.target in VIEWS or node.target is aten.expand.default:
        node = node.args[0]
    return node


def _vector(graph: GraphModule, add: Node, product: Node) -> Node | None:
    """The constant vector, as long as a product's rows, that an addition adds to it."""
    if add.kwargs or sizes(graph, add)[-1] != sizes(graph, product)[-1]:
        return None
    for value in add.args:
        if isinstance(value, Node) and value.op == "get_attr" and constant(graph, value).ndim == 1:
            return value
    return None


def _plain_norm(value: Any) -> Node | None:
    """The layer norm without weights whose output a value is."""
    if not isinstance(value, Node) or value.target is not operator.getitem or value.args[1] != 0:
        return None
    norm: Any = value.args[0]
    plain = norm.target is aten.native_layer_norm.default and norm.args[2] is None and norm.args[3] is None
    return norm if plain else None


def _one_row(graph: GraphModule, row: Any, shape: Any, x: Any) -> bool:
    """Whether a value is one row of a norm's shape, in the precision of what is normed."""
    if not isinstance(row, Node) or not _is_tensor(graph, row):
        return False
    lead = sizes(graph, row)[: -len(shape)]
    tail = sizes(graph, row)[-len(shape) :]
    same = _hollow(graph, row, "val").dtype == _hollow(graph, x, "val").dtype
    return same and all(axis == (1, 1) for axis in lead) and tail == tuple((n, n) for n in shape)
