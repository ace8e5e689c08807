"""A finished edit drawn anew by the prior: random guided walks inside its place, tidied up by unguided steps.

A pass of Algorithm 1 finds where a flip can be had, but leaves there what guidance and masks made of it: pushes that
nothing denoised, borders that follow a threshold. So the place is kept, rounded, and the content is not. A walk begins
at the path's full noise. Each step forgets part of the state and draws fresh noise for it, which makes good what a push
spoilt; the last steps are not guided and the prior's alone. The picture is blended in over a rim that fades inside the
region. Of several walks the one is kept that surprises the prior least while classifier and guide still give the
target; a sample that finds none in the smallest region is given the next.

Shapes: B batch, C latent channels, h w latent size, H W image size.
    x0, x_cf     [B, 3, H, W] in [0, 1]
    z0, eps      [B, C, h, w]
    soft         [B, 1, H, W] the weights of the composite
    m_excl       [B, 1, H, W] 1 where the counterfactual may edit
    kept         [B, 1, h, w] 1 where the latent of the original stays
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.guidance import normalise_per_sample
from engine.harmonise import first_below
from engine.masks import composite, faded, rounded, to_latent
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.sampling import drawn_ahead, forgetful_step, fresh_noise, growths, row_seed

GUIDED = (0.3, 0.95)
"""Noise levels between which a walk is pushed: above there is nothing to see yet, below the prior has the last word."""
LEVELS = (0.5, 0.3)
"""Noise levels at which the prior is asked for its surprise: forms show at the first, textures at the second."""


class Judge(Protocol):
    """Says of each sample, by its picture or its logits, whether that is good enough, [B]."""

    def __call__(self, shown: Tensor, /, rows: Tensor) -> Tensor:
        """`rows` [B] are the samples' places in the whole batch."""
        ...


@dataclass
class Redrawn:
    """Counterfactuals after the walks, and what they took."""

    x_cf: Tensor
    soft: Tensor
    found: Tensor  # [B] bool; False where no walk was convincing, and picture and weights are as they came
    walks: Tensor  # [B] decodes and queries
    network_calls: Tensor  # [B]
    guided_steps: Tensor  # [B]


def redraw(
    runtime: Runtime,
    x0: Tensor,
    z0: Tensor,
    y: Tensor,
    x_cf: Tensor,
    soft: Tensor,
    m_excl: Tensor,
    eps: Tensor,
    seeds: Sequence[int],
    recipe: Recipe,
    satisfies: Judge,
    convinces: Judge,
    watch: Callable[[int], None] = lambda step: None,
) -> Redrawn:
    """Each counterfactual as the least surprising of its convincing walks, `recipe.redraw` of them for each region.

    `satisfies(logits, rows)` pauses a sample's guidance, `convinces(pictures, rows)` accepts a finished picture.
    """
    counts = torch.zeros(len(x0), dtype=torch.long, device=x0.device)
    none = torch.zeros(len(x0), dtype=torch.bool, device=x0.device)
    done = Redrawn(x_cf.clone(), soft.clone(), none, counts, counts.clone(), counts.clone())
    rows, compared = torch.arange(len(x0), device=x0.device), recipe.redraw > 1
    for place, level in enumerate(recipe.redraw_regions):
        region = rounded(soft[rows] > 0, recipe.redraw_blur, level).to(soft.dtype) * m_excl[rows]
        weights = faded(region, recipe.redraw_fade)
        kept = to_latent((weights <= 0).to(soft.dtype), (z0.shape[-2], z0.shape[-1]))
        least = torch.full((len(rows),), torch.inf, dtype=z0.dtype, device=x0.device)
        satisfied = partial(satisfies, rows=rows)
        for walk in range(recipe.redraw):
            draw = place * recipe.redraw + walk
            generators = [torch.Generator().manual_seed(row_seed(seeds[row], draw)) for row in rows.tolist()]
            z, guided = walk_inside(runtime, z0[rows], y[rows], kept, generators, recipe.redraw_eta, satisfied, watch)
            x = composite(x0[rows], runtime.decode(z).clamp(0.0, 1.0), weights)
            odd = surprise(runtime, x, 1.0 - kept, eps[rows]) if compared else torch.zeros_like(least)
            better = convinces(x, rows) & (odd < least)
            least = torch.where(better, odd, least)
            taken = rows[better]
            done.x_cf[taken], done.soft[taken], done.found[taken] = x[better], weights[better], True
            done.walks[rows] += 1
            done.network_calls[rows] += runtime.path.length + compared * 2 * len(LEVELS)
            done.guided_steps[rows] += guided
        rows = rows[~done.found[rows]]
        if not len(rows):
            break
    return done


def walk_inside(
    runtime: Runtime,
    z0: Tensor,
    y: Tensor,
    kept: Tensor,
    generators: Sequence[torch.Generator],
    eta: float,
    satisfies: Callable[[Tensor], Tensor],
    watch: Callable[[int], None] = lambda step: None,
) -> tuple[Tensor, int]:
    """(clean latent, guided steps) of a random walk from the path's full noise, with z0 outside in every step.

    The push goes into the estimate ahead of each step: eta times the gradient, whose root mean square is 1 over the
    sample's latent.
    """
    path, guided_steps = runtime.path, 0
    growth = growths(path)
    z, before = path.noise(z0, fresh_noise(generators, z0), 0), None
    for i in range(path.length):
        watch(i)
        z_hat = torch.where(kept > 0, z0, path.estimate(z, runtime.velocity(z, i), i))
        if i == path.length - 1:
            return z_hat, guided_steps
        ahead = drawn_ahead(growth, i, z_hat, before)
        if GUIDED[0] < float(path.sigma(i)) < GUIDED[1]:
            gradient, _, logits = runtime.guidance(z_hat, y)
            guided_steps += 1
            push = eta * normalise_per_sample(torch.where(kept > 0, 0.0, gradient))
            ahead = torch.where(satisfies(logits).view(-1, 1, 1, 1), ahead, ahead - push)
        z, before = forgetful_step(path, growth, i, z, ahead, fresh_noise(generators, z0)), z_hat
    raise AssertionError("a path has at least one step")


def surprise(runtime: Runtime, x: Tensor, free: Tensor, eps: Tensor) -> Tensor:
    """[B] how far the prior's estimates of the noised picture lie from it, as a mean square over the `free` cells.

    What the prior knows it restores; of a smear it makes something else.
    """
    path, z = runtime.path, runtime.encode(x)
    total = torch.zeros_like(z[:, 0, 0, 0])
    for level in LEVELS:
        i = min(first_below(path, level), path.length - 1)
        for noise in (eps, -eps):
            state = path.noise(z, noise, i)
            error = (path.estimate(state, runtime.velocity(state, i), i) - z).square().mean(1, keepdim=True)
            total += (error * free).sum((1, 2, 3)) / free.sum((1, 2, 3)).clamp_min(1.0)
    return total
