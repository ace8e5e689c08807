"""A prior walked without guidance: fresh samples from noise, and images sent part of the way to noise and back.

Shapes: N images [N, 3, H, W] in [0, 1]; latents [B, C, h, w].
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.path import Path
from engine.prior import Prior


def walk(prior: Prior, path: Path, z: Tensor) -> Tensor:
    """The end of the deterministic path that starts at state z, by the scheduler's own steps."""
    for i in range(path.length):
        z = path.step(z, prior.predict(z, path.timesteps[i]), i)
    return z


def wander(prior: Prior, path: Path, z: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """The end of a random path with the same distribution at every level, one generator per sample.

    Each step forgets part of the state and draws fresh noise for it, so that a network's errors at high noise are made
    good further down; a deterministic walk would carry them along.
    """
    growth = growths(path)
    before: Tensor | None = None
    for i in range(path.length):
        z_hat = path.estimate(z, prior.predict(z, path.timesteps[i]), i)
        if bool(path.b[i + 1] == 0):
            return z_hat
        z = forgetful_step(path, growth, i, z, drawn_ahead(growth, i, z_hat, before), fresh_noise(generators, z))
        before = z_hat
    return z


def growths(path: Path) -> Tensor:
    """Growth of log(a/b) over each step; infinite where a level is pure noise or pure data."""
    return (path.a / path.b).log().diff()


def drawn_ahead(growth: Tensor, i: int, z_hat: Tensor, before: Tensor | None) -> Tensor:
    """The estimate over step i if it grows as it did over the step before, from `before` to z_hat, and no further.

    Levels at the end of a schedule lie far apart: a trend that is drawn out over a longer step would add variance.
    """
    if before is None:
        return z_hat
    return z_hat + 0.5 * torch.clamp(growth[i] / growth[i - 1], max=1.0) * (z_hat - before)


def forgetful_step(path: Path, growth: Tensor, i: int, z: Tensor, ahead: Tensor, fresh: Tensor) -> Tensor:
    """The state at level i + 1: part of z is forgotten for the estimate `ahead` and fresh noise, exact in log(a/b)."""
    forgotten = 1 - torch.exp(-2 * growth[i])
    z = path.b[i + 1] / path.b[i] * torch.exp(-growth[i]) * z + path.a[i + 1] * forgotten * ahead
    return z + path.b[i + 1] * forgotten.sqrt() * fresh


def fresh_noise(generators: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Normal noise for a batch of latents, each sample's from its own generator."""
    return torch.stack([torch.randn(like.shape[1:], generator=g) for g in generators]).to(like.device, like.dtype)


@torch.no_grad()
def reconstruct(prior: Prior, images: Tensor, batch: int = 50) -> Tensor:
    """D(E(x)), clamped to [0, 1]."""
    return torch.cat([prior.decode(prior.encode(x)).clamp(0, 1) for x in images.split(batch)])


@torch.no_grad()
def generate(
    prior: Prior,
    n: int,
    size: int,
    seed: int,
    steps: int = 40,
    batch: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Unconditional samples: random paths from pure noise. `progress` is told (samples done, n).

    The i-th sample is a function of (seed, i), however many are asked for.
    """
    path = prior.path(steps, 1.0, size, size)
    shape = prior.latent_shape(size, size)
    images: list[Tensor] = []
    for start in range(0, n, batch):
        rows = range(start, min(start + batch, n))
        generators = [torch.Generator().manual_seed(row_seed(seed, row)) for row in rows]
        z = torch.stack([torch.randn(shape, generator=g) for g in generators])
        images.append(prior.decode(wander(prior, path, z, generators)).clamp(0, 1))
        if progress is not None:
            progress(sum(map(len, images)), n)
    return torch.cat(images)


@torch.no_grad()
def image_to_image(prior: Prior, images: Tensor, steps: int, strength: float, seed: int, batch: int = 50) -> Tensor:
    """Images noised to `strength` and walked back, unguided: what a counterfactual run does when nothing pushes."""
    path = prior.path(steps, strength, images.shape[2], images.shape[3])
    shape = prior.latent_shape(images.shape[2], images.shape[3])
    noise = torch.randn(len(images), *shape, generator=torch.Generator().manual_seed(seed))
    ends = []
    for x, eps in zip(images.split(batch), noise.split(batch), strict=True):
        ends.append(prior.decode(walk(prior, path, path.noise(prior.encode(x), eps, 0))).clamp(0, 1))
    return torch.cat(ends)


def row_seed(seed: int, row: int) -> int:
    """One noise seed per seed and row."""
    return int(np.random.SeedSequence([seed, row]).generate_state(1)[0])
