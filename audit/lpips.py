"""LPIPS, the learned perceptual distance of Zhang et al. 2018 (AlexNet trunk, linear heads of version 0.1).

The caller names the weight file; nothing is downloaded. Keys: `net.conv{0..4}.weight|bias` and `lin{0..4}.weight`.

Shapes: B batch, H W height and width (at least 32), C channels of a layer.
"""

from functools import cached_property
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from engine.errors import ImageError, WeightsError
from engine.prior import content_hash

SMALLEST = 32
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
# in channels, out channels, kernel, stride, padding, max-pool before it
LAYERS = (
    (3, 64, 11, 4, 2, False),
    (64, 192, 5, 1, 2, True),
    (192, 384, 3, 1, 1, True),
    (384, 256, 3, 1, 1, False),
    (256, 256, 3, 1, 1, False),
)


class LPIPS(nn.Module):
    """Perceptual distance between image pairs: 0 for equal images, about 0.7 for unrelated ones."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, kernel, stride, padding)
            for channels, width, kernel, stride, padding, _ in LAYERS
        )
        self.heads = nn.ModuleList(nn.Conv2d(layer[1], 1, 1, bias=False) for layer in LAYERS)
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1))
        self.eval().requires_grad_(False)

    @classmethod
    def load(cls, path: Path | str) -> "LPIPS":
        """The network with the weights of a safetensors file."""
        try:
            stored = safetensors.torch.load_file(path)
        except FileNotFoundError:
            raise WeightsError(f"there is no LPIPS weight file {path}") from None
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"the LPIPS weight file {path} cannot be read: {error}") from None
        network = cls()
        state = {}
        for i in range(len(LAYERS)):
            for part in ("weight", "bias"):
                state[f"convolutions.{i}.{part}"] = stored.pop(f"net.conv{i}.{part}", None)
            state[f"heads.{i}.weight"] = stored.pop(f"lin{i}.weight", None)
        expected = network.state_dict()
        for name, value in state.items():
            if value is None or value.shape != expected[name].shape:
                found = "missing" if value is None else f"of shape {list(value.shape)}"
                raise WeightsError(f"the LPIPS weight file {path} does not fit: {name} is {found}")
        network.load_state_dict({**expected, **{name: value for name, value in state.items() if value is not None}})
        return network

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over all weights."""
        return content_hash(self)

    def forward(self, x: Tensor, x_cf: Tensor) -> Tensor:
        """Distance [B] between images [B, 3, H, W] in [0, 1]."""
        for images in (x, x_cf):
            if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[-2:]) < SMALLEST:
                raise ImageError(f"LPIPS takes [B, 3, H, W] of at least {SMALLEST} pixels, not {list(images.shape)}")
        if x.shape != x_cf.shape:
            raise ImageError(f"LPIPS compares images of one shape, not {list(x.shape)} with {list(x_cf.shape)}")
        distance = x.new_zeros(len(x))
        for first, second, head in zip(self.features(x), self.features(x_cf), self.heads, strict=True):
            distance = distance + head((_unit(first) - _unit(second)) ** 2).mean(dim=(1, 2, 3))
        return distance

    def features(self, images: Tensor) -> list[Tensor]:
        """Activations [B, C, h, w] after each of the five convolutions."""
        x = (images - self.mean) / self.std
        layers = []
        for convolution, (*_, pooled) in zip(self.convolutions, LAYERS, strict=True):
            x = F.relu(convolution(F.max_pool2d(x, 3, 2) if pooled else x))
            layers.append(x)
        return layers


def _unit(features: Tensor) -> Tensor:
    """Channel vectors of length one at each position."""
    return features / (torch.linalg.vector_norm(features, dim=1, keepdim=True) + 1e-10)
