"""Networks of the smoothed surrogate: a small residual network of its own, or a smooth mirror of the classifier.

The network of its own is made for export of its gradient: besides convolutions of stride 1 and 2, eval-mode batch norm
and element-wise units it has only reshapes, means and matrix products. No max-pool, no interpolation operator.

Shapes: B batch, C channels, H W height and width, S the network's own input size, Y classes.
"""

import copy
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor, nn

from engine.errors import ClassifierError, ImageError

LEAK = 0.1
BETA = 10.0


def smooth_activation(x: Tensor) -> Tensor:
    """0.5·(LeakyReLU(x; 0.1) + Softplus(x; β=10)), the surrogate's unit (paper, appendix A; METHOD §2).

    The softplus half is smooth; the leaky half keeps a kink at 0, where the slope jumps from 0.30 to 0.75. That is
    less than half of ReLU's jump, and no slope is ever zero (0.05 at −∞, 1 at +∞).
    """
    return 0.5 * (F.leaky_relu(x, LEAK) + F.softplus(x, beta=BETA))


class SmoothActivation(nn.Module):
    """`smooth_activation` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Applies the unit to every element."""
        return smooth_activation(x)


class NetworkConfig(BaseModel):
    """Size of a surrogate network; the default runs 64-pixel images on one processor core."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    input_size: int = Field(default=64, ge=8)
    """S: images of any other size are resized to S×S by the network itself."""
    widths: tuple[int, ...] = (16, 32, 64, 96)
    """Channels of each stage; every stage after the first halves the resolution."""
    blocks: int = Field(default=2, ge=1)
    """Basic blocks per stage; (64, 128, 256, 512) with two of them is ResNet-18."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.25, 0.25, 0.25)

    @field_validator("widths")
    @classmethod
    def _some_channels(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if not widths or min(widths) < 1:
            raise ValueError("widths must name at least one stage, each with one channel or more")
        return widths

    @field_validator("std")
    @classmethod
    def _positive(cls, std: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(std) <= 0:
            raise ValueError("std must be positive in every channel")
        return std

    @model_validator(mode="after")
    def _divisible(self) -> "NetworkConfig":
        factor = 4 * 2 ** (len(self.widths) - 1)
        if self.input_size % factor:
            raise ValueError(f"input_size {self.input_size} is not a multiple of {factor}, the network's total stride")
        return self


class SurrogateNetwork(nn.Module):
    """A ResNet-18-type classifier with smooth units: images [B, 3, H, W] in [0, 1] to logits [B, Y].

    It differs from ResNet-18 where smoothness, export or speed ask for it: the stem reaches a quarter of the resolution
    by folding 2×2 pixels into channels and one strided convolution, without a max-pool, and the shortcut of a strided
    block averages instead of dropping three pixels of four.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, n_classes: int, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config or NetworkConfig()
        widths = self.config.widths
        self.register_buffer("mean", torch.tensor(self.config.mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(self.config.std).view(1, 3, 1, 1))
        self.stem = nn.Sequential(
            nn.Conv2d(12, widths[0], 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(widths[0]), SmoothActivation()
        )
        stages: list[nn.Module] = [BasicBlock(widths[0], widths[0]) for _ in range(self.config.blocks)]
        for before, after in pairwise(widths):
            stages.append(BasicBlock(before, after, stride=2))
            stages.extend(BasicBlock(after, after) for _ in range(self.config.blocks - 1))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, Y]; resizing and normalisation happen in here."""
        x = (resize(images, self.config.input_size) - self.mean) / self.std
        x = self.stages(self.stem(fold_pixels(x)))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if channels != width or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width))
        self.activation = SmoothActivation()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, width, H/stride, W/stride]."""
        skip = self.shortcut(x if self.stride == 1 else mean_pool(x, self.stride, self.stride))
        x = self.activation(self.norm1(self.conv1(x)))
        out: Tensor = self.activation(self.norm2(self.conv2(x)) + skip)
        return out


def fold_pixels(x: Tensor) -> Tensor:
    """[B, C, H, W] to [B, 4C, H/2, W/2]: every 2×2 tile of pixels becomes channels."""
    b, c, h, w = x.shape
    return x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)


def mean_pool(x: Tensor, rows: int, columns: int) -> Tensor:
    """Average pooling over rows×columns tiles, as a reshape and a mean (the gradient is an expand)."""
    b, c, h, w = x.shape
    return x.reshape(b, c, h // rows, rows, w // columns, columns).mean(dim=(3, 5))


def resize(images: Tensor, size: int) -> Tensor:
    """Images [B, 3, H, W] at [B, 3, S, S]: area average where it shrinks, bilinear where it grows.

    An integer factor is plain average pooling. Other factors are two products with constant matrices, one per axis. A
    shrinking bilinear filter would look at four pixels and leave all others without a gradient; the area average
    reaches every pixel.
    """
    h, w = images.shape[-2:]
    if (h, w) == (size, size):
        return images
    if h % size == 0 and w % size == 0:
        return mean_pool(images, h // size, w // size)
    rows = resize_matrix(h, size).to(images)
    columns = resize_matrix(w, size).to(images)
    return rows @ images @ columns.T


def resize_matrix(before: int, after: int) -> Tensor:
    """[after, before] weights of one-dimensional resizing; each row sums to one."""
    weights = torch.zeros(after, before, dtype=torch.float64)
    scale = before / after
    for i in range(after):
        if after < before:
            low, high = i * scale, (i + 1) * scale
            for j in range(math.floor(low), min(before, math.ceil(high))):
                weights[i, j] = min(high, j + 1) - max(low, j)
        else:
            centre = min(max((i + 0.5) * scale - 0.5, 0.0), before - 1.0)
            j = min(int(centre), max(before - 2, 0))
            weights[i, j] = 1 - (centre - j)
            if j + 1 < before:
                weights[i, j + 1] = centre - j
    return (weights / weights.sum(dim=1, keepdim=True)).float()


def check_images(images: Tensor) -> None:
    """Raises ImageError unless images are [B, 3, H, W] floats in [0, 1]."""
    if images.ndim != 4 or images.shape[1] != 3:
        raise ImageError(f"images must be [B, 3, H, W]; these are {list(images.shape)}")
    if not images.is_floating_point():
        raise ImageError(f"images must be floats in [0, 1]; these are {images.dtype} (divide 8-bit values by 255)")
    if images.numel() == 0:
        return
    low, high = torch.aminmax(images)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ImageError("images contain NaN or infinity")
    if low < -1e-3 or high > 1 + 1e-3:
        raise ImageError(f"images must lie in [0, 1]; these span [{low:.3f}, {high:.3f}]")


KINKED_UNITS: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Softplus,
)
"""ReLU- and GELU-like units of torch; gates (sigmoid, tanh) are no such units and stay."""

_GATES = ("Tanh", "Sigmoid", "Softmax", "Linear", "LaplaceActivation")


def smoothed_copy(module: nn.Module) -> nn.Module:
    """A copy of a torch classifier with smooth units and no max-pool; the original is not touched.

    For white-box users: the paper's f̂ "mirrors f". The copy is in eval mode, holds frozen copies of f's weights and
    takes what f takes. It no longer computes f, so `distil` should train it from there (`network=`). Units are found
    as modules (torch's, and those of transformers); calls such as `F.relu` inside a forward cannot be swapped, and a
    model without any unit that can is refused.
    """
    mirror = copy.deepcopy(module)
    mirror.eval().requires_grad_(False)
    swapped = 0
    for parent in list(mirror.modules()):
        for name, child in list(parent.named_children()):
            smooth = _smooth_unit(child)
            if smooth is not None:
                setattr(parent, name, smooth)
                swapped += 1
    if not swapped:
        raise ClassifierError(
            "no ReLU- or GELU-like module was found, so the copy would not be smooth; give the classifier its "
            "activations as modules, or distil the default surrogate from its predictions"
        )
    return mirror


def _smooth_unit(unit: nn.Module) -> nn.Module | None:
    """What stands in for a unit of the classifier, or None where it stays."""
    if isinstance(unit, KINKED_UNITS) or _is_transformers_unit(unit):
        return SmoothActivation()
    if isinstance(unit, nn.MaxPool2d):
        if unit.dilation not in (1, (1, 1)) or unit.return_indices:
            raise ClassifierError("a max-pool with dilation or indices has no average-pool counterpart")
        # count_include_pad would darken the border, which a max-pool does not do.
        return nn.AvgPool2d(unit.kernel_size, unit.stride, unit.padding, unit.ceil_mode, count_include_pad=False)
    if isinstance(unit, nn.AdaptiveMaxPool2d):
        return nn.AdaptiveAvgPool2d(unit.output_size)
    return None


def _is_transformers_unit(unit: nn.Module) -> bool:
    """Whether a module is one of transformers' own GELU or SiLU variants."""
    kind = type(unit)
    return kind.__module__ == "transformers.activations" and not kind.__name__.startswith(_GATES)
