"""One pass of Algorithm 1 of the paper: `trajectory` walks guided steps, `finish` is the last line and composite.

Shapes: B batch, C latent channels, h w latent size, H W image size.
    x0, x_cf             [B, 3, H, W] in [0, 1]
    z, z0, z_hat, eps    [B, C, h, w]
    m_excl               [B, 1, H, W] 1 where the counterfactual may edit
    kept                 [B, 1, h, w] 1 where the latent of the original stays
    logits               [B, classes]
    y                    [B] target classes
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.errors import PriorError
from engine.guidance import clip_per_sample, normalise_per_sample, proximity_gradient
from engine.masks import composite, frozen, gaussian_blur, phase_one, psi, soft_edit, to_latent, to_pixels
from engine.path import Path
from engine.recipe import Recipe
from engine.runtime import Runtime


@dataclass(frozen=True)
class Trajectory:
    """The end of one pass of Algorithm 1."""

    z: Tensor  # [B, C, h, w] the clean latent
    kept: Tensor  # [B, 1, h, w] cells that hold z0
    guided_steps: Tensor  # [B] decoder forwards and backwards that each sample used


@dataclass(frozen=True)
class Originals:
    """What stays fixed for a batch of images throughout all counterfactuals and tries."""

    x0: Tensor
    z0: Tensor
    y: Tensor
    reconstruction: Tensor | None  # D(z0), if the recipe compares with it

    def pick(self, rows: Tensor) -> "Originals":
        """The originals of some samples."""
        rebuilt = None if self.reconstruction is None else self.reconstruction[rows]
        return Originals(self.x0[rows], self.z0[rows], self.y[rows], rebuilt)

    def reference(self, recipe: Recipe) -> Tensor:
        """The picture that Psi measures changes against."""
        if recipe.mask_reference == "reconstruction" and self.reconstruction is not None:
            return self.reconstruction
        return self.x0


@runtime_checkable
class WalkingRuntime(Runtime, Protocol):
    """A runtime that makes a whole pass by itself and comes to the same end as `trajectory`."""

    def trajectory(
        self,
        originals: Originals,
        eps: Tensor,
        m_excl: Tensor,
        recipe: Recipe,
        *,
        factor: float = 1.0,
        margin: float | None = None,
        watch: Callable[[int], None] = lambda step: None,
    ) -> Trajectory:
        """One pass of Algorithm 1."""
        ...


def one_pass(runtime: Runtime) -> Callable[..., Trajectory]:
    """The runtime's own pass if it has one, else `trajectory` on it."""
    return runtime.trajectory if isinstance(runtime, WalkingRuntime) else partial(trajectory, runtime)


def trajectory(
    runtime: Runtime,
    originals: Originals,
    eps: Tensor,
    m_excl: Tensor,
    recipe: Recipe,
    *,
    factor: float = 1.0,
    margin: float | None = None,
    watch: Callable[[int], None] = lambda step: None,
) -> Trajectory:
    """One pass of Algorithm 1, steps 2 and 3, from z_t = a_t·z0 + b_t·eps down to a clean latent.

    In each step: the velocity, the denoised estimate z_hat, the step of the path, the update
    z <- z - eta·(factor·beta·g_smooth(z_hat) + ∇ proximity), and the mask z <- (1 - m)·z + m·paste. With estimate =
    "pre" z_hat comes from the state that the velocity was computed at; "paper" takes it after the step, as printed.
    With drift = "cancelled" the walk and z_hat go where guidance sends them and nowhere else.

    The last step is not guided unless the recipe says so, for nothing would denoise its push; the mask of the last
    guided step stays. A sample whose decoded estimate already has the target with `margin` is guided no more and leaves
    the gradient's batch: that is the larger half of a step's cost.
    """
    path, z0, y = runtime.path, originals.z0, originals.y
    reference = originals.reference(recipe)
    size = (z0.shape[-2], z0.shape[-1])
    last = path.length - 1
    masked_from, guided = first_masked(path, recipe), guided_at(path, recipe)
    z = path.noise(z0, eps, 0)
    kept = to_latent(1.0 - m_excl, size, recipe.downsampling)
    rows = torch.arange(len(z), device=z.device)  # samples that are still guided
    guided_steps = torch.zeros(len(z), dtype=torch.long, device=z.device)
    for i in range(path.length):
        watch(i)
        z, z_hat = walked(partial(runtime.velocity, i=i), z, z0, eps, i, path, recipe)
        if len(rows) and guided[i]:
            gradient, x_hat, logits = runtime.guidance(z_hat[rows], y[rows])
            guided_steps[rows] += 1
            state = z_hat[rows] if recipe.proximity == "estimate" else z[rows]
            push = pushed(gradient, state, z0[rows], path.sigma(i), factor * recipe.beta, recipe)
            if i >= masked_from:
                kept[rows] = kept_cells(reference[rows], x_hat, m_excl[rows], size, recipe)
            if margin is None:
                z = z.index_add(0, rows, -push)
            else:
                needy = lead(logits, y[rows]) < margin
                rows = rows[needy]
                z = z.index_add(0, rows, -push[needy])
        clean = recipe.paste == "clean" or i == last
        z = torch.where(kept > 0, z0 if clean else path.noise(z0, eps, i + 1), z)
    return Trajectory(z, kept, guided_steps)


def walked(
    velocity: Callable[[Tensor], Tensor], z: Tensor, z0: Tensor, eps: Tensor, i: int, path: Path, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """(the state after step i, z_hat), with the drift of the original's own walk taken out where the recipe says so.

    From z0 under the noise eps the prior would walk to another picture. What it does to z_t beyond what it does to that
    state is due to guidance: the prior completes a push to something likely, and all else stays. Unguided, every z_t is
    a_t·z0 + b_t·eps and every z_hat is z0.
    """
    after, z_hat = _stepped(velocity, z, i, path, recipe)
    if recipe.drift == "cancelled":
        gone, seen = _stepped(velocity, path.noise(z0, eps, i), i, path, recipe)
        after, z_hat = after + (path.noise(z0, eps, i + 1) - gone), z_hat + (z0 - seen)
    return after, z_hat


def _stepped(
    velocity: Callable[[Tensor], Tensor], z: Tensor, i: int, path: Path, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    v = velocity(z)
    after = path.step(z, v, i)
    return after, path.estimate(z if recipe.estimate == "pre" else after, v, i)


def network_calls(path: Path, recipe: Recipe) -> int:
    """How often one pass asks the prior's network about a sample."""
    return path.length * (2 if recipe.drift == "cancelled" else 1)


def guided_at(path: Path, recipe: Recipe) -> list[bool]:
    """Whether each step computes a gradient: not the last, and none where the noise is too low to denoise a push."""
    last = path.length - 1
    levels = path.b[:-1].tolist()
    return [(i < last or recipe.guide_last_step) and level > recipe.guide_above for i, level in enumerate(levels)]


def first_masked(path: Path, recipe: Recipe) -> int:
    """The step at which Phase I begins."""
    return math.ceil(recipe.mask_start * path.length)


def pushed(
    gradient: Tensor, state: Tensor, z0: Tensor, sigma: Tensor, weight: float | Tensor, recipe: Recipe
) -> Tensor:
    """eta·(weight·g_smooth + ∇ proximity): what the update takes away from z; `weight` is the factor times beta."""
    g = weight * shaped(gradient, recipe)
    g = g + proximity_gradient(state, z0, recipe.lambda1, recipe.lambda2)
    eta = recipe.eta * sigma if recipe.guidance_schedule == "sigma" else recipe.eta
    return eta * g


def kept_cells(reference: Tensor, x_hat: Tensor, m_excl: Tensor, size: tuple[int, int], recipe: Recipe) -> Tensor:
    """Latent cells that both phases keep, by the decoded estimate."""
    m = phase_one(psi(reference, x_hat, recipe.blur), recipe.tau)
    return to_latent(frozen(m, m_excl), size, recipe.downsampling)


def finish(
    runtime: Runtime, originals: Originals, end: Trajectory, m_excl: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """(x_cf, soft edit mask): step 4 of Algorithm 1, then the composite that leaves unedited pixels as they were."""
    x0 = originals.x0
    x = runtime.decode(end.z)
    if not bool(torch.isfinite(x).all()):
        raise PriorError("The prior decoded values that are not finite; lower eta or beta, or set clip.")
    x = x.clamp(0.0, 1.0)
    residual = psi(originals.reference(recipe), x, recipe.blur)
    kept = to_pixels(end.kept, (x.shape[2], x.shape[3]))
    soft = soft_edit(residual, kept, m_excl, recipe.tau, recipe.feather)
    if recipe.composite == "difference" and originals.reconstruction is not None:
        x = x0 + (x - originals.reconstruction)
    return composite(x0, x, soft), soft


def shaped(gradient: Tensor, recipe: Recipe) -> Tensor:
    """The classifier gradient, smoothed, normalised and clipped per sample as the recipe says.

    A smoothed one cannot draw: it shifts what is there, all over an area. Where a classifier leans on a stain as well
    as on nuclei, that is the smaller change of the two, and the one that a sharp gradient passes over.
    """
    if recipe.gradient_blur:
        gradient = gaussian_blur(gradient, recipe.gradient_blur)
    if recipe.normalise:
        gradient = normalise_per_sample(gradient)
    return clip_per_sample(gradient, recipe.clip)


def lead(logits: Tensor, y: Tensor) -> Tensor:
    """p(y') minus the largest other probability, per sample [B]: above 0 the sample has flipped."""
    p = logits.float().softmax(dim=1)
    others = p.scatter(1, y[:, None], -1.0).amax(dim=1)
    return p.gather(1, y[:, None])[:, 0] - others


def draw_noise(seeds: Sequence[int], count: int, z0: Tensor) -> Tensor:
    """eps [B, count, C, h, w]: each sample's draws come from its own seed, on the CPU, whatever the device."""
    draws = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        draws.append(torch.stack([torch.randn(z0.shape[1:], generator=generator) for _ in range(count)]))
    return torch.stack(draws).to(z0.device, z0.dtype)
