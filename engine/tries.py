"""From passes of Algorithm 1 to one convincing counterfactual per image: tries with growing guidance until f flips.

A try is a pass, its edit pruned to what the flip needs and, as the recipe says, passed again, drawn anew or harmonised.

Shapes: B batch, C latent channels, h w latent size, H W image size.
    x0, x_cf             [B, 3, H, W] in [0, 1]
    z0, eps              [B, C, h, w]
    soft                 [B, 1, H, W] the weights of the composite
    m_excl               [B, 1, H, W] 1 where the counterfactual may edit
    logits               [B, classes]
    y                    [B] target classes
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.counterfactual import CancelToken, Cost, Progress
from engine.errors import Cancelled, ClassifierError
from engine.guidance import Model
from engine.harmonise import Harmonised, harmonise
from engine.masks import composite, grown, to_latent
from engine.prune import SHARES, part, ranks, relevance, smallest
from engine.recipe import Recipe
from engine.redraw import LEVELS, Judge, Redrawn, redraw, surprise
from engine.runtime import Runtime
from engine.sampling import row_seed
from engine.trajectory import Originals, finish, lead, network_calls, one_pass

REGION_RIM = 3
"""Pixels by which the region of a second pass reaches beyond the first edit, so that it can find a clean border."""


@dataclass
class Best:
    """The best try so far of each sample, by f."""

    x_cf: Tensor
    soft: Tensor
    logits: Tensor
    flipped: Tensor
    factors: list[float]
    costs: list[Cost]


def escalate(
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
) -> Best:
    """One counterfactual per sample: tries with growing guidance, each only for samples that f has not yet flipped.

    The margin for early stop moves half way to certainty with each try: a sample that stopped and fell back must not
    stop at the same place again.
    """
    batch = len(eps)
    rows = torch.arange(batch, device=eps.device)
    best: Best | None = None
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
            best = Best(x_cf, soft, logits, flipped, [factor] * batch, spent)
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
    end = one_pass(runtime)(originals, eps, m_excl, recipe, factor=factor, margin=margin, watch=watch)
    x_cf, soft = finish(runtime, originals, end, m_excl, recipe)
    logits = query(f, x_cf)
    flipped = logits.argmax(dim=1) == originals.y
    queries = torch.ones_like(end.guided_steps)
    if recipe.prune and bool(flipped.any()):
        hit = flipped.nonzero()[:, 0]
        x_cf[hit], soft[hit], logits[hit], asked = _prune(f, guide, originals.pick(hit), x_cf[hit], soft[hit], recipe)
        queries[hit] += asked
    calls = torch.full_like(queries, network_calls(runtime.path, recipe))
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


def withhold(
    runtime: Runtime, originals: Originals, eps: Tensor, source_logits: Tensor, limit: float, best: "Best"
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
        recipe.outline,
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
        some = part(soft, order, shares[choice], recipe.feather, recipe.outline)
        smaller = torch.where((choice < len(SHARES)).view(-1, 1, 1, 1), some, soft)
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
