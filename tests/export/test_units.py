"""The surrogate in another scale computes what it did, in float64 to the last digits, gradient included."""

import pytest
import torch
from torch import Tensor, nn

from engine.surrogate_net import NetworkConfig, SurrogateNetwork, smooth_activation
from export.trace import trace
from export.units import ScaledUnit, scale_units
from tests.export.test_rules import gradient_of, settled


def network(input_size: int = 32) -> SurrogateNetwork:
    torch.manual_seed(5)
    made = SurrogateNetwork(3, NetworkConfig(input_size=input_size, widths=(4, 6, 8), blocks=2))
    return settled(made).eval().requires_grad_(False)  # type: ignore[return-value]


def test_the_unit_and_its_slope_are_those_of_the_surrogate() -> None:
    x = torch.linspace(-60, 60, 4001, dtype=torch.float64, requires_grad=True)
    expected = smooth_activation(x)
    found = ScaledUnit()(10 * x) / 20
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)  # torch's softplus ends at 20
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("half", [False, True])
def test_the_step_of_the_slope_is_exact_near_zero(half: bool) -> None:
    dtype = torch.float16 if half else torch.float32
    u = torch.tensor([-1e-6, 0.0, 1e-6], dtype=dtype).view(1, 3, 1, 1).requires_grad_(True)
    (slope,) = torch.autograd.grad(ScaledUnit()(u).sum(), u)
    torch.testing.assert_close(slope.flatten(), torch.tensor([0.6, 0.6, 1.5], dtype=dtype))


@pytest.mark.parametrize("size", [32, 64])
def test_the_scaled_network_is_the_network(size: int) -> None:
    """At its own size and at one that it resizes from."""
    plain, x = network().double(), torch.rand(2, 3, size, size, dtype=torch.float64)
    results = [gradient_of(net)(x) for net in (scale_units(plain), plain)]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_the_exported_unit_has_no_multiplication_before_its_gradient() -> None:
    graph = trace(ScaledUnit(), [torch.randn(2, 4, 4, 4)], [True], gradient=False)
    assert "mul" not in graph.code


def test_other_networks_and_the_network_itself_stay_as_they_are() -> None:
    plain = network()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    x = torch.rand(1, 3, 32, 32)
    logits: Tensor = plain(x)
    assert scale_units(plain) is not plain
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    assert torch.equal(plain(x), logits)
    other = nn.Conv2d(3, 3, 1)
    assert scale_units(other) is other
    assert scale_units(plain.train()) is plain
