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
    good further down; a deterministic walk would carry them along. In h, the growth of log(a/b) over a step, the
    process is solved exactly for an estimate z_hat that grows as it did over the step before, and no further.
    """
    growth = (path.a / path.b).log().diff()  # infinite where a level is pure noise or pure data
    before: Tensor | None = None
    for i in range(path.length):
        z_hat = path.estimate(z, prior.predict(z, path.timesteps[i]), i)
        ahead = z_hat
        last = bool(path.b[i + 1] == 0)
        if before is not None and not last:
            # Over a longer step the trend is not drawn out further: the estimate does not go on growing.
            ahead = z_hat + 0.5 * torch.clamp(growth[i] / growth[i - 1], max=1.0) * (z_hat - before)
        if last:
            return z_hat
        fresh = torch.stack([torch.randn(z.shape[1:], generator=g) for g in generators]).to(z.device, z.dtype)
        forgotten = 1 - torch.exp(-2 * growth[i])
        z = path.b[i + 1] / path.b[i] * torch.exp(-growth[i]) * z + path.a[i + 1] * forgotten * ahead
        z, before = z + path.b[i + 1] * forgotten.sqrt() * fresh, z_hat
    return z


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
