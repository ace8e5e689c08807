"""A prior walked without guidance: fresh samples from noise, and images sent part of the way to noise and back.

Shapes: N images [N, 3, H, W] in [0, 1]; latents [B, C, h, w].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.path import Path
from engine.prior import Prior


def walk(prior: Prior, path: Path, z: Tensor, order: int = 1) -> Tensor:
    """The end of the deterministic path that starts at state z.

    Order 1 is the scheduler's own step. Order 2 extrapolates the network's output to the middle of each step from the
    output before (Adams-Bashforth), for the same number of network calls; it needs a path that has a clock.
    """
    clock = path.clock if order == 2 else None
    before: Tensor | None = None
    for i in range(path.length):
        out = prior.predict(z, path.timesteps[i])
        ahead = out
        if clock is not None and before is not None:
            ahead = out + 0.5 * (clock[i + 1] - clock[i]) / (clock[i] - clock[i - 1]) * (out - before)
        z, before = path.step(z, ahead, i), out
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
    order: int = 2,
    batch: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Unconditional samples: the path walked from pure noise. `progress` is told (samples done, n)."""
    path = prior.path(steps, 1.0, size, size)
    noise = torch.randn(n, *prior.latent_shape(size, size), generator=torch.Generator().manual_seed(seed))
    images: list[Tensor] = []
    for z in noise.split(batch):
        images.append(prior.decode(walk(prior, path, z, order)).clamp(0, 1))
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
