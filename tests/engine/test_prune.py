"""Pruning gives back exactly what the flip does not need."""

import pytest
import torch
from torch import Tensor

from engine.prune import part, ranks, relevance, smallest
from engine.recipe import Recipe
from engine.trajectory import Originals
from engine.tries import _prune

SIZE = 16


def left_half(images: Tensor) -> Tensor:
    """Two logits: class 1 where the left half is bright."""
    score = 20 * (images[:, :, :, : SIZE // 2].mean((1, 2, 3)) - 0.5)
    return torch.stack([-score, score], dim=1)


def whole_edit() -> tuple[Originals, Tensor, Tensor]:
    """A dark picture that was made bright all over, though only the left half matters."""
    x0 = torch.zeros(2, 3, SIZE, SIZE)
    x_cf = torch.full_like(x0, 0.9)
    return Originals(x0, x0, torch.tensor([1, 1]), None), x_cf, torch.ones(2, 1, SIZE, SIZE)


def test_relevance_of_a_linear_guide_is_gradient_times_change() -> None:
    originals, x_cf, _ = whole_edit()
    found = relevance(left_half, originals.x0, x_cf, originals.y, blur=0)
    # logit 1 minus logit 0 is 40·(mean - 0.5); each left pixel and channel has a weight of 1 / (3·16·8).
    expected = torch.zeros(2, 1, SIZE, SIZE)
    expected[:, :, :, : SIZE // 2] = 3 * 0.9 * 40 / (3 * SIZE * SIZE // 2)
    assert torch.allclose(found, expected, atol=1e-5)


def test_only_the_half_that_matters_is_kept_and_the_rest_is_the_original_bit_for_bit() -> None:
    originals, x_cf, soft = whole_edit()
    recipe = Recipe(blur=0.0, feather=0.0, margin=0.5, prune=True)
    x, smaller, logits, asked = _prune(left_half, left_half, originals, x_cf, soft, recipe)
    assert bool((logits.argmax(1) == 1).all())
    edited = smaller > 0
    assert not edited[:, :, :, SIZE // 2 :].any()
    # 0.9·share·2 of the left half has to reach a mean of 0.5 and the margin: 0.3 of the picture is the first that does.
    assert edited.float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert torch.equal(x[:, :, :, SIZE // 2 :], originals.x0[:, :, :, SIZE // 2 :])
    assert asked <= 6


def test_an_edit_that_is_needed_whole_stays_whole() -> None:
    originals, x_cf, soft = whole_edit()

    def strict(images: Tensor) -> Tensor:
        score = 200 * (images.mean((1, 2, 3)) - 0.89)
        return torch.stack([-score, score], dim=1)

    x, smaller, _, _ = _prune(
        strict, strict, originals, x_cf, soft, Recipe(blur=0.0, feather=0.0, margin=0.5, prune=True)
    )
    assert torch.equal(smaller, soft)
    assert torch.allclose(x, x_cf)


def test_the_guide_has_its_say() -> None:
    originals, x_cf, soft = whole_edit()

    def easy(images: Tensor) -> Tensor:
        score = 100 * images.amax((1, 2, 3)) - 50
        return torch.stack([-score, score], dim=1)

    recipe = Recipe(blur=0.0, feather=0.0, margin=0.5, prune=True)
    _, smaller, _, _ = _prune(easy, left_half, originals, x_cf, soft, recipe)
    assert (smaller > 0).float().mean().item() == pytest.approx(0.3, abs=0.01)


def test_a_part_never_grows_beyond_the_edit() -> None:
    soft = torch.zeros(1, 1, SIZE, SIZE)
    soft[..., 4:12, 4:12] = 0.7
    order = ranks(torch.rand(1, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0)), soft > 0)
    half = part(soft, order, torch.tensor([0.5]), feather=1.0)
    assert bool((half <= soft).all())
    assert bool((half > 0).sum() >= 32)


def test_an_outline_takes_away_teeth_and_islands_and_leaves_a_straight_border() -> None:
    soft = torch.ones(1, 1, SIZE, SIZE)
    values = torch.zeros(1, 1, SIZE, SIZE)
    values[..., : SIZE // 2] = 2.0  # the left half, with one tooth and one island
    values[..., 3, SIZE // 2] = values[..., 12, SIZE - 3] = 3.0
    share = torch.tensor([0.5 + 2 / SIZE**2])
    ragged, smooth = (part(soft, ranks(values, soft > 0), share, 0.0, outline) for outline in (0.0, 1.5))
    assert ragged[..., SIZE // 2 :].sum() == 2
    assert torch.equal(smooth, (values == 2.0).to(soft.dtype))


def test_ranks_put_the_largest_first_and_outsiders_last() -> None:
    values = torch.tensor([[[[3.0, 9.0], [1.0, 2.0]]]])
    where = torch.tensor([[[[True, False], [True, True]]]])
    assert ranks(values, where).flatten().tolist() == [0, 3, 2, 1]


@pytest.mark.parametrize("first", [0, 1, 6, 7])
def test_bisection_finds_the_first_that_is_enough(first: int) -> None:
    asked = []

    def enough(choice: Tensor) -> Tensor:
        asked.append(choice)
        return choice >= torch.tensor([first, 3])

    found = smallest(enough, 7, 2, torch.device("cpu"))
    assert found.tolist() == [first, 3]
    assert len(asked) <= 4
