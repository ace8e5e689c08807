"""The linear end of a decoder, worked out before it is upsampled.

A decoder without residual blocks at full resolution ends in three linear maps: nearest upsampling by two, a 3×3
convolution without bias to as many channels again, and a 3×3 convolution to the picture's three. Together they are one
map, and most of its arithmetic need not happen: each of the 2×2 pixels that one place becomes sees the 3×3 places
around it, so that one 3×3 convolution *before* the upsampling gives all four, as channels which are then laid out as
pixels. Of an embedded decoder's tail this leaves a twelfth of the multiplications.

It is the same function, up to rounding. One thing needs care: the second convolution pads with zeros what the first
has made, and the map in one piece sees what the first would have made there, on a ring around the picture. What comes
from that ring is worked out from the outermost rows, columns and corners, and taken away again.

Shapes: B batch, C features, M middle channels, O picture channels, h w places, H = 2·h, W = 2·w pixels. The four pixels
of a place are channels in the order (picture channel, row in the place, column in the place).
"""

import copy
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.prior import Prior
from export.blocked import affine

PLACES = torch.tensor(
    [
        [[1.0, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]],
        [[1.0, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]],
    ]
)
"""[pixel of a place, neighbouring place, offset in pixels]: where an offset from −2 to 2 lands before upsampling."""


ENDS = (slice(0, 1), slice(-1, None))


class FoldedTail(nn.Module):
    """Nearest upsampling by two and two 3×3 convolutions, the first without bias, as one convolution: [B, C, h, w] to
    [B, O, H, W]."""

    whole: Tensor
    bias: Tensor
    rows: Tensor
    columns: Tensor
    corners: Tensor

    def __init__(self, first: nn.Conv2d, second: nn.Conv2d) -> None:
        super().__init__()
        w1, w2 = first.weight.detach().double(), second.weight.detach().double()
        self.outputs = len(w2)
        bias = torch.zeros(len(w2)) if second.bias is None else second.bias.detach()
        # Where the second convolution's first tap lies beyond an edge, the first one's last tap reaches back.
        first_edge, last_edge = (slice(0, 1), slice(2, 3)), (slice(2, 3), slice(0, 1))
        edges, all_ = (first_edge, last_edge), (slice(None), slice(None))
        rows = [_pixels(_composed(w1, w2, edge, all_), row=i) for i, edge in enumerate(edges)]
        columns = [_pixels(_composed(w1, w2, all_, edge), column=i) for i, edge in enumerate(edges)]
        corners = [_pixels(_composed(w1, w2, edges[i], edges[j]), i, j) for i in (0, 1) for j in (0, 1)]
        for name, value in {
            "whole": _pixels(_composed(w1, w2, all_, all_)),
            "bias": bias.repeat_interleave(4),
            "rows": -torch.stack(rows),
            "columns": -torch.stack(columns),
            "corners": torch.stack(corners),
        }.items():
            self.register_buffer(name, value.float())

    def forward(self, features: Tensor) -> Tensor:
        """The picture, [B, O, H, W]."""
        b, _, h, w = features.shape
        edges = Edges.apply(features)
        rows = []
        for i, row in enumerate(edges[:2]):
            left, right = (F.conv2d(row[..., end], self.corners[2 * i + j]) for j, end in enumerate(ENDS))
            # The columns below reach over the corners as well; what is taken away twice comes back once.
            rows.append(_at_the_ends(F.conv2d(row, self.rows[i], padding=(0, 1)), left, right))
        columns = [F.conv2d(column, self.columns[j], padding=(1, 0)) for j, column in enumerate(edges[2:])]
        pixels = F.conv2d(features, self.whole, self.bias, padding=1) + ring(*rows, *columns)
        tiles = pixels.reshape(b, self.outputs, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
        return tiles.reshape(b, self.outputs, 2 * h, 2 * w)


class Edges(torch.autograd.Function):
    """The outermost rows [B, C, 1, w] and columns [B, C, h, 1] of a map [B, C, h, w]: top, bottom, left, right.

    Autograd would widen the gradient of each edge to a map of its own and add them up; here they are put together along
    the border first. In float32 that map then goes through a convolution that changes nothing (`blocked`): a map that
    no convolution has made would bring this gradient, and all before it as far as the skips reach, out of the layout.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        """The four edges."""
        return x[:, :, ENDS[0]], x[:, :, ENDS[1]], x[..., ENDS[0]], x[..., ENDS[1]]

    @staticmethod
    def backward(ctx: Any, *edges: Tensor) -> Tensor:
        """The gradient that the four edges' gradients make together."""
        along = ring(*edges)
        return affine(along, 1.0) if along.dtype == torch.float32 else along


def ring(top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """[B, C, h, w]: rows [B, C, 1, w] and columns [B, C, h, 1] along the border of a map of zeros, added at corners."""
    b, channels, h = left.shape[:3]
    w = top.shape[3]
    if min(h, w) < 2:  # opposite edges are the same
        rows = F.pad(top, (0, 0, 0, h - 1)) + F.pad(bottom, (0, 0, h - 1, 0))
        return rows + F.pad(left, (0, w - 1)) + F.pad(right, (w - 1, 0))
    within = left.new_zeros(1, 1, 1, 1).expand(b, channels, h - 2, w - 2)
    middle = torch.cat([left[:, :, 1:-1], within, right[:, :, 1:-1]], 3)
    first, last = (
        _at_the_ends(row, left[:, :, end], right[:, :, end]) for row, end in zip((top, bottom), ENDS, strict=True)
    )
    return torch.cat([first, middle, last], 2)


def _at_the_ends(row: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """A row [B, C, 1, w] to whose ends something is added."""
    if row.shape[3] < 2:
        return row + left + right
    return torch.cat([row[..., :1] + left, row[..., 1:-1], row[..., -1:] + right], 3)


Taps = tuple[slice, slice]


def _composed(w1: Tensor, w2: Tensor, rows: Taps, columns: Taps) -> Tensor:
    """[O, C, ., .] kernel of both convolutions in a row; of each axis, the taps of the second and of the first."""
    outer, inner = w2[:, :, rows[0], columns[0]], w1[:, :, rows[1], columns[1]]
    # conv2d correlates; with the flipped kernel it convolves.
    padding = (inner.shape[2] - 1, inner.shape[3] - 1)
    return F.conv2d(outer, inner.flip(2, 3).transpose(0, 1), padding=padding)


def _pixels(kernel: Tensor, row: int | None = None, column: int | None = None) -> Tensor:
    """[4·O, C, ., .]: what a kernel on pixels is for each pixel of a place; only one row or column of them if named."""
    places = PLACES.double()
    by_row, by_column = (places if taps == 5 else torch.ones(2, 1, 1, dtype=torch.float64) for taps in kernel.shape[2:])
    found = torch.einsum("pya,qxb,ocab->opqcyx", by_row, by_column, kernel)
    for axis, kept in ((1, row), (2, column)):
        if kept is not None:
            found.select(axis, 1 - kept).zero_()
    return found.reshape(-1, *found.shape[3:])


def fold_tail(prior: Prior) -> Prior:
    """The prior with every such tail of its decoder folded; the prior itself if it has none."""
    if not any(_tails(module) for module in prior.autoencoder.modules()):
        return prior
    folded = copy.copy(prior)
    folded._modules = {**prior._modules, "autoencoder": copy.deepcopy(prior.autoencoder)}
    for module in folded.autoencoder.modules():
        for start in reversed(_tails(module)):
            assert isinstance(module, nn.Sequential)
            layers = list(module)
            layers[start : start + 3] = [FoldedTail(layers[start + 1], layers[start + 2])]  # type: ignore[arg-type]
            module._modules = {str(i): layer for i, layer in enumerate(layers)}
    return folded.eval().requires_grad_(False)


def _tails(module: nn.Module) -> list[int]:
    """Where in a sequence an upsampling and two convolutions of that form follow each other."""
    if not isinstance(module, nn.Sequential):
        return []
    layers = list(module)
    return [
        i
        for i, (up, first, second) in enumerate(zip(layers, layers[1:], layers[2:], strict=False))
        if _doubles(up) and _is_plain(first) and first.bias is None and _is_plain(second)
    ]


def _doubles(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Upsample) and layer.mode == "nearest" and layer.scale_factor == 2


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """A 3×3 convolution of stride 1 that pads with zeros."""
    return (
        isinstance(layer, nn.Conv2d)
        and layer.kernel_size == (3, 3)
        and layer.stride == layer.dilation == (1, 1)
        and layer.padding == (1, 1)
        and layer.padding_mode == "zeros"
        and layer.groups == 1
    )
