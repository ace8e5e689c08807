"""SCE (Bender et al., 2026): descent on the image through a denoising filter, guided by the smoothed surrogate.

Shapes: B batch, H W image size, C latent channels, h w latent size, R samples still searched for.
    x, x0          [B, 3, H, W] in [0, 1]
    kept, closed   [B, 1, H, W]; 1 keeps the original
    eps            [B, C, h, w]
    rows           [R]
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
    """SCE's settings, its authors' own by default; their rate of 300 is for the mean over a batch of four."""

    method: Literal["sce"] = "sce"
    steps: int = Field(default=66, ge=1, le=1000, description="length of the full schedule")
    strength: float = Field(default=0.3, gt=0, lt=1, description="share that the filter walks: 20 of 66 steps")
    gradient: GradientName = Field(
        default="surrogate", description="the surrogate's gradient, or the audited classifier's own"
    )
    temperature: float = Field(default=3.0, gt=0, description="logits are divided by it")
    iterations: tuple[Iterations, ...] = Field(
        default=(50,), min_length=1, max_length=16, description="descent steps at the most, by try"
    )
    rate: float = Field(default=75.0, gt=0, description="learning rate of the descent")
    momentum: float = Field(default=0.9, ge=0, lt=1)
    l1: float = Field(default=0.0005, ge=0, description="weight of mean |x - x0|")
    dilation: Side = Field(default=13, description="side of the mask's max-pool, in pixels; odd")
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
    """Counterfactuals by SCE: momentum descent on x of l(f_hat(F(x)) / T) + l1·mean|x - x0|, F back-propagated whole.

    A picture that f flips, and the last one in any case, is repainted: what is unchanged in it goes back to the
    original, and the descent goes on from there. It ends where f is as sure of the target as it was of all else at x0,
    both at temperature T; the surest repainted picture is the result. Areas that earlier counterfactuals of the image
    have edited are locked, and each of those halves l1 and threshold.
    """

    def attempt(one: Try) -> Tensor:
        x0, y, eps = one.originals.x0, one.originals.y, one.noise()
        x, speed, best, iterations = x0.clone(), torch.zeros_like(x0), x0.clone(), int(one.value)
        less = 0.5**one.ks.start
        pull, threshold = settings.l1 * less / x0[0].numel(), settings.threshold * less

        def sure(images: Tensor, rows: Tensor) -> Tensor:
            """How probable f finds the target, at temperature T."""
            p = (one.asked(images, rows) / settings.temperature).softmax(1)
            return p.gather(1, y[rows, None])[:, 0]

        rows = torch.arange(len(x0), device=x0.device)
        goal = 1.0 - sure(x0, rows)
        surest = torch.zeros_like(goal)
        for i in range(iterations):
            one.watch(i, iterations)
            gradient, _, _ = one.filtered_guidance(x[rows], eps[rows], rows)
            push = gradient + pull * (x[rows] - x0[rows]).sign()
            speed[rows] = settings.momentum * speed[rows] + (1.0 - one.closed[rows]) * push
            x[rows] = (x[rows] - settings.rate * speed[rows]).clamp(0.0, 1.0)
            flipped = rows if i == iterations - 1 else rows[one.asked(x[rows], rows).argmax(1) == y[rows]]
            if not len(flipped):
                continue
            kept = torch.maximum(unchanged(x0[flipped], x[flipped], settings.dilation, threshold), one.closed[flipped])
            x[flipped] = repaint(one, x[flipped], kept, eps, flipped)
            found = sure(x[flipped], flipped)
            better = found >= surest[flipped]
            best[flipped[better]], surest[flipped[better]] = x[flipped[better]], found[better]
            rows = rows[surest[rows] < goal[rows]]
            if not len(rows):
                break
        return best[:, None]

    return search(attempt, prior, f, f_hat, x0, targets, settings, seeds, progress=progress, cancel=cancel)
