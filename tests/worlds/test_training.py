"""The training loop resumes to the same weights, and its checkpoints survive an interruption."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from worlds.training import fit, generator, learning_rate


def _loss(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 3, generator=generator(1, step))
    target = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    return (model(x) - target).square().mean()


def _fit(folder: Path, loss=_loss, steps: int = 250) -> nn.Module:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    return fit(
        nn.Linear(3, 1),
        loss,
        cycles=(steps,),
        peak_rate=0.05,
        checkpoint=folder / "c.safetensors",
        title="line",
        weight_decay=0,
    )


def test_it_learns_a_line(tmp_path: Path) -> None:
    model = _fit(tmp_path)
    assert torch.allclose(model.weight, torch.tensor([[1.0, -2.0, 0.5]]), atol=0.02)
    assert not model.training


def test_an_interrupted_run_ends_in_the_same_weights(tmp_path: Path) -> None:
    whole = _fit(tmp_path / "whole")

    def killed(model: nn.Module, step: int) -> Tensor:
        if step == 137:
            raise KeyboardInterrupt
        return _loss(model, step)

    with pytest.raises(KeyboardInterrupt):
        _fit(tmp_path / "killed", killed)
    resumed = _fit(tmp_path / "killed")
    assert torch.equal(whole.weight, resumed.weight)
    assert torch.equal(whole.bias, resumed.bias)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = _fit(tmp_path)

    def never(model: nn.Module, step: int) -> Tensor:
        raise AssertionError("trained again")

    assert torch.equal(first.weight, _fit(tmp_path, never).weight)


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    assert learning_rate(0, (1000,), 1.0) == pytest.approx(0.01)
    assert learning_rate(99, (1000,), 1.0) == pytest.approx(1.0)
    assert learning_rate(550, (1000,), 1.0) == pytest.approx(0.5)
    assert learning_rate(1000, (1000,), 1.0) == pytest.approx(0.0)


def test_a_second_cycle_warms_up_again_to_half_the_height() -> None:
    assert learning_rate(1000, (1000, 600), 1.0) == pytest.approx(0.005)
    assert learning_rate(1099, (1000, 600), 1.0) == pytest.approx(0.5)
    assert learning_rate(1350, (1000, 600), 1.0) == pytest.approx(0.25)
    assert learning_rate(1600, (1000, 600), 1.0) == pytest.approx(0.0)
    assert learning_rate(1699, (1000, 600, 600), 1.0) == pytest.approx(0.5)
