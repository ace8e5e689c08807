"""Pixels that are laid out only to be folded again stay channels.

A decoder's folded tail (`tail`) makes the 2×2 pixels of a place as channels and lays them out as a picture; a surrogate
begins by folding 2×2 pixels into channels. Between the two there is only work on each pixel by itself: scales and
shifts, whole or per picture channel. The second layout undoes the first, so the surrogate may read the tail's channels,
and its gradient, which takes the same way back, never becomes a picture at all.

A layout that stays is done in two steps, columns and then rows: ONNX Runtime moves one axis three times as fast as it
permutes six.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from export.fold import absorb_affine_maps, constant, new_constant, replace, tidy
from export.tokens import emit, sizes

aten = torch.ops.aten
LAID_OUT, FOLDED = [0, 1, 4, 2, 5, 3], [0, 1, 3, 5, 2, 4]
TILE = (2, 2)


def meet_layouts(graph: GraphModule) -> None:
    """Work on pixels between a layout and the folding that undoes it is done on channels."""
    found = False
    for node in list(graph.graph.nodes):
        picture = _source(graph, node, FOLDED)
        if picture is None:
            continue
        chain: list[Node] = []
        while (channels := _source(graph, picture, LAID_OUT)) is None:
            chain.append(picture)
            step = _pixelwise(graph, picture)
            if step is None:
                break
            picture = step
        if channels is None or sizes(graph, channels) != sizes(graph, node):
            continue
        with graph.graph.inserting_before(node):
            value = channels
            for step in reversed(chain):
                before = next(n for n in step.all_input_nodes if n.op != "get_attr")
                new = {n: _for_each_pixel(graph, n) for n in step.all_input_nodes if n.op == "get_attr"}
                value = emit(graph, step.target, *map_arg(step.args, {**new, before: value}.__getitem__), **step.kwargs)
        replace(node, value)
        found = True
    tidy(graph)
    while found:
        found = absorb_affine_maps(graph)


def lay_out_in_steps(graph: GraphModule) -> None:
    """Every layout of channels as pixels moves the columns of its tiles into place first, and then the rows."""
    for node in list(graph.graph.nodes):
        if not _is(node, aten.permute.default) or list(node.args[1]) != LAID_OUT or len(node.users) != 1:
            continue
        ((picture,), split) = node.users, node.args[0]
        if not _is(picture, aten.reshape.default):
            continue
        _, _, (s, _), (t, _), (h, _), (w, _) = sizes(graph, split)
        with graph.graph.inserting_before(node):
            columns = emit(graph, aten.reshape.default, split, [-1, t, h, w])
            columns = emit(graph, aten.permute.default, columns, [0, 2, 3, 1])
            rows = emit(graph, aten.reshape.default, columns, [-1, s, h, w * t])
            rows = emit(graph, aten.permute.default, rows, [0, 2, 1, 3])
            replace(picture, emit(graph, aten.reshape.default, rows, picture.args[1]))
    tidy(graph)


def _source(graph: GraphModule, node: Any, order: list[int]) -> Node | None:
    """What a reshape, a permutation in that order and a reshape were made of, where they move 2×2 tiles."""
    if not _is(node, aten.reshape.default) or not _is(node.args[0], aten.permute.default):
        return None
    permuted: Any = node.args[0]
    if list(permuted.args[1]) != order or not _is(permuted.args[0], aten.reshape.default):
        return None
    split = sizes(graph, permuted.args[0])
    rows, columns = (3, 5) if order == FOLDED else (2, 3)
    c, *place = (split[1], split[2], split[4]) if order == FOLDED else (split[1], split[4], split[5])
    few = (c, *((2 * a, 2 * b) for a, b in place))
    many = ((4 * c[0], 4 * c[1]), *place)
    before, after = (few, many) if order == FOLDED else (many, few)
    if (split[rows][0], split[columns][0]) != TILE or sizes(graph, node)[1:] != after:
        return None
    source: Any = permuted.args[0].args[0]
    if sizes(graph, source)[1:] == before:
        return source
    with graph.graph.inserting_before(permuted):  # a reshape before it has merged with this one
        return emit(graph, aten.reshape.default, permuted.args[0], [-1, *(size for size, _ in before)])


def _pixelwise(graph: GraphModule, node: Node) -> Node | None:
    """The picture that a node works on pixel by pixel, with numbers and constants per picture channel besides."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default
    pictures = [n for n in node.all_input_nodes if n.op != "get_attr"]
    if not pointwise or len(pictures) != 1 or sizes(graph, pictures[0]) != sizes(graph, node):
        return None
    channels = sizes(graph, node)[1][0]
    shapes = [tuple(constant(graph, n).shape) for n in node.all_input_nodes if n.op == "get_attr"]
    return pictures[0] if all(shape in ((), (1, channels, 1, 1)) for shape in shapes) else None


def _for_each_pixel(graph: GraphModule, node: Node) -> Node:
    value = constant(graph, node)
    return node if value.ndim == 0 else new_constant(graph, value.repeat_interleave(4, dim=1))


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target
