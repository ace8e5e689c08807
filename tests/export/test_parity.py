"""The inputs of the proof: latents on which torch's own gradient exists in float32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.prior import Prior, load_prior
from export.graphs import Contract
from export.parity import LARGEST_SEARCH, fresh_inputs, gradient_jumps
from tests.engine.test_prior import save_sd3


def guidance_of(gradient: Callable[[Tensor], Tensor]) -> Contract:
    """A guidance graph that has this gradient."""
    return Contract("guidance", lambda z, y, scale: (gradient(z), z, z), (), (), classes=3, timesteps=1)


def shaken(z: Tensor) -> Tensor:
    """A gradient that another rounding of the latent changes altogether."""
    return torch.sin(1e9 * z.double()).float()


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Prior:
    torch.manual_seed(0)
    return load_prior(save_sd3(Path(tmp_path_factory.mktemp("sd3"))))


def test_a_kink_within_rounding_of_the_latent_is_seen() -> None:
    """The gradient of |z| turns over at 0, and nowhere else; that of z² moves with z."""
    z = torch.full((3, 1, 2, 2), 0.5)
    z[1, 0, 0, 0] = 1e-8
    jumps = gradient_jumps(guidance_of(torch.sign), z, torch.zeros(3, dtype=torch.int64))
    assert jumps[0] == jumps[2] == 0
    assert jumps[1].item() == pytest.approx(1.0)  # one of four coordinates goes from 1 to -1: 2 / |(1, 1, 1, 1)|
    assert gradient_jumps(guidance_of(lambda z: 2 * z), z, torch.zeros(3)).max() < 1e-5


def test_latents_at_a_kink_are_passed_over_and_counted(prior: Prior) -> None:
    def gradient(z: Tensor) -> Tensor:
        return torch.where(z.mean((1, 2, 3), keepdim=True) > 0, shaken(z), torch.ones_like(z))

    fresh = fresh_inputs(prior, 5, 32, 32, guidance_of(gradient))
    assert fresh.passed_over > 0
    assert (fresh.inputs["z_hat"].mean((1, 2, 3)) < 0).all()
    assert {name: len(x) for name, x in fresh.inputs.items()} == {"z_hat": 5, "image": 5, "y": 5}
    assert set(fresh.inputs["y"].tolist()) <= {0, 1, 2}


def test_where_no_latent_is_smooth_the_search_ends(prior: Prior) -> None:
    fresh = fresh_inputs(prior, 2, 32, 32, guidance_of(shaken))
    assert len(fresh.inputs["z_hat"]) == 2 and fresh.passed_over == 2 * (LARGEST_SEARCH - 1)
    assert fresh_inputs(prior, 2, 32, 32).passed_over == 0
