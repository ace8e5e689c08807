"""SCE (Bender et al., 2026): descent on the image through a denoising filter, guided by the smoothed surrogate.

Shapes: B batch, H W image size, C latent channels, h w latent size.
    x, x0          [B, 3, H, W] in [0, 1]
    kept, closed   [B, 1, H, W]; 1 keeps the original
    eps            [B, C, h, w]
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from engine.counterfactual import CancelToken, CounterfactualSet, Progress
from engine.guidance import Model
from engine.methods.ace import Iterations
from engine.methods.filters import Side, repaint, unchanged
from engine.methods.search import MethodSettings, Perceptual, Try, search
from engine.prior import Prior
from engine.recipe import GradientName


class SceSettings(MethodSettings):
    """SCE's settings; rate, momentum, L1 and mask are not published and are this project's."""

    method: Literal["sce"] = "sce"
    steps: int = Field(default=80, ge=1, le=1000, description="length of the full schedule")
    strength: float = Field(default=0.25, gt=0, lt=1, description="share that the filter walks: 20 of 80 steps")
    gradient: GradientName = Field(
        default="surrogate", description="the surrogate's gradient, or the audited classifier's own"
    )
    temperature: float = Field(default=3.0, gt=0, description="logits are divided by it inside the loss")
    iterations: tuple[Iterations, ...] = Field(
        default=(50,), min_length=1, max_length=16, description="descent steps, by try"
    )
    rate: float = Field(default=1.0, gt=0, description="learning rate of the descent")
    momentum: float = Field(default=0.9, ge=0, lt=1)
    l1: float = Field(default=0.001, ge=0, description="weight of |x - x0|_1")
    dilation: Side = Field(default=5, description="side of the mask's max-pool, in pixels; odd")
    threshold: float = Field(default=0.15, ge=0, le=1, description="relative change below which a pixel is kept")

    @property
    def tries(self) -> tuple[float, ...]:
        """The descent steps of each try."""
        return self.iterations


def sce(
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    x0: Tensor,
    targets: Sequence[int] | Tensor,
    settings: SceSettings,
    seeds: Sequence[int] | None = None,
    *,
    perceptual: Perceptual | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """Counterfactuals by SCE: momentum descent on x of l(f_hat(F(x)) / T) + l1·|x - x0|, F back-propagated as a whole.

    Where f already flips at F(x), what is unchanged there goes back to the original and the rest is repainted; if f
    still flips, the descent goes on from that picture. The last picture that f flips is the result. Areas that earlier
    counterfactuals of the image have edited are locked.
    """

    def attempt(one: Try) -> Tensor:
        x0, y, eps = one.originals.x0, one.originals.y, one.noise()
        x, speed, iterations = x0, torch.zeros_like(x0), int(one.value)
        result, done = x0, torch.zeros(len(x0), dtype=torch.bool, device=x0.device)
        for i in range(iterations):
            one.watch(i, iterations)
            gradient, image, _ = one.filtered_guidance(x, eps)
            image = torch.where(one.closed > 0, x0, image.clamp(0.0, 1.0))
            flipped = one.asked(image).argmax(1) == y
            result = torch.where((~done).view(-1, 1, 1, 1), image, result)
            rows = flipped.nonzero()[:, 0]
            if len(rows):
                kept = torch.maximum(
                    unchanged(x0[rows], image[rows], settings.dilation, settings.threshold), one.closed[rows]
                )
                painted = repaint(one, image[rows], kept, eps, rows)
                good = one.asked(painted, rows).argmax(1) == y[rows]
                x = x.index_copy(0, rows[good], painted[good])
                result = result.index_copy(0, rows, torch.where(good.view(-1, 1, 1, 1), painted, image[rows]))
                done[rows] = True
            speed = settings.momentum * speed + (1.0 - one.closed) * (gradient + settings.l1 * (x - x0).sign())
            x = (x - settings.rate * speed).clamp(0.0, 1.0)
        return result[:, None]

    return search(attempt, prior, f, f_hat, x0, targets, settings, seeds, progress=progress, cancel=cancel)
