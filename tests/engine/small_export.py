"""The smallest prior and guide that `pfungst export` takes: one convolution each, pixels as latents."""

from pathlib import Path

import torch
from torch import Tensor, nn

from engine.prior import IdentityAutoencoder, Network, Prior
from engine.recipe import Recipe
from export.artifact import Batches, write_artifact

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
SIZE = (8, 8)
RECIPE = Recipe(steps=5, eta=0.5, normalise=True, blur=1.0, margin=None, escalation=(1.0,))


class OneConvolution(Network):
    """A velocity of one convolution that grows with the timestep."""

    multiple = 1

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return self.convolution(z) * (1.0 + t / 1000.0)


class SmallGuide(nn.Module):
    """Two classes by one smooth layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.convolution(x)).mean(dim=(2, 3)))


def small_prior(seed: int = 0) -> Prior:
    torch.manual_seed(seed)
    return Prior(IdentityAutoencoder(), OneConvolution(), FLOW)


def small_guide(seed: int = 1, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return SmallGuide(width).eval().requires_grad_(False)


def export(out: Path, guide: nn.Module, batches: str = "1-4", precision: str = "fp32") -> Path:
    write_artifact(small_prior(), guide, RECIPE, out, size=SIZE, batches=Batches.parse(batches), precision=precision)
    return out
