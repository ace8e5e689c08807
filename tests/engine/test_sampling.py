"""Walks of Gaussian data with the exact network: the end is known in closed form."""

from typing import cast

import pytest
import torch
from torch import Tensor

from engine.path import Diffusion, Path, RectifiedFlow
from engine.prior import Prior
from engine.sampling import walk

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


def _error(path: Path, order: int) -> float:
    """How far the end of a walk from 1 is from the exact one, SPREAD over the standard deviation at the start."""
    start = (path.a[0] ** 2 * SPREAD**2 + path.b[0] ** 2).sqrt()
    end = walk(cast(Prior, GaussianPrior(path)), path, torch.ones(1, 1, 1, 1), order)
    return abs(float(end - SPREAD / start))


@pytest.mark.parametrize("steps", [20, 40])
def test_the_second_order_is_far_nearer_to_the_exact_flow(steps: int) -> None:
    path = RectifiedFlow.from_config(FLOW, steps, 1.0)
    assert _error(path, 2) < 0.5 * _error(path, 1)


@pytest.mark.parametrize("steps", [20, 40])
def test_the_second_order_is_far_nearer_to_the_exact_diffusion(steps: int) -> None:
    path = Diffusion.from_config(DDIM, steps, 1.0)
    assert _error(path, 2) < 0.5 * _error(path, 1)


@pytest.mark.parametrize("order", [1, 2])
def test_more_steps_come_nearer(order: int) -> None:
    few, many = (_error(RectifiedFlow.from_config(FLOW, steps, 1.0), order) for steps in (20, 80))
    assert many < few / 3.5


def test_a_path_without_a_clock_is_walked_as_the_scheduler_does() -> None:
    path = Diffusion.from_config({**DDIM, "prediction_type": "v_prediction"}, 10, 1.0)
    prior = cast(Prior, GaussianPrior(path))
    z = torch.ones(1, 1, 1, 1)
    assert path.clock is None
    assert torch.equal(walk(prior, path, z, 2), walk(prior, path, z, 1))
