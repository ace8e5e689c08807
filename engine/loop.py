"""The guided loop of SCE-LITE-HQ (Algorithm 1 of the paper): K counterfactuals per image, disjoint in their edits.

Shapes: B batch, C latent channels, h w latent size, H W image size, K counterfactuals per image.
    x0, x_cf             [B, 3, H, W] in [0, 1]
    z, z0, z_hat, eps    [B, C, h, w]
    masks                [B, 1, H, W] or [B, 1, h, w]; 1 keeps the original
    logits               [B, classes]
    y                    [B] target classes

`counterfactuals` is the entrance. `trajectory` is one pass of Algorithm 1, `finish` its last line with the exact
composite. Nothing mixes samples and each sample's noise comes from its own seed, so a result does not depend on batch
mates; networks may round differently for other batch sizes, which micro_batch = 1 rules out.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from engine.errors import Cancelled, ClassifierError, ImageError, PriorError, RecipeError, TargetError
from engine.guidance import (
    Model,
    clip_per_sample,
    frozen_model,
    gradient_source,
    normalise_per_sample,
    proximity_gradient,
)
from engine.harmonise import Harmonised, harmonise
from engine.masks import composite, exclusion, frozen, grown, phase_one, psi, soft_edit, to_latent, to_pixels
from engine.path import Path
from engine.prior import Prior, content_hash
from engine.prune import SHARES, part, ranks, relevance, smallest
from engine.recipe import Recipe
from engine.redraw import LEVELS, Judge, Redrawn, redraw, surprise
from engine.runtime import Runtime
from engine.runtime.torch_runtime import TorchRuntime
from engine.sampling import row_seed
from engine.settings import Settings

REGION_RIM = 3
"""Pixels by which the region of a second pass reaches beyond the first edit, so that it can find a clean border."""


class CancelToken(Protocol):
    """What can be asked whether to stop; threading.Event is one."""

    def is_set(self) -> bool:
        """Whether the caller wants to stop."""
        ...


@dataclass(frozen=True)
class Progress:
    """Where a run is: counterfactual k of `count`, the attempt, the step, and how many samples are in this pass."""

    k: int
    count: int
    attempt: int
    step: int
    steps: int
    samples: int


@dataclass(frozen=True)
class Cost:
    """What one sample used, every try counted; seconds are the sample's share of the time its batches took."""

    tries: int = 0
    network_calls: int = 0
    decoder_forwards: int = 0
    decoder_backwards: int = 0
    classifier_queries: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class CounterfactualSet:
    """The K counterfactuals of one image, with all that is needed to make them again."""

    x0: Tensor  # [3, H, W]
    source: int  # the class that f gives x0
    target: int
    images: Tensor  # [K, 3, H, W]; outside the edit bit-identical to x0
    soft_masks: Tensor  # [K, 1, H, W] the weights of the composite, in [0, 1]
    edit_masks: Tensor  # [K, 1, H, W] bool, where the weight is not 0
    flipped: tuple[bool, ...]  # whether f gives the target
    logits: Tensor  # [K, classes] of f
    source_logits: Tensor  # [classes] of f at x0
    seed: int
    recipe: Settings  # a Recipe, or the settings of another method
    factors: tuple[float, ...]  # the escalation factor that each counterfactual was kept from
    hashes: dict[str, str]  # of the prior, the classifier, the guide, the recipe and the image
    costs: tuple[Cost, ...]  # one per counterfactual
    setup: Cost  # encoding, reconstruction and the first query

    @property
    def cost(self) -> Cost:
        """The whole cost of the set."""
        return sum(self.costs, self.setup)


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


def counterfactuals(
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    x0: Tensor,
    targets: Sequence[int] | Tensor,
    recipe: Recipe,
    seeds: Sequence[int] | None = None,
    *,
    runtime: Runtime | None = None,
    tiny_decoder: Callable[[Tensor], Tensor] | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """K counterfactuals for each image of a batch: Algorithm 1 with Phase II between counterfactuals and escalation.

    `f` is the audited classifier and alone decides what has flipped; `f_hat` guides (it may be None for gradient
    sources that use f itself). Both take images in [0, 1] of any size and give logits; the guide also sees decoded
    images that reach a little outside. Without `seeds` every image gets the recipe's. Without `runtime` the prior runs
    in eager torch.
    """
    with torch.no_grad(), ExitStack() as stack:
        for model in (f, f_hat):
            stack.enter_context(frozen_model(model))
        start = time.perf_counter()
        check_images(x0)
        prior.latent_shape(x0.shape[2], x0.shape[3])
        source_logits = query(f, x0)
        y = check_targets(targets, source_logits)
        numbers = check_seeds(seeds, len(x0), recipe)
        guide = check_guide(f, f_hat, x0, source_logits, recipe)
        if runtime is None:
            runtime = TorchRuntime(
                prior,
                prior.path(recipe.steps, recipe.strength, x0.shape[2], x0.shape[3]).to(x0.device),
                gradient_source(recipe, f, guide),
                micro_batch=recipe.micro_batch,
                checkpointed=recipe.checkpoint,
                tiny_decoder=tiny_decoder,
            )
        if runtime.path.length < 2 and not recipe.guide_last_step:
            raise RecipeError(
                f"{recipe.steps} steps at strength {recipe.strength} execute one step, and the last is not guided; "
                "raise the steps or the strength."
            )
        z0 = runtime.encode(x0)
        rebuilt = runtime.decode(z0).clamp(0.0, 1.0) if recipe.needs_reconstruction else None
        originals = Originals(x0, z0, y, rebuilt)
        seconds = (time.perf_counter() - start) / len(x0)
        setup = Cost(decoder_forwards=int(rebuilt is not None), classifier_queries=1, seconds=seconds)

        noises = draw_noise(numbers, recipe.k, z0)
        cumulative, edited = torch.zeros_like(x0[:, :1]), torch.zeros_like(x0[:, :1])
        found: list[_Best] = []
        for k in range(recipe.k):
            m_excl = exclusion(cumulative, edited, recipe.tau)
            best = _escalate(runtime, f, guide, originals, noises[:, k], numbers, m_excl, recipe, k, progress, cancel)
            if k and recipe.surprise_limit is not None:
                _withhold(runtime, originals, noises[:, k], source_logits, recipe.surprise_limit, best)
            cumulative = cumulative + psi(x0, best.x_cf, recipe.blur)
            edited = torch.maximum(edited, (best.soft > 0).to(edited.dtype))
            found.append(best)

    hashes = {
        "prior": prior.content_hash,
        "classifier": model_hash(f),
        "guide": model_hash(guide),
        "recipe": recipe.digest,
    }
    return [
        CounterfactualSet(
            x0=x0[b],
            source=int(source_logits[b].argmax()),
            target=int(y[b]),
            images=torch.stack([best.x_cf[b] for best in found]),
            soft_masks=torch.stack([best.soft[b] for best in found]),
            edit_masks=torch.stack([best.soft[b] > 0 for best in found]),
            flipped=tuple(bool(best.flipped[b]) for best in found),
            logits=torch.stack([best.logits[b] for best in found]),
            source_logits=source_logits[b],
            seed=numbers[b],
            recipe=recipe,
            factors=tuple(best.factors[b] for best in found),
            hashes={**hashes, "image": hashlib.sha256(x0[b].cpu().contiguous().numpy().tobytes()).hexdigest()},
            costs=tuple(best.costs[b] for best in found),
            setup=setup,
        )
        for b in range(len(x0))
    ]


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

    The last step is not guided unless the recipe says so, for nothing would denoise its push; the mask of the step
    before stays. A sample whose decoded estimate already has the target with `margin` is guided no more and leaves the
    gradient's batch: that is the larger half of a step's cost.
    """
    path, z0, y = runtime.path, originals.z0, originals.y
    reference = originals.reference(recipe)
    size = (z0.shape[-2], z0.shape[-1])
    last = path.length - 1
    masked_from = first_masked(path, recipe)
    z = path.noise(z0, eps, 0)
    kept = to_latent(1.0 - m_excl, size, recipe.downsampling)
    rows = torch.arange(len(z), device=z.device)  # samples that are still guided
    guided_steps = torch.zeros(len(z), dtype=torch.long, device=z.device)
    for i in range(path.length):
        watch(i)
        v = runtime.velocity(z, i)
        if recipe.estimate == "pre":
            z_hat = path.estimate(z, v, i)
            z = path.step(z, v, i)
        else:
            z = path.step(z, v, i)
            z_hat = path.estimate(z, v, i)
        if len(rows) and (i < last or recipe.guide_last_step):
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
    """The classifier gradient, normalised and clipped per sample as the recipe says."""
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


@dataclass
class _Best:
    """The best try so far of each sample, by f."""

    x_cf: Tensor
    soft: Tensor
    logits: Tensor
    flipped: Tensor
    factors: list[float]
    costs: list[Cost]


def _escalate(
    runtime: Runtime,
    f: Model,
    guide: Model,
    originals: Originals,
    eps: Tensor,
    seeds: Sequence[int],
    m_excl: Tensor,
    recipe: Recipe,
    k: int,
    progress: Callable[[Progress], None] | None,
    cancel: CancelToken | None,
) -> _Best:
    """One counterfactual per sample: tries with growing guidance, each only for samples that f has not yet flipped.

    The margin for early stop moves half way to certainty with each try: a sample that stopped and fell back must not
    stop at the same place again.
    """
    batch = len(eps)
    rows = torch.arange(batch, device=eps.device)
    best: _Best | None = None
    for attempt, factor in enumerate(recipe.escalation):
        start = time.perf_counter()

        def watch(step: int, attempt: int = attempt, samples: int = len(rows)) -> None:
            if cancel is not None and cancel.is_set():
                raise Cancelled("The run was cancelled.")
            if progress is not None:
                progress(Progress(k, recipe.k, attempt, step, runtime.path.length, samples))

        margin = None if recipe.margin is None else 1.0 - (1.0 - recipe.margin) / 2**attempt
        some, editable = originals.pick(rows), m_excl[rows]
        tried = _try(runtime, f, guide, some, eps[rows], editable, recipe, factor, margin, watch)
        if recipe.second_pass and bool(tried.flipped.any()):
            hit = tried.flipped.nonzero()[:, 0]
            region = editable[hit] * grown(tried.soft[hit] > 0, REGION_RIM).to(editable.dtype)
            again = _try(runtime, f, guide, some.pick(hit), eps[rows][hit], region, recipe, factor, margin, watch)
            tried.replace(hit, again, convincing(again.logits, query(guide, again.x_cf), some.y[hit], recipe))
        rough = tried.flipped.nonzero()[:, 0]
        if recipe.redraw and len(rough):
            own = [row_seed(seeds[row], k) for row in rows[rough].tolist()]
            found = _redraw(runtime, f, guide, some, eps[rows], own, editable, recipe, tried, rough, watch)
            rough = rough[~found]
        if recipe.harmonise and len(rough):
            _harmonise(runtime, f, guide, some, eps[rows], editable, recipe, tried, rough, watch)
        x_cf, soft, logits, flipped = tried.x_cf, tried.soft, tried.logits, tried.flipped
        scores = lead(logits, some.y)
        seconds = (time.perf_counter() - start) / len(rows)
        spent = [
            Cost(1, calls, steps + decodes, steps, asked, seconds)
            for calls, decodes, steps, asked in zip(
                tried.network_calls.tolist(),
                tried.decodes.tolist(),
                tried.guided_steps.tolist(),
                tried.queries.tolist(),
                strict=True,
            )
        ]
        if best is None:
            best = _Best(x_cf, soft, logits, flipped, [factor] * batch, spent)
        else:
            better = flipped | (scores > lead(best.logits[rows], some.y))
            kept = rows[better]
            best.x_cf[kept], best.soft[kept], best.logits[kept] = x_cf[better], soft[better], logits[better]
            best.flipped[kept] = flipped[better]
            for row, cost, wins in zip(rows.tolist(), spent, better.tolist(), strict=True):
                best.costs[row] = best.costs[row] + cost
                best.factors[row] = factor if wins else best.factors[row]
        rows = rows[~flipped]
        if not len(rows):
            break
    assert best is not None  # a recipe has at least one factor
    return best


@dataclass
class _Try:
    """What one pass, or a first and a second, made of some samples."""

    x_cf: Tensor
    soft: Tensor
    logits: Tensor
    flipped: Tensor  # [B] bool
    guided_steps: Tensor  # [B]
    queries: Tensor  # [B]
    network_calls: Tensor  # [B]
    decodes: Tensor  # [B] besides those of guided steps

    def replace(self, rows: Tensor, other: "_Try", better: Tensor) -> None:
        """Takes over another try of some samples where it is better; its cost counts in any case."""
        for name in ("guided_steps", "queries", "network_calls", "decodes"):
            getattr(self, name)[rows] += getattr(other, name)
        taken = rows[better]
        for name in ("x_cf", "soft", "logits", "flipped"):
            getattr(self, name)[taken] = getattr(other, name)[better]

    def adopt(self, rows: Tensor, walked: Harmonised | Redrawn, logits: Tensor) -> None:
        """Takes over what further walks made of some samples; `logits` are the answers to one last query."""
        self.x_cf[rows], self.soft[rows], self.logits[rows] = walked.x_cf, walked.soft, logits
        self.queries[rows] += walked.walks + 1
        self.decodes[rows] += walked.walks
        self.network_calls[rows] += walked.network_calls


def _try(
    runtime: Runtime,
    f: Model,
    guide: Model,
    originals: Originals,
    eps: Tensor,
    m_excl: Tensor,
    recipe: Recipe,
    factor: float,
    margin: float | None,
    watch: Callable[[int], None],
) -> _Try:
    """One pass of Algorithm 1 and, where it flipped, the pruning of its edit."""
    walk = runtime.trajectory if isinstance(runtime, WalkingRuntime) else partial(trajectory, runtime)
    end = walk(originals, eps, m_excl, recipe, factor=factor, margin=margin, watch=watch)
    x_cf, soft = finish(runtime, originals, end, m_excl, recipe)
    logits = query(f, x_cf)
    flipped = logits.argmax(dim=1) == originals.y
    queries = torch.ones_like(end.guided_steps)
    if recipe.prune and bool(flipped.any()):
        hit = flipped.nonzero()[:, 0]
        x_cf[hit], soft[hit], logits[hit], asked = _prune(f, guide, originals.pick(hit), x_cf[hit], soft[hit], recipe)
        queries[hit] += asked
    calls = torch.full_like(queries, runtime.path.length)
    return _Try(x_cf, soft, logits, flipped, end.guided_steps, queries, calls, torch.ones_like(queries))


def convincing(logits: Tensor, guide_logits: Tensor, y: Tensor, recipe: Recipe) -> Tensor:
    """[B] whether f and the guide both give the target with the recipe's margin.

    The guide has its say because f alone could be satisfied with a few adversarial pixels.
    """
    margin = recipe.margin or 0.0
    flipped = logits.argmax(dim=1) == y
    return flipped & (lead(logits, y) >= margin) & (lead(guide_logits, y) >= margin)


def _convinces(f: Model, guide: Model, y: Tensor, recipe: Recipe) -> Judge:
    """`convincing` of finished pictures, for some rows of a batch whose targets are y."""

    def judge(shown: Tensor, /, rows: Tensor) -> Tensor:
        return convincing(query(f, shown), query(guide, shown), y[rows], recipe)

    return judge


def _redraw(
    runtime: Runtime,
    f: Model,
    guide: Model,
    originals: Originals,
    eps: Tensor,
    seeds: Sequence[int],
    m_excl: Tensor,
    recipe: Recipe,
    tried: _Try,
    hit: Tensor,
    watch: Callable[[int], None],
) -> Tensor:
    """Draws the counterfactuals `hit` of a try anew and says of each whether a convincing one was found.

    The walk aims half way from the margin to certainty, for its unguided end gives some of that away.
    """
    some = originals.pick(hit)
    aim = 1.0 - (1.0 - (recipe.margin or 0.0)) / 2

    def satisfies(logits: Tensor, rows: Tensor) -> Tensor:
        return lead(logits, some.y[rows]) >= aim

    done = redraw(
        runtime,
        some.x0,
        some.z0,
        some.y,
        tried.x_cf[hit],
        tried.soft[hit],
        m_excl[hit],
        eps[hit],
        seeds,
        recipe,
        satisfies,
        _convinces(f, guide, some.y, recipe),
        watch,
    )
    tried.adopt(hit, done, query(f, done.x_cf))
    tried.guided_steps[hit] += done.guided_steps
    return done.found


def _withhold(
    runtime: Runtime, originals: Originals, eps: Tensor, source_logits: Tensor, limit: float, best: "_Best"
) -> None:
    """Replaces by the original what did not flip, or surprises the prior more than `limit` times as much as x0 does.

    Surprise is compared where the edit is. A second explanation is welcome, but a smear explains nothing.
    """
    start = time.perf_counter()
    free = 1.0 - to_latent((best.soft <= 0).to(eps.dtype), (eps.shape[-2], eps.shape[-1]))
    odd, usual = (surprise(runtime, x, free, eps) for x in (best.x_cf, originals.x0))
    gone = ~best.flipped | (odd > limit * usual)
    best.x_cf[gone], best.soft[gone] = originals.x0[gone], 0.0
    best.logits[gone], best.flipped[gone] = source_logits[gone], False
    asked = Cost(network_calls=2 * 2 * len(LEVELS), seconds=(time.perf_counter() - start) / len(eps))
    best.costs = [cost + asked for cost in best.costs]


def _harmonise(
    runtime: Runtime,
    f: Model,
    guide: Model,
    originals: Originals,
    eps: Tensor,
    m_excl: Tensor,
    recipe: Recipe,
    tried: _Try,
    hit: Tensor,
    watch: Callable[[int], None],
) -> None:
    """Walks the counterfactuals `hit` of a try back onto the prior."""
    some = originals.pick(hit)

    done = harmonise(
        runtime,
        some.x0,
        some.z0,
        tried.x_cf[hit],
        tried.soft[hit],
        m_excl[hit],
        eps[hit],
        recipe.harmonise,
        recipe.tau,
        recipe.blur,
        recipe.feather,
        _convinces(f, guide, some.y, recipe),
        watch,
    )
    tried.adopt(hit, done, query(f, done.x_cf))


def _prune(
    f: Model, guide: Model, originals: Originals, x_cf: Tensor, soft: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(x_cf, soft edit mask, logits of f, queries of f): flipped counterfactuals cut down to what the flip needs.

    A part is enough if it is convincing.
    """
    x0, y = originals.x0, originals.y
    order = ranks(relevance(guide, x0, x_cf, y, recipe.blur), soft > 0)
    shares = torch.tensor((*SHARES, 1.0), device=x0.device)
    asked = 0

    def cut(choice: Tensor) -> tuple[Tensor, Tensor]:
        smaller = torch.where(
            (choice < len(SHARES)).view(-1, 1, 1, 1), part(soft, order, shares[choice], recipe.feather), soft
        )
        weight = torch.where(soft > 0, smaller / soft.clamp_min(1e-6), 0.0).clamp(0.0, 1.0)
        return composite(x0, x0 + weight * (x_cf - x0), (smaller > 0).to(x0.dtype)), smaller

    def enough(choice: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        x, _ = cut(choice)
        return convincing(query(f, x), query(guide, x), y, recipe)

    choice = smallest(enough, len(SHARES), len(x0), x0.device)
    x, smaller = cut(choice)
    return x, smaller, query(f, x), asked + 1


def query(f: Model, images: Tensor) -> Tensor:
    """The classifier's logits [B, classes], checked."""
    logits = f(images)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[0] != len(images) or logits.shape[1] < 2:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ClassifierError(
            f"The classifier answered {shape} to {len(images)} images; it has to give logits [{len(images)}, classes] "
            "with at least two classes."
        )
    if not bool(torch.isfinite(logits).all()):
        raise ClassifierError("The classifier answered with NaN or infinity.")
    return logits.detach().float()


def check_images(x0: Tensor) -> None:
    """Images are a float tensor [B, 3, H, W] in [0, 1]."""
    if not isinstance(x0, Tensor):
        raise ImageError(f"Images have to be a tensor [B, 3, H, W]; this is a {type(x0).__name__}.")
    if x0.ndim != 4 or x0.shape[1] != 3 or not len(x0):
        raise ImageError(f"Images have to be [B, 3, H, W] in RGB; these are {list(x0.shape)}.")
    if not x0.is_floating_point():
        raise ImageError(f"Images have to be floats in [0, 1]; these are {x0.dtype}.")
    if not bool(torch.isfinite(x0).all()):
        raise ImageError("The images hold NaN or infinity.")
    if bool(x0.min() < 0) or bool(x0.max() > 1):
        raise ImageError(f"Images have to lie in [0, 1]; these reach from {x0.min():.3g} to {x0.max():.3g}.")


def check_targets(targets: Sequence[int] | Tensor, logits: Tensor) -> Tensor:
    """Targets [B] as a tensor: known classes that f does not predict already."""
    values = targets.tolist() if isinstance(targets, Tensor) else list(targets)
    batch, classes = logits.shape
    if len(values) != batch:
        raise TargetError(f"There are {len(values)} targets for {batch} images.")
    for value, predicted in zip(values, logits.argmax(dim=1).tolist(), strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < classes:
            raise TargetError(f"The target {value!r} is unknown; the classifier has the classes 0 to {classes - 1}.")
        if value == predicted:
            raise TargetError(f"The target {value} is what the classifier says already; choose another class.")
    return torch.tensor(values, dtype=torch.long, device=logits.device)


def check_seeds(seeds: Sequence[int] | None, batch: int, recipe: Recipe) -> list[int]:
    """One seed per image."""
    numbers = [recipe.seed] * batch if seeds is None else [int(seed) for seed in seeds]
    if len(numbers) != batch:
        raise RecipeError(f"There are {len(numbers)} seeds for {batch} images.")
    if any(not 0 <= seed < 2**63 for seed in numbers):
        raise RecipeError("A seed has to lie between 0 and 2^63 - 1.")
    return numbers


def check_guide(f: Model, f_hat: Model | None, x0: Tensor, logits: Tensor, recipe: Recipe) -> Model:
    """The model whose gradient guides; a surrogate has to know the same classes as f."""
    if recipe.gradient != "surrogate":
        return f
    if f_hat is None:
        raise RecipeError("The gradient source 'surrogate' needs a surrogate; give one or choose another source.")
    if query(f_hat, x0[:1]).shape[1] != logits.shape[1]:
        raise ClassifierError("The surrogate and the classifier do not have the same number of classes.")
    return f_hat


def model_hash(model: Model) -> str:
    """A model's own content hash if it has one, else that of its weights; empty for a bare function."""
    own = getattr(model, "content_hash", None)
    if isinstance(own, str):
        return own
    return content_hash(model) if isinstance(model, nn.Module) else ""
