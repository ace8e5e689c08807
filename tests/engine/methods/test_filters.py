"""The ancestral step keeps the marginals, whole chains are back-propagated, and RePaint keeps what it is told to."""

import pytest
import torch
from torch import Tensor

from engine.methods.ace import AceSettings
from engine.methods.filters import posterior, repaint, unchanged
from engine.path import Path
from tests.engine.methods.toys import gaussian_prior, images, one_try

SETTINGS = AceSettings(steps=10, strength=0.5)


@pytest.mark.parametrize("flow", [True, False])
def test_the_posterior_step_keeps_the_marginals(flow: bool) -> None:
    """If z_i ~ N(a_i·z0, b_i²) then z_{i+1} ~ N(a_{i+1}·z0, b_{i+1}²), whatever the family."""
    path = gaussian_prior(flow).path(10, 0.7, 16, 16)
    z0 = torch.tensor(0.8)
    for i in range(path.length):
        mean, variance = posterior(path, path.a[i] * z0, z0, i)
        slope = posterior(path, torch.tensor(1.0), z0, i)[0] - posterior(path, torch.tensor(0.0), z0, i)[0]
        torch.testing.assert_close(mean, path.a[i + 1] * z0)
        torch.testing.assert_close(slope**2 * path.b[i] ** 2 + variance, path.b[i + 1] ** 2, atol=1e-6, rtol=1e-5)


def test_the_last_posterior_step_is_the_estimate_without_noise() -> None:
    path = gaussian_prior(flow=True).path(10, 0.7, 16, 16)
    mean, variance = posterior(path, torch.tensor(3.0), torch.tensor(0.25), path.length - 1)
    assert mean == 0.25 and variance == 0


def slope_of_the_walk(path: Path, predict: object) -> Tensor:
    """How much the end of the walk moves per unit of its start: a product of the steps' linear factors."""
    z = torch.ones(1, 3, 16, 16)
    for i in range(path.length):
        z = path.step(z, predict(z, path.timesteps[i]), i)  # type: ignore[operator]
    return z[0, 0, 0, 0]


@pytest.mark.parametrize("flow", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_the_filter_is_back_propagated_through_every_step(flow: bool, recompute: bool) -> None:
    """E and D are linear and inverse, so ∇_x of w·F(x) is a_0 · (product of all steps' factors) · w."""
    prior, x0 = gaussian_prior(flow), images(3)
    w = torch.rand(x0.shape, generator=torch.Generator().manual_seed(5)) - 0.5

    def source(image: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return w[y], torch.zeros(len(image), 2)

    settings = SETTINGS.changed(micro_batch=2, checkpoint=recompute)
    one = one_try(prior, x0, settings, source)
    one.originals.y.copy_(torch.arange(3))  # so that each row finds its own w, in whatever micro-batch
    eps = one.noise()
    gradient, image, _ = one.filtered_guidance(x0, eps)
    closed_form = one.path.a[0] * slope_of_the_walk(one.path, prior.predict) * w
    torch.testing.assert_close(gradient, closed_form, atol=1e-7, rtol=1e-4)
    assert not torch.allclose(gradient, one.path.a[0] * w, rtol=0.1)  # what a chain cut off after noising would give
    torch.testing.assert_close(image, one.filtered(x0, eps).detach())
    assert one.tally.network_calls.tolist() == [one.path.length] * 3


@pytest.mark.parametrize("flow", [True, False])
def test_repaint_keeps_the_masked_region_to_the_bit_and_repaints_the_rest(flow: bool) -> None:
    x0 = images(2)
    attacked = (x0 + 0.3).clamp(0, 1)
    kept = torch.zeros(2, 1, 16, 16)
    kept[..., :9] = 1
    one = one_try(gaussian_prior(flow), x0, SETTINGS)
    painted = repaint(one, attacked, kept, one.noise())
    region = kept.expand_as(x0) > 0
    assert torch.equal(painted[region], x0[region])
    assert (painted[~region] != x0[~region]).all() and (painted[~region] != attacked[~region]).all()
    assert one.tally.network_calls.tolist() == [one.path.length] * 2


def test_repaint_of_some_samples_is_that_of_all() -> None:
    x0, kept = images(3), torch.zeros(3, 1, 16, 16)
    one = one_try(gaussian_prior(), x0, SETTINGS)
    eps, rows = one.noise(), torch.tensor([2, 0])
    whole = repaint(one, x0, kept, eps)
    assert torch.equal(repaint(one, x0[rows], kept[rows], eps, rows), whole[rows])
    assert one.tally.network_calls.tolist() == [2 * one.path.length, one.path.length, 2 * one.path.length]


def test_what_is_unchanged_is_relative_to_the_largest_change_and_dilated() -> None:
    x0 = torch.full((1, 3, 9, 9), 0.5)
    x = x0.clone()
    x[..., 4, 4] += 0.4
    x[..., 0, 0] += 0.04  # a tenth of the largest
    kept = unchanged(x0, x, 3, 0.15)[0, 0]
    assert (kept[3:6, 3:6] == 0).all() and kept.sum() == 81 - 9
    assert unchanged(x0, x, 1, 0.05)[0, 0].sum() == 81 - 2
    assert unchanged(x0, x0, 5, 0.15).all()  # nothing changed: no 0/0
