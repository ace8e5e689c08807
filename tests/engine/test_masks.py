"""Masks: what is kept, what is closed, and pixels that stay as they were to the bit."""

import pytest
import torch

from engine.masks import (
    composite,
    exclusion,
    faded,
    frozen,
    gaussian_blur,
    phase_one,
    psi,
    rounded,
    soft_edit,
    to_latent,
    to_pixels,
)


def patch(size: int = 16, top: int = 4, side: int = 4) -> torch.Tensor:
    mask = torch.zeros(1, 1, size, size)
    mask[..., top : top + side, top : top + side] = 1
    return mask


def test_blur_keeps_constants_and_ends_at_three_sigma() -> None:
    torch.testing.assert_close(gaussian_blur(torch.full((1, 1, 5, 7), 0.3), 2.0), torch.full((1, 1, 5, 7), 0.3))
    point = torch.zeros(1, 1, 21, 21)
    point[..., 10, 10] = 1
    blurred = gaussian_blur(point, 1.0)
    assert blurred.sum() == pytest.approx(1.0) and (blurred > 0).sum() == 49
    assert torch.equal(gaussian_blur(point, 0.0), point)


def test_psi_is_relative_to_the_largest_unblurred_change() -> None:
    x0 = torch.full((2, 3, 16, 16), 0.5)
    x = x0 + 0.2 * patch()
    faint = x0 + 0.02 * patch()
    assert psi(x0, x, 0.0).max() == 1.0
    torch.testing.assert_close(psi(x0, x, 1.0), psi(x0, faint, 1.0), atol=1e-5, rtol=1e-4)
    assert psi(x0, x, 1.0).max() < 1.0
    assert torch.equal(psi(x0, x0, 1.0), torch.zeros(2, 1, 16, 16))


def test_psi_of_a_sample_does_not_depend_on_its_mates() -> None:
    x0, x = torch.rand(5, 3, 16, 16), torch.rand(5, 3, 16, 16)
    together = psi(x0, x, 1.5)
    for b in range(5):
        torch.testing.assert_close(psi(x0[b : b + 1], x[b : b + 1], 1.5)[0], together[b])


def test_a_latent_cell_is_kept_only_if_all_its_pixels_are() -> None:
    kept = torch.ones(1, 1, 8, 8)
    kept[..., 0, 1] = 0
    assert to_latent(kept, (2, 2), "all").flatten().tolist() == [0, 1, 1, 1]
    assert to_latent(kept, (2, 2), "nearest").flatten().tolist() == [1, 1, 1, 1]
    assert torch.equal(to_latent(to_pixels(kept, (32, 32)), (8, 8)), kept)


def test_phase_two_closes_old_edits_and_leaves_phase_one_active() -> None:
    cumulative = 0.5 * patch()
    touched = torch.zeros(1, 1, 16, 16)
    touched[..., 0, 0] = 1
    m_excl = exclusion(cumulative, touched, tau=0.2)
    assert torch.equal(m_excl, (1 - patch()) * (1 - touched))
    assert torch.equal(exclusion(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), tau=0.0), torch.ones(1, 1, 4, 4))
    m = phase_one(torch.full((1, 1, 16, 16), 0.1), 0.2)
    assert torch.equal(frozen(m, m_excl), torch.ones_like(m))
    assert torch.equal(frozen(torch.zeros_like(m), m_excl), 1 - m_excl)


def test_the_composite_keeps_every_unedited_pixel() -> None:
    x0, x = torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16) * 1.4 - 0.2
    residual, open_everywhere = patch(), torch.ones(1, 1, 16, 16)
    soft = soft_edit(residual, torch.zeros_like(residual), open_everywhere, tau=0.5, feather=1.0)
    assert torch.equal(soft[residual > 0], torch.ones(16))
    assert 16 < (soft > 0).sum() <= 100
    x_cf = composite(x0, x, soft)
    outside = (soft == 0).expand_as(x0)
    assert torch.equal(x_cf[outside], x0[outside])
    inside = (residual > 0).expand_as(x0)
    torch.testing.assert_close(x_cf[inside], x[inside].clamp(0, 1))
    assert x_cf.min() >= 0 and x_cf.max() <= 1


def test_the_rim_does_not_enter_closed_or_kept_pixels() -> None:
    residual, nothing = patch(), torch.zeros(1, 1, 16, 16)
    m_excl = torch.ones(1, 1, 16, 16)
    m_excl[..., :, :5] = 0
    soft = soft_edit(residual, nothing, m_excl, tau=0.5, feather=2.0)
    assert soft[..., :, :5].max() == 0 and soft.max() == 1
    assert soft_edit(residual, torch.ones_like(nothing), torch.ones_like(nothing), 0.5, 2.0).max() == 0


def test_a_rounded_edit_keeps_straight_borders_and_loses_islands_and_holes() -> None:
    edit = torch.zeros(1, 1, 24, 24, dtype=torch.bool)
    edit[..., :12] = True
    assert torch.equal(rounded(edit, 2.0, 0.49), edit)
    spoilt = edit.clone()
    spoilt[..., 5, 4] = False
    spoilt[..., 12, 20] = True
    assert torch.equal(rounded(spoilt, 2.0, 0.49), edit)
    wider = rounded(edit, 2.0, 0.2)
    assert bool(wider[edit].all()) and wider.sum() > edit.sum()


def test_a_faded_composite_stays_inside_its_region() -> None:
    region = torch.zeros(1, 1, 24, 24)
    region[..., :12] = 1
    weights = faded(region, 1.5)
    assert not weights[region == 0].any()
    row = weights[0, 0, 12]
    assert row[0] == 1 and torch.equal(row.sort(descending=True).values, row)
    assert 0 < row[11] < 0.4 and row[:7].min() == 1
    assert torch.equal(faded(region, 0.0), region)
