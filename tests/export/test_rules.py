"""Every rule against autograd, on the smallest layer that needs it; and what the folding passes leave of a graph."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.surrogate_net import resize
from export.rules import UnsupportedOperator
from export.trace import trace

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "no padding": lambda: nn.Conv2d(4, 6, 3),
    "too much padding": lambda: nn.Conv2d(4, 6, 1, padding=1),
    "stride 2": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "stride 2, even kernel": lambda: nn.Conv2d(4, 6, 4, stride=2, padding=1),
    "stride 2, one tap": lambda: nn.Conv2d(4, 6, 1, stride=2),
    "stride 2, seven taps": lambda: nn.Conv2d(4, 6, 7, stride=2, padding=3),
    "stride 2, groups": lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
    "stride 2, dilation": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2),
    "stride 3, more padding than taps": lambda: nn.Conv2d(4, 6, 2, stride=3, padding=2),
    "stride 3, rows left over": lambda: nn.Conv2d(4, 6, 2, stride=3),
    "unequal strides": lambda: nn.Conv2d(4, 6, 3, stride=(1, 2), padding=1),
    "groups": lambda: nn.Conv2d(4, 8, 3, padding=1, groups=2),
    "dilation": lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2),
    "nearest upsampling": lambda: nn.Upsample(scale_factor=2),
    "upsampling before a convolution": lambda: nn.Sequential(
        nn.Upsample(scale_factor=2), nn.Conv2d(4, 6, 3, padding=1)
    ),
    "upsampling by three": lambda: nn.Sequential(nn.Upsample(scale_factor=3), nn.Conv2d(4, 4, 5, padding=2)),
    "bilinear": lambda: nn.Upsample(size=(7, 9), mode="bilinear"),
    "bicubic": lambda: nn.Upsample(size=(17, 5), mode="bicubic"),
    "average pool": lambda: nn.AvgPool2d(2),
    "average pool that overlaps": lambda: nn.AvgPool2d(3, 2, 1),
    "average pool that does not count its border": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "max pool": lambda: nn.MaxPool2d(2),
    "max pool that overlaps": lambda: nn.MaxPool2d(3, 2, 1),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d((3, 2)),
    "batch norm": lambda: settled(nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))),
    "batch norm alone": lambda: settled(nn.BatchNorm2d(4)),
    "group norm": lambda: settled(nn.GroupNorm(2, 4)),
    "group norm without weights": lambda: nn.GroupNorm(2, 4, affine=False),
    "layer norm": lambda: nn.LayerNorm(12),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)),
    "relu6": nn.ReLU6,
    "leaky relu": lambda: nn.LeakyReLU(0.1),
    "softplus": lambda: nn.Softplus(beta=10),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "tanh": nn.Tanh,
    "softmax": lambda: nn.Softmax(dim=1),
    "matrices that are filled entry by entry": lambda: Lambda(lambda x: resize(x, 16)),
    "the same, shrinking": lambda: Lambda(lambda x: resize(x, 5)),
    "slices": lambda: Lambda(lambda x: x[:, 1:3] * x[:, -2:, :, :]),
    "one channel": lambda: Lambda(lambda x: x[:, 1] * x[:, -1]),
    "attention": lambda: Lambda(lambda x: F.scaled_dot_product_attention(x, 2 * x, x.sin())),
}


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def settled(module: nn.Module) -> nn.Module:
    """Norms as they are after training: nothing is 0 or 1."""
    for part in module.modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            if tensor.is_floating_point() and isinstance(part, nn.BatchNorm2d | nn.GroupNorm):
                with torch.no_grad():
                    tensor.copy_(0.5 + torch.rand_like(tensor) if name != "bias" else torch.randn_like(tensor))
    return module


def gradient_of(layer: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = x.detach().requires_grad_(True)
            out = layer(point)
            # A cotangent that is different everywhere, so that no two places can be mixed up.
            (gradient,) = torch.autograd.grad((out * (out + 1).sin()).sum(), point)
        return gradient, out.detach()

    return function


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_rule_gives_autograds_gradient(name: str, dynamic: bool) -> None:
    torch.manual_seed(3)
    layer = LAYERS[name]().eval().requires_grad_(False)
    function = gradient_of(layer)
    graph = trace(function, [torch.randn(2, 4, 12, 12)], [dynamic])
    x = torch.randn(5 if dynamic else 2, 4, 12, 12)
    for found, expected in zip(graph(x), function(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert "backward" not in graph.code and "flip" not in graph.code


def test_equal_maxima_give_their_gradient_to_the_first() -> None:
    x = torch.ones(1, 1, 4, 4)
    function = gradient_of(nn.MaxPool2d(2))
    assert torch.equal(trace(function, [torch.randn(1, 1, 4, 4)])(x)[0], function(x)[0])


def test_norms_and_upsampling_vanish_into_the_convolutions() -> None:
    """Two convolutions with a norm and upsampling between: the gradient's graph has four and no pool, mean or root."""
    torch.manual_seed(0)
    layer = settled(
        nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(6, 4, 3, padding=1),
        )
    )
    layer.eval().requires_grad_(False)
    code = trace(gradient_of(layer), [torch.randn(2, 4, 8, 8)]).code
    assert code.count("aten.convolution") == 4
    assert not any(name in code for name in ("pool", "rsqrt", "mean", "sum"))


def test_half_precision_keeps_statistics_and_softmax_in_float() -> None:
    layer = nn.Sequential(nn.GroupNorm(2, 4), nn.Softmax(dim=1)).half().eval().requires_grad_(False)
    graph = trace(gradient_of(layer), [torch.randn(2, 4, 8, 8).half()])
    seen = {node.meta["val"].dtype for node in graph.graph.nodes if any(k in node.name for k in ("mean", "softmax"))}
    assert seen == {torch.float32}


def test_what_has_no_rule_is_named() -> None:
    with pytest.raises(UnsupportedOperator, match="grid_sampler_2d_backward"):
        grid = torch.rand(2, 3, 3, 2)
        trace(gradient_of(Lambda(lambda x: F.grid_sample(x, grid, align_corners=False))), [torch.randn(2, 4, 8, 8)])
    with pytest.raises(UnsupportedOperator, match="batch size other than by shape"):
        trace(gradient_of(Lambda(lambda x: x * (1.0 / len(x)))), [torch.randn(2, 4, 8, 8)], [True])
