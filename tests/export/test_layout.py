"""A picture that is folded again at once is never laid out, forward or backward, and the numbers stay."""

import torch
from torch import Tensor, nn

from engine.surrogate_net import fold_pixels
from export.tail import FoldedTail
from export.trace import trace

aten = torch.ops.aten


def guided(z: Tensor) -> tuple[Tensor, Tensor]:
    """A folded tail, a normalisation per channel, a folding and a convolution, with the gradient of it all."""
    with torch.enable_grad():
        z = z.detach().requires_grad_(True)
        picture = (TAIL(z) + 1.0) / 2.0
        seen = STEM(fold_pixels((picture - MEAN) / STD))
        (gradient,) = torch.autograd.grad(seen.square().sum(), z)
    return gradient, picture.detach()


torch.manual_seed(0)
TAIL = FoldedTail(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 3, 3, padding=1))
STEM = nn.Conv2d(12, 5, 3, stride=2, padding=1).requires_grad_(False)
MEAN, STD = torch.rand(1, 3, 1, 1), torch.rand(1, 3, 1, 1) + 0.5


def permutations(graph: torch.fx.GraphModule) -> int:
    """Two for each layout, of columns and of rows, and one for each folding."""
    return sum(node.target is aten.permute.default for node in graph.graph.nodes)


def test_only_the_picture_that_is_handed_out_is_laid_out() -> None:
    """The gradient of the stride is laid out too, but not as a picture."""
    graph = trace(guided, [torch.randn(2, 4, 6, 4)], [True])
    assert permutations(graph) == 2 + 2
    z = torch.randn(3, 4, 6, 4)
    for found, wanted in zip(graph(z), guided(z), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_other_work_between_the_layouts_keeps_them() -> None:
    def mixed(z: Tensor) -> Tensor:
        return fold_pixels(TAIL(z).flip(3))

    def together(z: Tensor) -> Tensor:
        return fold_pixels(TAIL(z) + torch.arange(8.0))

    z = torch.randn(2, 4, 6, 4)
    for function in (mixed, together):
        graph = trace(function, [z], [True], gradient=False)
        assert permutations(graph) == 2 + 1
        torch.testing.assert_close(graph(z), function(z), rtol=1e-5, atol=1e-6)
