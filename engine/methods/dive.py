"""DiVE (Rodríguez et al., ICCV 2021): several perturbations of a latent at once, pushed apart by a diversity loss.

Shapes: B batch, K counterfactuals per image, C latent channels, h w latent size, H W image size.
    e        [B, K, C, h, w] the perturbations
    z0       [B, C, h, w]
    x0       [B, 3, H, W] in [0, 1]
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from engine.counterfactual import CancelToken, CounterfactualSet, Progress
from engine.guidance import Model
from engine.methods.ace import Iterations
from engine.methods.search import MethodSettings, Noise, Perceptual, Try, search
from engine.prior import Prior


class DiveSettings(MethodSettings):
    """DiVE's settings; the prior's autoencoder stands in for the authors' VAE, so weights are this project's.

    The schedule of the prior is not used: its network is never called.
    """

    method: Literal["dive"] = "dive"
    iterations: tuple[Iterations, ...] = Field(
        default=(20, 60), min_length=1, max_length=16, description="Adam steps, by try"
    )
    rate: float = Field(default=0.05, gt=0, description="learning rate of Adam")
    start: float = Field(default=0.01, gt=0, description="standard deviation of the first perturbations")
    lasso: float = Field(default=1e-3, ge=0, description="weight of |e|_1")
    reconstruction: float = Field(default=1e-3, ge=0, description="weight of |D(z0 + e) - x0|_1")
    diversity: float = Field(default=1.0, ge=0, description="weight of the squared cosines between perturbations")

    @property
    def tries(self) -> tuple[float, ...]:
        """The Adam steps of each try."""
        return self.iterations


def dive(
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    x0: Tensor,
    targets: Sequence[int] | Tensor,
    settings: DiveSettings,
    seeds: Sequence[int] | None = None,
    *,
    perceptual: Perceptual | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """Counterfactuals by DiVE: Adam on all K perturbations e at once.

    Each pays l(f(D(z0 + e_k))), lasso·|e_k| and the reconstruction; together they pay the diversity loss, which
    is the sum of cos²(e_j, e_k) over the pairs of one image. Images do not meet.
    """

    def attempt(one: Try) -> Tensor:
        x0, z0, count = one.originals.x0, one.originals.z0, len(one.ks)
        e = settings.start * torch.stack([Noise(one.seeds, k, z0)() for k in one.ks], 1)
        optimiser = torch.optim.Adam([e], lr=settings.rate)

        def cotangent(image: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            owner = rows.div(count, rounding_mode="floor")  # the image that a perturbation belongs to
            gradient, logits = one.classified(image, owner)
            return gradient + settings.reconstruction * (image - x0[owner]).sign(), logits

        for i in range(int(one.value)):
            one.watch(i, int(one.value))
            gradient, _, _ = one.guidance((z0[:, None] + e).flatten(0, 1), cotangent)
            gradient = gradient.view_as(e) + settings.lasso * e.sign()
            e.grad = gradient + settings.diversity * alikeness_gradient(e)
            optimiser.step()
        return one.decode((z0[:, None] + e).flatten(0, 1)).unflatten(0, (len(z0), count))

    return search(
        attempt, prior, f, f_hat, x0, targets, settings, seeds, together=True, progress=progress, cancel=cancel
    )


def alikeness_gradient(e: Tensor) -> Tensor:
    """∇_e of the sum over pairs j < k of cos²(e_j, e_k), per image."""
    with torch.enable_grad():
        point = e.detach().requires_grad_(True)
        unit = F.normalize(point.flatten(2), dim=2)
        cosines = unit @ unit.transpose(1, 2)
        pairs = cosines.triu(diagonal=1).square().sum()
        (gradient,) = torch.autograd.grad(pairs, point)
    return gradient
