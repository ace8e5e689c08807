"""Operators in the words that ONNX Runtime's blocked layout understands.

ONNX Runtime keeps convolutions in a blocked layout, in which it can add, multiply and take sigmoids as well, but not
multiply by a number. In float32 a number is therefore a convolution of every channel with itself, so that what lies
between two convolutions never leaves that layout. Engines that fuse such operators run in half precision, and get them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def affine(x: Tensor, scale: float, shift: float = 0.0) -> Tensor:
    """scale·x + shift; in float32 as a convolution of every channel with itself."""
    if x.dtype != torch.float32:
        return x * scale + shift if shift else x * scale
    channels = x.shape[1]
    with _disable_current_modes():
        weight, bias = torch.full((channels, 1, 1, 1), scale), torch.full((channels,), shift)
    return F.conv2d(x, weight, bias if shift else None, groups=channels)
