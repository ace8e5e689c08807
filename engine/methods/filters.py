"""Pieces that several baselines are built from: the ancestral step, the mask of what changed, and RePaint.

Shapes: B batch, H W image size, C latent channels, h w latent size.
    z, z_hat    [B, C, h, w]
    x0, x       [B, 3, H, W] in [0, 1]
    kept        [B, 1, H, W]; 1 keeps the original
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import Tensor

from engine.masks import FLOOR, to_latent
from engine.methods.search import Noise, Try
from engine.path import Path


def _odd(side: int) -> int:
    if side % 2 == 0:
        raise ValueError("should be odd")
    return side


Side = Annotated[int, Field(ge=1, le=255), AfterValidator(_odd)]
"""Side of a max-pool in pixels, odd so that the picture keeps its size."""


def posterior(path: Path, z: Tensor, z_hat: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """(mean, variance) of z_{i+1} given z_i and z_0 = z_hat, for z_t = a_t·z_0 + b_t·eps.

    With s = a_i / a_{i+1} and q = b_i² - s²·b_{i+1}² the mean is (s·b_{i+1}²·z + a_{i+1}·q·z_hat) / b_i² and the
    variance q·b_{i+1}² / b_i². For a variance-preserving path this is the step of DDPM; it holds for a rectified flow
    as well, whose a and b are only other numbers.
    """
    s = path.a[i] / path.a[i + 1]
    here, there = path.b[i].square(), path.b[i + 1].square()
    q = here - s.square() * there
    mean = (s * there * z + path.a[i + 1] * q * z_hat) / here
    return mean, (q * there / here).clamp_min(0.0)


def ancestral_step(one: Try, z: Tensor, i: int, noise: Noise, push: Tensor | None = None) -> Tensor:
    """A draw from p(z_{i+1} | z_i), whose mean a push moves by the variance: mean - variance·push."""
    mean, variance = posterior(one.path, z, one.path.estimate(z, one.velocity(z, i), i), i)
    if push is not None:
        mean = mean - variance * push
    return mean + variance.sqrt() * noise()


def unchanged(x0: Tensor, x: Tensor, dilation: int, threshold: float) -> Tensor:
    """[B, 1, H, W] 1 where the picture counts as unchanged: max-pool(|x - x0| / max) below the threshold."""
    residual = (x - x0).abs().mean(1, keepdim=True)
    residual = residual / residual.amax((1, 2, 3), keepdim=True).clamp_min(FLOOR)
    pooled = F.max_pool2d(residual, dilation, stride=1, padding=dilation // 2)
    return (pooled < threshold).to(x.dtype)


def repaint(one: Try, x: Tensor, kept: Tensor, eps: Tensor, rows: Tensor | None = None) -> Tensor:
    """x sent to noise and walked back while the kept region is held at the original; there the result is x0 itself."""
    every = torch.arange(len(x), device=x.device) if rows is None else rows
    path, x0, z0, noise = one.path, one.originals.x0[every], one.originals.z0[every], eps[every]
    cells = to_latent(kept, (z0.shape[2], z0.shape[3])) > 0
    z = torch.where(cells, path.noise(z0, noise, 0), path.noise(one.encode(x), noise, 0))
    for i in range(path.length):
        z = path.step(z, one.velocity(z, i, rows), i)
        z = torch.where(cells, path.noise(z0, noise, i + 1), z)
    return torch.where(kept > 0, x0, one.decode(z, rows).clamp(0.0, 1.0))
