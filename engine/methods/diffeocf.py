"""DiffeoCF (Dombrowski et al., 2022): gradient ascent in the latent space of an invertible model.

Shapes: B batch, C latent channels, h w latent size, H W image size.
    z, z0   [B, C, h, w]
    x0      [B, 3, H, W] in [0, 1]
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from engine.counterfactual import CancelToken, CounterfactualSet, Progress
from engine.guidance import Model
from engine.methods.ace import Iterations
from engine.methods.search import MethodSettings, Perceptual, Try, search
from engine.prior import Prior


class DiffeoSettings(MethodSettings):
    """DiffeoCF's settings; the autoencoder stands in for the authors' normalising flow, so numbers are this project's.

    The schedule of the prior is not used: its network is never called.
    """

    method: Literal["diffeocf"] = "diffeocf"
    iterations: tuple[Iterations, ...] = Field(
        default=(500,), min_length=1, max_length=16, description="Adam steps, by try"
    )
    rate: float = Field(default=5e-3, gt=0, description="learning rate of Adam")
    confidence: float = Field(default=0.99, gt=0, lt=1, description="target probability at which a sample is done")
    spread: float = Field(default=0.1, ge=0, description="noise on the start of every counterfactual after the first")
    composite: Literal["decoded", "difference"] = Field(
        default="difference", description="D(z), or x0 + D(z) - D(z0), which is exact at z0 as an invertible model is"
    )

    @property
    def tries(self) -> tuple[float, ...]:
        """The Adam steps of each try."""
        return self.iterations


def diffeocf(
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    x0: Tensor,
    targets: Sequence[int] | Tensor,
    settings: DiffeoSettings,
    seeds: Sequence[int] | None = None,
    *,
    perceptual: Perceptual | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """Counterfactuals by DiffeoCF: Adam on z for l(f(D(z))) until the target has the wanted probability.

    Nothing but the decoder keeps the picture plausible: on a pixel-space prior, whose decoder is the identity, this is
    a plain adversarial attack.
    """

    def attempt(one: Try) -> Tensor:
        x0, z0, y = one.originals.x0, one.originals.z0, one.originals.y
        offset = x0 - one.decode(z0) if settings.composite == "difference" else torch.zeros_like(x0)
        z = (z0 + settings.spread * one.noise() if one.ks.start else z0).clone()
        optimiser = torch.optim.Adam([z], lr=settings.rate)
        rows = torch.arange(len(z), device=z.device)  # samples that are not done
        for i in range(int(one.value)):
            one.watch(i, int(one.value))
            gradient, logits = _gradient(one, z, offset, rows)
            rows_ahead = logits.softmax(1).gather(1, y[rows, None])[:, 0] >= settings.confidence
            open_rows = rows[~rows_ahead]
            held = z.clone()
            z.grad = torch.zeros_like(z).index_copy(0, rows, gradient)
            optimiser.step()
            # Adam goes on by its momentum; a sample that is done stays where it is.
            moved = torch.zeros(len(z), dtype=torch.bool, device=z.device).index_fill(0, open_rows, True)
            z.copy_(torch.where(moved.view(-1, 1, 1, 1), z, held))
            rows = open_rows
            if not len(rows):
                break
        return (one.decode(z) + offset)[:, None]

    return search(attempt, prior, f, f_hat, x0, targets, settings, seeds, progress=progress, cancel=cancel)


def _gradient(one: Try, z: Tensor, offset: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(∇_z l, logits) at D(z) + offset of some samples."""
    one.tally.add(rows, decoder_forwards=1, decoder_backwards=1)
    gradient, _, logits = one.pulled_back(
        z[rows],
        lambda part, some: one.prior.decode(part, checkpointed=one.settings.checkpoint) + offset[rows][some],
        lambda image, some: one.classified(image, rows[some]),
    )
    return gradient, logits
