"""Tiny autoencoders of the TAESD family, rebuilt from their weight files, for a cheap guidance gradient.

Shapes: B batch, C latent channels, H W image size.
    images   [B, 3, H, W] in [0, 1]
    z        [B, C, H/8, W/8] in the units of the diffusion model

The build is read off the state dict, so one module covers the 4-, 16- and 32-channel members. FLUX.2's has pooling
branches with group norm in its deepest level, which diffusers' AutoencoderTiny does not know. The tiny decoder serves
the gradient only: the final image comes from the full decoder.
"""

import pathlib
import re
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.errors import WeightsError

POOL_GROUPS = 4


class Clamp(nn.Module):
    """A soft limit at ±3, where the latents' distribution ends."""

    def forward(self, z: Tensor) -> Tensor:
        """3·tanh(z / 3)."""
        return torch.tanh(z / 3) * 3


class Block(nn.Module):
    """Three convolutions with a skip connection, after an optional pooling branch with group norm."""

    def __init__(self, channels: int, pooled: int | None = None) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.pool: nn.Sequential | None = None
        if pooled is not None:
            self.pool = nn.Sequential(
                nn.Conv2d(channels, pooled, 1, bias=False),
                nn.GroupNorm(POOL_GROUPS, pooled),
                nn.ReLU(),
                nn.Conv2d(pooled, channels, 1, bias=False),
            )

    def forward(self, x: Tensor) -> Tensor:
        """relu(x + conv(x)); the pooling branch, if any, is added to x first."""
        if self.pool is not None:
            x = x + self.pool(x)
        return torch.relu(x + self.conv(x))


def load_tiny_decoder(file: str | pathlib.Path) -> nn.Sequential:
    """The decoder stored in a weight file: z -> images nominally in [0, 1], frozen and in float32."""
    state = _read(file)
    # Layers without weights leave gaps in the numbering: the clamp, the first ReLU, and an upsampling before each
    # bias-free convolution.
    fillers: dict[int, nn.Module] = {0: Clamp(), 2: nn.ReLU()}
    return _build(file, state, fillers, nn.Upsample(scale_factor=2), stride=1)


def load_tiny_encoder(file: str | pathlib.Path) -> nn.Sequential:
    """The encoder stored in a weight file: images in [0, 1] -> z, frozen and in float32."""
    return _build(file, _read(file), {}, None, stride=2)


def _build(
    file: str | pathlib.Path,
    state: dict[str, Tensor],
    fillers: dict[int, nn.Module],
    gap: nn.Module | None,
    stride: int,
) -> nn.Sequential:
    numbers = {int(name.split(".")[0]) for name in state if re.match(r"\d+\.", name)}
    if not numbers or max(numbers) > 99:
        raise WeightsError(f"The file {file} is no tiny autoencoder: its tensors are not numbered layers.")
    layers: list[nn.Module] = []
    for number in range(max(numbers) + 1):
        if number not in numbers:
            layer = fillers.get(number, gap)
            if layer is None:
                raise WeightsError(f"The file {file} is no tiny autoencoder: layer {number} is missing.")
            layers.append(layer)
        elif (kernel := state.get(f"{number}.conv.0.weight")) is not None:
            pool = state.get(f"{number}.pool.0.weight")
            layers.append(Block(kernel.shape[0], None if pool is None else pool.shape[0]))
        elif (kernel := state.get(f"{number}.weight")) is not None and kernel.ndim == 4:
            bias = f"{number}.bias" in state
            # The bias-free convolutions are those that change the resolution.
            step = 1 if bias else stride
            layers.append(nn.Conv2d(kernel.shape[1], kernel.shape[0], 3, stride=step, padding=1, bias=bias))
        else:
            raise WeightsError(f"The file {file} is no tiny autoencoder: layer {number} is of an unknown kind.")
    module = nn.Sequential(*layers)
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise WeightsError(f"The weights in {file} do not fit a tiny autoencoder: {str(error)[:300]}") from None
    return module.float().eval().requires_grad_(False)


def _read(file: str | pathlib.Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a .pth file that holds nothing but tensors."""
    file = pathlib.Path(file)
    if not file.is_file():
        raise WeightsError(f"The weight file {file} is missing.")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        raise WeightsError(f"The weight file {file} cannot be read as plain tensors: {str(error)[:200]}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(f"The weight file {file} has to hold a dictionary of tensors.")
    return state
