"""A finished edit walked back onto the prior, for as long as the flip survives it.

Guidance leaves a picture a little beside what the prior knows, and pruning cuts an edit without regard for what it
shows. So the counterfactual is noised again and walked down without guidance, the original pasted outside the edit in
every step: seams close and overshoot goes. Of several strengths the largest is kept after which classifier and guide
still give the target. A picture that flips only while it is off the prior loses its flip at each of them, and is
returned as it came, with strength 0.

Shapes: B batch, C latent channels, h w latent size, H W image size.
    x0, x_cf     [B, 3, H, W] in [0, 1]
    z0, eps      [B, C, h, w]
    soft         [B, 1, H, W] the weights of the composite
    m_excl       [B, 1, H, W] 1 where the counterfactual may edit
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.masks import composite, grown, psi, rimmed, rounded, to_latent
from engine.path import Path
from engine.runtime import Runtime

RIM = 2
"""Pixels by which the walk reaches beyond the edit: a seam needs both of its sides."""


@dataclass
class Harmonised:
    """Counterfactuals after the walk, and what it took."""

    x_cf: Tensor
    soft: Tensor
    strength: Tensor  # [B]; 0 where no strength kept the flip
    walks: Tensor  # [B] decodes and queries
    network_calls: Tensor  # [B]


def first_below(path: Path, strength: float) -> int:
    """The first step whose noise level does not exceed `strength`."""
    return next((i for i in range(path.length) if float(path.sigma(i)) <= strength), path.length)


def harmonise(
    runtime: Runtime,
    x0: Tensor,
    z0: Tensor,
    x_cf: Tensor,
    soft: Tensor,
    m_excl: Tensor,
    eps: Tensor,
    strengths: Sequence[float],
    threshold: float,
    blur: float,
    feather: float,
    outline: float,
    convinces: Callable[[Tensor, Tensor], Tensor],
    watch: Callable[[int], None] = lambda step: None,
) -> Harmonised:
    """Each counterfactual at the largest of the falling `strengths` at which `convinces(pictures, rows)` holds.

    What the walk changed by less than `threshold` of its largest change is given back to the original, along a border
    that `outline` smooths.
    """
    path = runtime.path
    region = grown(soft > 0, RIM).to(soft.dtype) * m_excl
    kept = to_latent(1.0 - region, (z0.shape[-2], z0.shape[-1]))
    z_cf = runtime.encode(x_cf)
    counts = torch.zeros(len(x0), dtype=torch.long, device=x0.device)
    done = Harmonised(x_cf.clone(), soft.clone(), torch.zeros(len(x0), device=x0.device), counts, counts.clone())
    rows = torch.arange(len(x0), device=x0.device)
    for strength in strengths:
        start = first_below(path, strength)
        if start == path.length or not len(rows):
            break
        z = path.noise(z_cf[rows], eps[rows], start)
        for i in range(start, path.length):
            watch(i)
            z = path.step(z, runtime.velocity(z, i), i)
            outside = z0[rows] if i == path.length - 1 else path.noise(z0[rows], eps[rows], i + 1)
            z = torch.where(kept[rows] > 0, outside, z)
        x = runtime.decode(z).clamp(0.0, 1.0)
        changed = (psi(x0[rows], x, blur) >= threshold) & (region[rows] > 0)
        weights = rimmed(region[rows] * rounded(changed, outline, 0.5), feather) * m_excl[rows]
        x = composite(x0[rows], x, weights)
        done.walks[rows] += 1
        done.network_calls[rows] += path.length - start
        good = convinces(x, rows)
        taken = rows[good]
        done.x_cf[taken], done.soft[taken], done.strength[taken] = x[good], weights[good], float(path.sigma(start))
        rows = rows[~good]
    return done
