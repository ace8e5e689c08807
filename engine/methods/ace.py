"""ACE (Jeanneret et al., CVPR 2023): an adversarial attack through a denoising filter, then RePaint.

Shapes: B batch, H W image size, C latent channels, h w latent size.
    x, x0   [B, 3, H, W] in [0, 1]
    eps     [B, C, h, w]
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from engine.counterfactual import CancelToken, CounterfactualSet, Progress
from engine.guidance import Model
from engine.methods.filters import Side, repaint, unchanged
from engine.methods.search import MethodSettings, Perceptual, Try, search
from engine.prior import Prior

Iterations = Annotated[int, Field(ge=1, le=10_000)]


class AceSettings(MethodSettings):
    """ACE's settings; the defaults are its authors'."""

    method: Literal["ace"] = "ace"
    steps: int = Field(default=50, ge=1, le=1000, description="respaced steps of the full schedule")
    strength: float = Field(default=0.1, gt=0, lt=1, description="share that the filter walks: 5 of 50 steps")
    iterations: tuple[Iterations, ...] = Field(
        default=(50,), min_length=1, max_length=16, description="attack steps, by try"
    )
    step_size: float = Field(default=1 / 255, gt=0, description="length of an attack step, in image units")
    l1: float = Field(default=0.001, ge=0, description="weight of |x - x0|_1")
    dilation: Side = Field(default=15, description="side of the mask's max-pool, in pixels; odd")
    threshold: float = Field(default=0.15, ge=0, le=1, description="relative change below which a pixel is kept")

    @property
    def tries(self) -> tuple[float, ...]:
        """The attack steps of each try."""
        return self.iterations


def ace(
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    x0: Tensor,
    targets: Sequence[int] | Tensor,
    settings: AceSettings,
    seeds: Sequence[int] | None = None,
    *,
    perceptual: Perceptual | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """Counterfactuals by ACE: x <- x - step·sign(∇_x [l(f(F(x))) + l1·|x - x0|]), F back-propagated as a whole.

    F sends the picture to noise and walks it back, so what f sees cannot be adversarial noise. What the attack left
    unchanged is then kept, and the rest repainted from the attacked picture. A sample's noise in F is the same in all
    iterations.
    """

    def attempt(one: Try) -> Tensor:
        x0, eps = one.originals.x0, one.noise()
        x, iterations = x0, int(one.value)
        for i in range(iterations):
            one.watch(i, iterations)
            gradient, _, _ = one.filtered_guidance(x, eps)
            gradient = gradient + settings.l1 * (x - x0).sign()
            x = (x - settings.step_size * gradient.sign()).clamp(0.0, 1.0)
        kept = unchanged(x0, x, settings.dilation, settings.threshold)
        return repaint(one, x, kept, eps)[:, None]

    return search(attempt, prior, f, f_hat, x0, targets, settings, seeds, progress=progress, cancel=cancel)
