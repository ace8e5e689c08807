"""Walks of Gaussian data with the exact network: the end is known in closed form."""

from typing import cast

import pytest
import torch
from torch import Tensor

from engine.path import Diffusion, Path, RectifiedFlow
from engine.prior import Prior
from engine.sampling import walk, wander

SPREAD = 0.4
FLOW = {"num_train_timesteps": 1000, "shift": 1.0}
DDIM = {
    "_class_name": "DDIMScheduler",
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "clip_sample": False,
    "timestep_spacing": "trailing",
}


class GaussianPrior:
    """The exact network of data N(0, SPREAD²): E[eps - z0 | z] for a flow, E[eps | z] for a diffusion."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def predict(self, z: Tensor, t: Tensor) -> Tensor:
        i = int((self.path.timesteps == t).nonzero()[0, 0])
        a, b = self.path.a[i], self.path.b[i]
        variance = a**2 * SPREAD**2 + b**2
        if isinstance(self.path, RectifiedFlow):
            return z * (b - a * SPREAD**2) / variance
        return z * b / variance


def _paths(steps: int) -> list[Path]:
    return [RectifiedFlow.from_config(FLOW, steps, 1.0), Diffusion.from_config(DDIM, steps, 1.0)]


def _spread(path: Path, n: int = 20_000) -> float:
    """The standard deviation of n ends of random paths."""
    generators = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)]
    start = torch.stack([torch.randn(1, 1, n // 2, generator=g) for g in generators])
    return float(wander(cast(Prior, GaussianPrior(path)), path, start, generators).std())


@pytest.mark.parametrize("family", [0, 1])
def test_more_steps_come_nearer_to_the_exact_end(family: int) -> None:
    def error(path: Path) -> float:
        """How far the end of a walk from 1 is from the exact one, SPREAD over the standard deviation at the start."""
        start = (path.a[0] ** 2 * SPREAD**2 + path.b[0] ** 2).sqrt()
        return abs(float(walk(cast(Prior, GaussianPrior(path)), path, torch.ones(1, 1, 1, 1)) - SPREAD / start))

    assert error(_paths(80)[family]) < error(_paths(20)[family]) / 3.5


@pytest.mark.parametrize("family", [0, 1])
def test_random_paths_end_with_the_spread_of_the_data(family: int) -> None:
    # The standard deviation of 20 000 draws is itself off by 0.5 %, so fewer steps than these show their own error.
    assert _spread(_paths(160)[family]) == pytest.approx(SPREAD, rel=0.012)


@pytest.mark.parametrize("family", [0, 1])
def test_forty_steps_are_enough(family: int) -> None:
    """A flow's last steps are long in log(a/b); a trend that is drawn out over them would add 10 % to the spread."""
    assert _spread(_paths(40)[family]) == pytest.approx(SPREAD, rel=0.04)


def test_random_paths_need_no_steps_for_data_of_one_point() -> None:
    """The estimate is constant, so every step is exact and the end is the point."""

    class Point:
        def predict(self, z: Tensor, t: Tensor) -> Tensor:
            i = int((path.timesteps == t).nonzero()[0, 0])
            return (z - path.a[i] * 0.7) / path.b[i]

    path = _paths(5)[1]
    end = wander(cast(Prior, Point()), path, torch.randn(2, 1, 3, 3), [torch.Generator() for _ in range(2)])
    torch.testing.assert_close(end, torch.full((2, 1, 3, 3), 0.7), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", [0, 1])
def test_halfway_down_the_spread_is_that_of_the_level(family: int) -> None:
    path = _paths(40)[family]
    half = path.length // 2
    path.a, path.b, path.timesteps = path.a[: half + 1], path.b[: half + 1], path.timesteps[:half]
    expected = float((path.a[-1] ** 2 * SPREAD**2 + path.b[-1] ** 2).sqrt())
    assert _spread(path) == pytest.approx(expected, rel=0.02)
