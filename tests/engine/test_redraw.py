"""Edits drawn anew by the prior: where they lie, which walk is kept, what is withheld, and what it costs."""

import torch
from torch import Tensor

from engine.guidance import gradient_source
from engine.loop import counterfactuals
from engine.recipe import Recipe
from engine.redraw import GUIDED, LEVELS, Redrawn, redraw, surprise, walk_inside
from engine.runtime.torch_runtime import TorchRuntime
from engine.trajectory import draw_noise
from tests.engine.test_loop import RECIPE, SPREAD, Sides, gaussian_prior, images

REDRAW = RECIPE.changed(
    steps=20, strength=1.0, redraw=3, redraw_blur=1.0, redraw_regions=(0.5, 0.2), redraw_fade=0.5, margin=0.2
)


def runtime_of(recipe: Recipe = REDRAW) -> TorchRuntime:
    prior, classifier = gaussian_prior(), Sides()
    return TorchRuntime(
        prior, prior.path(recipe.steps, recipe.strength, 16, 16), gradient_source(recipe, classifier, classifier)
    )


def never(shown: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(len(shown), dtype=torch.bool)


def redrawn(convinces, m_excl: Tensor | None = None, batch: int = 3) -> tuple[Redrawn, Tensor, Tensor, Tensor]:
    """(outcome, x0, x_cf, soft) of an edit that is a bright square."""
    x0, runtime = images(3)[:batch], runtime_of()
    soft = torch.zeros(batch, 1, 16, 16)
    soft[..., 4:11, 4:11] = 1
    x_cf = torch.where(soft > 0, 1.0, x0)
    z0 = runtime.encode(x0)
    eps = draw_noise(list(range(batch)), 1, z0)[:, 0]
    free = torch.ones_like(soft) if m_excl is None else m_excl
    y = torch.ones(batch, dtype=torch.long)
    with torch.no_grad():
        done = redraw(runtime, x0, z0, y, x_cf, soft, free, eps, list(range(batch)), REDRAW, never, convinces)
    return done, x0, x_cf, soft


def test_an_unguided_walk_draws_from_the_prior_and_holds_the_original_outside() -> None:
    runtime = runtime_of()
    z0 = torch.full((64, 3, 16, 16), 0.2)
    kept = torch.zeros(64, 1, 16, 16)
    kept[..., :8] = 1
    generators = [torch.Generator().manual_seed(b) for b in range(64)]
    z, guided = walk_inside(runtime, z0, torch.ones(64, dtype=torch.long), kept, generators, 0.0, lambda x: x[:, 0] > 9)
    assert torch.equal(z[..., :8], z0[..., :8])
    assert abs(float(z[..., 8:].mean())) < 0.02 and abs(float(z[..., 8:].std()) - SPREAD) < 0.03
    levels = runtime.path.b[:-2]
    assert guided == int(((levels > GUIDED[0]) & (levels < GUIDED[1])).sum())


def test_a_push_brightens_what_is_free() -> None:
    runtime, y = runtime_of(), torch.ones(2, dtype=torch.long)
    z0, kept = torch.zeros(2, 3, 16, 16), torch.zeros(2, 1, 16, 16)

    def end(eta: float, enough: bool) -> Tensor:
        generators = [torch.Generator().manual_seed(b) for b in range(2)]
        return walk_inside(runtime, z0, y, kept, generators, eta, lambda x: torch.full((len(x),), enough))[0]

    assert float((end(0.5, False) - end(0.0, False)).mean()) > 0.05
    assert torch.equal(end(0.5, True), end(0.0, False))


def test_surprise_is_the_error_of_the_posterior_mean() -> None:
    runtime, x = runtime_of(), images(2)
    free = torch.zeros(2, 1, 16, 16)
    free[..., 3:9, 2:5] = 1
    z = runtime.encode(x)
    eps = draw_noise([0, 1], 1, z)[:, 0]
    expected = torch.zeros(2)
    for level in LEVELS:
        b = next(b for b in runtime.path.b if b <= level)
        shrink = SPREAD**2 * (1 - b) / ((1 - b) ** 2 * SPREAD**2 + b**2)
        for noise in (eps, -eps):
            error = (shrink * ((1 - b) * z + b * noise) - z).square()
            expected += error[..., 3:9, 2:5].mean((1, 2, 3))
    torch.testing.assert_close(surprise(runtime, x, free, eps), expected, rtol=1e-4, atol=1e-5)


def test_the_least_surprising_convincing_walk_of_the_smallest_region_is_kept() -> None:
    asked: list[tuple[Tensor, Tensor]] = []

    def convinces(x: Tensor, rows: Tensor) -> Tensor:
        asked.append((x, rows))
        return torch.tensor([row == 0 or (row == 1 and len(asked) > 3) for row in rows.tolist()])

    done, x0, x_cf, soft = redrawn(convinces)
    assert [rows.tolist() for _, rows in asked] == [[0, 1, 2]] * 3 + [[1, 2]] * 3
    assert done.found.tolist() == [True, True, False] and done.walks.tolist() == [3, 6, 6]
    assert torch.equal(done.x_cf[2], x_cf[2]) and torch.equal(done.soft[2], soft[2])
    runtime = runtime_of()
    eps = draw_noise([0], 1, runtime.encode(x0[:1]))[:, 0]
    free = (done.soft[:1] > 0).float()
    odd = [float(surprise(runtime, x[:1], free, eps)) for x, _ in asked[:3]]
    assert torch.equal(done.x_cf[0], asked[odd.index(min(odd))][0][0]) and len(set(odd)) == 3
    assert (done.soft[1] > 0).sum() > (done.soft[0] > 0).sum()


def test_edits_stay_open_and_a_sample_does_not_depend_on_its_mates() -> None:
    def yes(x: Tensor, rows: Tensor) -> Tensor:
        return torch.ones(len(x), dtype=torch.bool)

    closed = torch.ones(3, 1, 16, 16)
    closed[..., :6, :] = 0
    done, x0, _, _ = redrawn(yes, closed)
    assert not done.soft[closed == 0].any() and bool((done.soft > 0).any())
    outside = ~(done.soft > 0).expand(-1, 3, -1, -1)
    assert torch.equal(done.x_cf[outside], x0[outside])
    alone, *_ = redrawn(yes, closed[:1], batch=1)
    assert torch.equal(alone.x_cf[0], done.x_cf[0]) and torch.equal(alone.soft[0], done.soft[0])


def test_the_loop_counts_the_walks_stays_flipped_and_withholds_what_surprises() -> None:
    x0 = images(2)
    small = {"redraw_blur": 1.0, "redraw_fade": 0.3, "redraw_regions": (0.5, 0.3)}
    recipe = RECIPE.changed(k=2, steps=12, eta=1.0, tau=0.5, **small)

    def run(**settings):
        return counterfactuals(gaussian_prior(), Sides(), Sides(), x0, [1, 1], recipe.changed(**settings), seeds=[1, 2])

    plain, drawn, strict = run(), run(redraw=2), run(redraw=2, surprise_limit=1e-6)
    for before, after, kept in zip(plain, drawn, strict, strict=True):
        assert after.flipped == before.flipped == (True, True)
        first, second = after.costs[0], before.costs[0]
        assert first.decoder_backwards > second.decoder_backwards and first.network_calls > second.network_calls
        walks = first.classifier_queries - second.classifier_queries - 1
        assert walks in (2, 4)
        assert not (after.edit_masks[0] & after.edit_masks[1]).any()
        assert torch.equal(kept.images[0], after.images[0]) and kept.flipped == (True, False)
        assert torch.equal(kept.images[1], kept.x0) and not kept.edit_masks[1].any()
        assert torch.equal(kept.logits[1], kept.source_logits)
        assert kept.costs[1].network_calls == after.costs[1].network_calls + 4 * len(LEVELS)
