"""DiME (Jeanneret et al., ACCV 2022): guided reverse diffusion with a clean image sampled anew at every step.

Shapes: B batch, C latent channels, h w latent size, H W image size.
    z, z_hat, z0   [B, C, h, w]
    image, x0      [B, 3, H, W]
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from engine.counterfactual import CancelToken, CounterfactualSet, Progress
from engine.guidance import Model
from engine.methods.filters import ancestral_step
from engine.methods.search import MethodSettings, Perceptual, Try, search
from engine.prior import Prior

Scale = Annotated[float, Field(gt=0)]


class GuidedDiffusionSettings(MethodSettings):
    """What DiME and FastDiME share; the defaults are those of DiME's authors."""

    steps: int = Field(default=200, ge=1, le=1000, description="respaced steps of the full schedule")
    strength: float = Field(default=0.3, gt=0, lt=1, description="share that is executed: tau = 60 of 200")
    guidance: tuple[Scale, ...] = Field(
        default=(8.0, 10.0, 15.0),
        min_length=1,
        max_length=16,
        description="weight of the classifier gradient in each try",
    )
    l1: float = Field(default=0.05, ge=0, description="weight of |z_t - z_0|_1, taken on the noisy state")
    perceptual: float = Field(default=30.0, ge=0, description="weight of the perceptual distance, where one is given")

    @property
    def tries(self) -> tuple[float, ...]:
        """The guidance of each try."""
        return self.guidance


class DimeSettings(GuidedDiffusionSettings):
    """DiME's settings."""

    method: Literal["dime"] = "dime"


def dime(
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    x0: Tensor,
    targets: Sequence[int] | Tensor,
    settings: DimeSettings,
    seeds: Sequence[int] | None = None,
    *,
    perceptual: Perceptual | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """Counterfactuals by DiME: tau(tau + 1)/2 network calls per try.

    Each of the tau steps draws z_{i+1} ~ N(mean - variance·g, variance), where g is the gradient at a clean image z_hat
    that a full unguided chain draws from the present state. The first gradient is taken at the image itself.
    """

    def attempt(one: Try) -> Tensor:
        path, noise, z0 = one.path, one.noise, one.originals.z0
        z, z_hat = path.noise(z0, noise(), 0), z0
        for i in range(path.length):
            one.watch(i, path.length)
            z = ancestral_step(one, z, i, noise, push=push(one, settings, z, z_hat, i)[0])
            z_hat = z
            for j in range(i + 1, path.length):
                z_hat = ancestral_step(one, z_hat, j, noise)
        return one.decode(z)[:, None]

    return search(
        attempt, prior, f, f_hat, x0, targets, settings, seeds, perceptual=perceptual, progress=progress, cancel=cancel
    )


def push(one: Try, settings: GuidedDiffusionSettings, z: Tensor, z_hat: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """(g, decoded z_hat): (guidance·∇l + perceptual·∇d) / a_t at the clean estimate, and L1 on the noisy state.

    Dividing by a_t turns a gradient at z_hat into one at z_t, whose estimate is (z_t - b_t·eps) / a_t.
    """
    distance = one.perceptual

    def cotangent(image: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        gradient, logits = one.classified(image, rows)
        gradient = one.value * gradient
        if distance is not None and settings.perceptual:
            with torch.enable_grad():
                x = image.detach().requires_grad_(True)
                (pull,) = torch.autograd.grad(distance(x, one.originals.x0[rows]).sum(), x)
            gradient = gradient + settings.perceptual * pull
        return gradient, logits

    gradient, image, _ = one.guidance(z_hat, cotangent)
    return gradient / one.path.a[i] + settings.l1 * (z - one.originals.z0).sign(), image
