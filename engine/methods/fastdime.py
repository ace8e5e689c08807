"""FastDiME (Weng et al., ECCV 2024): DiME with the one-step estimate and a mask that the walk finds for itself.

Shapes: B batch, C latent channels, h w latent size, H W image size.
    z, z_hat, z0   [B, C, h, w]
    kept           [B, 1, H, W]; 1 keeps the original
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from engine.counterfactual import CancelToken, CounterfactualSet, Progress
from engine.guidance import Model
from engine.masks import to_latent
from engine.methods.dime import GuidedDiffusionSettings, push
from engine.methods.filters import Side, posterior, unchanged
from engine.methods.search import Perceptual, Try, search
from engine.prior import Prior


class FastDimeSettings(GuidedDiffusionSettings):
    """FastDiME's settings; the defaults are its authors'."""

    method: Literal["fastdime"] = "fastdime"
    variant: Literal["1", "2", "2+"] = Field(
        default="1", description="2 and 2+ walk again inside the first walk's mask"
    )
    mask_start: float = Field(default=0.5, ge=0, le=1, description="share of the steps before the mask: step 30 of 60")
    dilation: Side = Field(default=5, description="side of the mask's max-pool, in pixels; odd")
    threshold: float = Field(default=0.15, ge=0, le=1, description="relative change below which a pixel is kept")


def fastdime(
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    x0: Tensor,
    targets: Sequence[int] | Tensor,
    settings: FastDimeSettings,
    seeds: Sequence[int] | None = None,
    *,
    perceptual: Perceptual | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """Counterfactuals by FastDiME: tau network calls per try, twice as many for the variants 2 and 2+.

    The gradient is taken at z_hat of the present step. From `mask_start` on, pixels that z_hat leaves unchanged are
    replaced by the noised original. The variants make a first walk (2 without the mask, 2+ with it), take the mask from
    its end and walk again inside that mask alone.
    """

    def attempt(one: Try) -> Tensor:
        if settings.variant == "1":
            return walked(one, settings, masked=True)[:, None]
        first = walked(one, settings, masked=settings.variant == "2+", last=False)
        fixed = unchanged(one.originals.x0, first.clamp(0.0, 1.0), settings.dilation, settings.threshold)
        return walked(one, settings, masked=True, fixed=fixed, first=False)[:, None]

    return search(
        attempt, prior, f, f_hat, x0, targets, settings, seeds, perceptual=perceptual, progress=progress, cancel=cancel
    )


def walked(
    one: Try,
    settings: FastDimeSettings,
    *,
    masked: bool,
    fixed: Tensor | None = None,
    first: bool = True,
    last: bool = True,
) -> Tensor:
    """The image at the end of one guided walk, with a mask found on the way or a fixed one.

    `first` and `last` say whether it is the first and the last walk of the try, for the progress.
    """
    path, noise, x0, z0 = one.path, one.noise, one.originals.x0, one.originals.z0
    walks = 1 if first and last else 2
    offset = 0 if first else path.length
    masked_from = 0 if fixed is not None else math.ceil(settings.mask_start * path.length)
    kept = torch.zeros_like(x0[:, :1]) if fixed is None else fixed
    z = path.noise(z0, noise(), 0)
    for i in range(path.length):
        one.watch(offset + i, walks * path.length)
        z_hat = path.estimate(z, one.velocity(z, i), i)
        g, image = push(one, settings, z, z_hat, i)
        mean, variance = posterior(path, z, z_hat, i)
        z = mean - variance * g + variance.sqrt() * noise()
        if masked and i >= masked_from:
            if fixed is None:
                kept = unchanged(x0, image, settings.dilation, settings.threshold)
            cells = to_latent(kept, (z.shape[2], z.shape[3])) > 0
            z = torch.where(cells, path.noise(z0, noise(), i + 1), z)
    return torch.where(kept > 0, x0, one.decode(z).clamp(0.0, 1.0))
