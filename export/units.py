"""The default surrogate in another scale, in which its unit needs no multiplication.

The surrogate's unit is f(x) = (leaky(x) + log(1 + exp(β·x)) / β) / 2. Written with u = β·x it is F(u) / (2·β), where

    F(u)  = leaky(u) + relu(u) - log(sigmoid(|u|)), the first two of which are twice a relu with half the leak
    F'(u) = 1[u > 0] + leak·1[u <= 0] + sigmoid(u)

and both factors move into the batch norms around: every norm gives β times what it gave, and takes what F makes, 2·β
times what f made. A shortcut without a convolution halves. Small operators cost a CPU about as much as the numbers they
touch, and eleven for a unit and its gradient in place of twenty are felt. It is the same function, up to rounding.

Numbers are convolutions here (`blocked`): the gradient, and what goes around a block, never leave that layout.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.surrogate_net import BETA, LEAK, BasicBlock, SmoothActivation, SurrogateNetwork
from export.blocked import affine


class _Unit(torch.autograd.Function):
    """F, with its derivative in as few operators as there are."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        half = F.leaky_relu(u, LEAK / 2)
        return half + half - torch.log(torch.sigmoid(u.abs()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grads[0] * (affine((u > 0).to(u.dtype), 1.0 - LEAK, LEAK) + torch.sigmoid(u))


class ScaledUnit(nn.Module):
    """F as a module."""

    def forward(self, u: Tensor) -> Tensor:
        """Applies F to every element."""
        out: Tensor = _Unit.apply(u)
        return out


class Halved(nn.Module):
    """A shortcut: β times f's output is half of F's."""

    def forward(self, x: Tensor) -> Tensor:
        """Half of x."""
        return affine(x, 0.5)


class ScaledBlock(nn.Module):
    """A block of the surrogate that takes and gives outputs of F; its pool is one operator."""

    def __init__(self, block: BasicBlock) -> None:
        super().__init__()
        self.stride = block.stride
        self.conv1, self.norm1 = block.conv1, _takes_units(block.norm1)
        self.conv2, self.norm2 = block.conv2, _takes_units(block.norm2)
        self.shortcut: nn.Module = Halved()
        if isinstance(block.shortcut, nn.Sequential):
            conv, norm = block.shortcut
            self.shortcut = nn.Sequential(conv, _takes_units(norm))  # type: ignore[arg-type]
        self.activation = ScaledUnit()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, width, H/stride, W/stride]."""
        skip = self.shortcut(x if self.stride == 1 else F.avg_pool2d(x, self.stride))
        x = self.activation(self.norm1(self.conv1(x)))
        out: Tensor = self.activation(self.norm2(self.conv2(x)) + skip)
        return out


def scale_units(network: nn.Module) -> nn.Module:
    """A copy of the default surrogate in that scale; any other network, and one that is being trained, as it is."""
    if type(network) is not SurrogateNetwork or network.training:
        return network
    scaled = copy.deepcopy(network)
    conv, norm, unit = scaled.stem
    assert isinstance(norm, nn.BatchNorm2d) and isinstance(unit, SmoothActivation)
    scaled.stem = nn.Sequential(conv, _gives_units(norm), ScaledUnit())
    scaled.stages = nn.Sequential(*(ScaledBlock(block) for block in scaled.stages))  # type: ignore[arg-type]
    scaled.head.weight.data /= 2 * BETA
    return scaled.eval().requires_grad_(False)


def _gives_units(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """The norm, giving β times as much."""
    norm.weight.data *= BETA
    norm.bias.data *= BETA
    return norm


def _takes_units(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """The norm, giving β times as much, of a convolution of what F made."""
    _gives_units(norm).weight.data /= 2 * BETA
    assert norm.running_mean is not None
    norm.running_mean *= 2 * BETA
    return norm
