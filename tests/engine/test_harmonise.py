"""Finished edits walked back onto the prior: what is kept, what changes, and at which strength the walk stops."""

import torch
from torch import Tensor

from engine.guidance import gradient_source
from engine.harmonise import first_below, harmonise
from engine.loop import counterfactuals
from engine.masks import grown
from engine.runtime.torch_runtime import TorchRuntime
from engine.trajectory import draw_noise
from tests.engine.test_loop import RECIPE, Sides, gaussian_prior, images

STRENGTHS = (0.6, 0.3, 0.1)


def walked(x0: Tensor, x_cf: Tensor, soft: Tensor, accept: list[float], m_excl: Tensor | None = None):
    """Harmonised pictures where sample b is convincing at noise levels up to accept[b] only."""
    prior, classifier = gaussian_prior(), Sides()
    path = prior.path(20, 0.9, 16, 16)
    runtime = TorchRuntime(prior, path, gradient_source(RECIPE, classifier, classifier))
    z0 = prior.encode(x0)
    asked: list[tuple[Tensor, Tensor]] = []

    def convinces(x: Tensor, rows: Tensor) -> Tensor:
        level = float(path.sigma(first_below(path, STRENGTHS[len(asked)])))
        asked.append((x, rows))
        return torch.tensor([level <= accept[row] for row in rows.tolist()])

    free = torch.ones_like(soft) if m_excl is None else m_excl
    eps = draw_noise(list(range(len(x0))), 1, z0)[:, 0]
    with torch.no_grad():
        return harmonise(runtime, x0, z0, x_cf, soft, free, eps, STRENGTHS, 0.0, 1.0, 0.5, 0.0, convinces), path, asked


def test_each_sample_is_kept_at_its_largest_convincing_strength() -> None:
    x0 = images(3)
    soft = torch.zeros(3, 1, 16, 16)
    soft[..., 4:9, 4:9] = 1
    x_cf = torch.where(soft > 0, 1.0, x0)
    done, path, asked = walked(x0, x_cf, soft, accept=[1.0, 0.35, 0.0])
    starts = [first_below(path, strength) for strength in STRENGTHS]
    levels = [float(path.sigma(start)) for start in starts]
    assert done.strength.tolist() == torch.tensor([levels[0], levels[1], 0.0]).tolist()
    assert [rows.tolist() for _, rows in asked] == [[0, 1, 2], [1, 2], [2]]
    assert done.walks.tolist() == [1, 2, 3]
    lengths = [path.length - start for start in starts]
    assert done.network_calls.tolist() == [lengths[0], sum(lengths[:2]), sum(lengths)]
    assert torch.equal(done.x_cf[2], x_cf[2]) and torch.equal(done.soft[2], soft[2])


def test_an_edit_beside_the_prior_comes_closer_to_it_and_the_rest_stays_to_the_bit() -> None:
    x0 = images(2)
    soft = torch.zeros(2, 1, 16, 16)
    soft[..., 4:9, 4:9] = 1
    x_cf = torch.where(soft > 0, 1.0, x0)  # far from the prior's mean picture, 0.5
    closed = torch.ones_like(soft)
    closed[..., :5, :] = 0
    done, _, _ = walked(x0, x_cf, soft, accept=[1.0, 1.0], m_excl=closed)
    inside = (soft * closed).expand(-1, 3, -1, -1) > 0
    assert done.x_cf[inside].mean() < x_cf[inside].mean() - 0.05
    outside = ~(done.soft > 0).expand(-1, 3, -1, -1)
    assert torch.equal(done.x_cf[outside], x0[outside])
    assert not done.soft[closed == 0].any()
    assert bool((done.soft > 0)[(closed > 0) & grown(soft > 0, 2)].all())


def test_the_loop_counts_the_walk_and_stays_flipped() -> None:
    x0 = images(2)
    recipe = RECIPE.changed(harmonise=(0.3, 0.1), margin=0.2)
    plain, smooth = (
        counterfactuals(gaussian_prior(), Sides(), Sides(), x0, [1, 1], one, seeds=[1, 2])
        for one in (recipe.changed(harmonise=()), recipe)
    )
    for before, after in zip(plain, smooth, strict=True):
        assert after.flipped == (True,)
        walks = after.cost.decoder_forwards - before.cost.decoder_forwards
        assert walks >= 1 and after.cost.network_calls > before.cost.network_calls
        assert after.cost.decoder_backwards == before.cost.decoder_backwards
        assert after.cost.classifier_queries == before.cost.classifier_queries + walks + 1
