"""Pixels that are laid out only to be folded again stay channels.

A decoder's folded tail (`tail`) makes the 2×2 pixels of a place as channels and lays them out as a picture; a surrogate
begins by folding 2×2 pixels into channels. Between the two there is only work on each pixel by itself: scales and
shifts, whole or per picture channel. The second layout undoes the first, so the surrogate may read the tail's channels,
and its gradient, which takes the same way back, never becomes a picture at all.
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


def _source(graph: GraphModule, node: Any, order: list[int]) -> Node | None:
    """What a reshape, a permutation in that order and a reshape were made of, where they move 2×2 tiles."""
    if not _is(node, aten.reshape.default) or not _is(node.args[0], aten.permute.default):
        return None
    permuted: Any = node.args[0]
    if list(permuted.args[1]) != order or not _is(permuted.args[0], aten.reshape.default):
        return None
    split = sizes(graph, permuted.args[0])
    rows, columns = (3, 5) if order == FOLDED else (2, 3)
    source: Any = permuted.args[0].args[0]
    tiles = (split[rows][0], split[columns][0]) == TILE
    c, *place = (split[1], split[2], split[4]) if order == FOLDED else (split[1], split[4], split[5])
    few = (c, *((2 * a, 2 * b) for a, b in place))
    many = ((4 * c[0], 4 * c[1]), *place)
    before, after = (few, many) if order == FOLDED else (many, few)
    return source if tiles and sizes(graph, source)[1:] == before and sizes(graph, node)[1:] == after else None


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
