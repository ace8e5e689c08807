"""Metrics against closed forms and hand counts."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from audit import metrics
from audit.metrics import (
    cd,
    changed,
    cout,
    diversity,
    edited,
    edited_area,
    flip_rate,
    flipped,
    frechet_distance,
    frechet_distance_of_gaussians,
    fs,
    fva,
    gain,
    group_accuracies,
    hoyer_sparsity,
    mean_of,
    mean_of_few,
    mnac,
    na,
    nafr,
    region_shares,
    s3,
    sparsity,
    split_frechet_distance,
)
from engine.errors import InputError

RNG = np.random.default_rng(0)


def test_every_public_name_exists() -> None:
    assert all(hasattr(metrics, name) for name in metrics.__all__)


# Validity --------------------------------------------------------------------------------------------------------


def test_validity_rates_of_a_hand_count() -> None:
    f = flipped([1, 1, 1, 0, 1], [1, 1, 1, 1, 1])
    evaluator = flipped([1, 1, 0, 1, 1], 1)
    assert (flip_rate(f).value, flip_rate(f).n) == (0.8, 5)
    assert (nafr(f, evaluator).value, nafr(f, evaluator).n) == (0.6, 5)
    assert (na(f, evaluator).value, na(f, evaluator).n) == (0.75, 4)


def test_na_is_at_most_one_and_nafr_is_flip_rate_times_na() -> None:
    for _ in range(50):
        f, evaluator = RNG.random(30) < RNG.random(), RNG.random(30) < RNG.random()
        flips, both, rate = flip_rate(f), nafr(f, evaluator), na(f, evaluator)
        assert both.value <= flips.value
        if flips.value > 0:
            assert 0 <= rate.value <= 1
            assert both.value == pytest.approx(flips.value * rate.value)


def test_na_of_no_flips_does_not_exist() -> None:
    rate = na(np.zeros(4, dtype=bool), np.ones(4, dtype=bool))
    assert math.isnan(rate.value) and rate.n == 0


def test_the_papers_flip_is_any_change() -> None:
    assert changed([2, 1, 0], [0, 1, 1]).tolist() == [True, False, True]


def test_classes_are_no_flips() -> None:
    with pytest.raises(InputError, match="true or false"):
        flip_rate([1, 0, 1])
    with pytest.raises(InputError, match="one shape"):
        nafr([True], [True, False])


# Sparsity and place ----------------------------------------------------------------------------------------------


def test_gaussian_noise_scores_0714_in_the_papers_sparsity() -> None:
    delta = RNG.standard_normal((4000, 128))
    assert sparsity(delta).mean() == pytest.approx(0.714, abs=0.004)
    # ‖Δ‖₁/‖Δ‖₂ of a Gaussian is √(2D/π), so Hoyer's number is near (1 − √(2/π))·√D/(√D − 1).
    expected = (1 - math.sqrt(2 / math.pi)) * math.sqrt(128) / (math.sqrt(128) - 1)
    assert hoyer_sparsity(delta).mean() == pytest.approx(expected, abs=0.01)


def test_sparsity_at_its_ends() -> None:
    delta = np.array([[1.0, -1, 1, 1], [0, 0, -5, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(sparsity(delta), [0, 0.75, np.nan])
    np.testing.assert_allclose(hoyer_sparsity(delta), [0, 1, np.nan])


def test_edited_area_counts_pixels_that_survive_rounding() -> None:
    x = torch.zeros(2, 3, 4, 4)
    x_cf = x.clone()
    x_cf[0, 1, 0, :] = 0.5
    x_cf[1] = 0.4 / 255
    assert edited(x, x_cf).sum() == 4
    assert edited_area(edited(x, x_cf)).tolist() == [0.25, 0.0]


def test_region_shares_are_a_partition() -> None:
    edit = np.zeros((2, 4, 4), dtype=bool)
    edit[0, 0, :] = True
    label, confounder = np.zeros((2, 1, 4, 4), dtype=bool), np.zeros((2, 4, 4), dtype=bool)
    label[:, 0, :, :2] = True
    confounder[:, :, 1:3] = True
    shares = region_shares(edit, label, confounder)
    for part in (shares.label, shares.confounder, shares.both, shares.elsewhere):
        np.testing.assert_allclose(part, [0.25, np.nan])
    weights = RNG.random((3, 5, 5))
    shares = region_shares(weights, RNG.random((3, 5, 5)) > 0.5, RNG.random((3, 5, 5)) > 0.5)
    np.testing.assert_allclose(shares.label + shares.confounder + shares.both + shares.elsewhere, 1)


# Diversity -------------------------------------------------------------------------------------------------------


def test_random_vectors_score_093_in_diversity() -> None:
    result = diversity(RNG.standard_normal((4000, 2, 128)), np.ones((4000, 2), dtype=bool))
    # E|cos| = √(2/(πD)) to leading order.
    assert result.absolute.value == pytest.approx(1 - math.sqrt(2 / (math.pi * 128)), abs=0.004)
    assert result.absolute.value == pytest.approx(0.93, abs=0.005)
    assert result.signed.value == pytest.approx(1, abs=0.01)
    assert result.pairs == result.absolute.n == 4000


def test_diversity_counts_pairs_of_valid_counterfactuals_only() -> None:
    delta = np.array([[[1.0, 0], [0, 1], [-1, 0]], [[1, 0], [0, 1], [1, 0]], [[1, 0], [0, 0], [0, 1]]])
    valid = np.array([[True, True, True], [True, False, True], [True, True, False]])
    result = diversity(delta, valid)
    assert result.pairs == 4 and result.absolute.n == 2
    assert result.absolute.value == pytest.approx((2 / 3 + 0) / 2)
    assert result.signed.value == pytest.approx((4 / 3 + 0) / 2)


def test_diversity_without_a_valid_pair_does_not_exist() -> None:
    result = diversity(np.ones((2, 2, 3)), np.array([[True, False], [False, False]]))
    assert math.isnan(result.absolute.value) and result.absolute.n == 0


# Gain ------------------------------------------------------------------------------------------------------------


def test_group_accuracies_of_a_hand_count() -> None:
    label = [0, 0, 0, 0, 1, 1, 1, 1]
    confounder = [0, 0, 0, 1, 0, 1, 1, 1]
    prediction = [0, 0, 0, 1, 0, 1, 1, 0]
    result = group_accuracies(prediction, label, confounder)
    assert {g: r.value for g, r in result.groups.items()} == {(0, 0): 1, (0, 1): 0, (1, 0): 0, (1, 1): 2 / 3}
    assert result.aga.value == pytest.approx(5 / 12)
    assert 0 <= result.aga.lower < 5 / 12 < result.aga.upper <= 1
    assert result.worst.value == 0 and result.worst_group in {(0, 1), (1, 0)}
    assert result.missing == ()


def test_groups_without_images_are_named() -> None:
    assert group_accuracies([0, 1], [0, 1], [0, 1]).missing == ((0, 1), (1, 0))


def test_gain_is_the_share_of_the_error_that_is_gone() -> None:
    assert gain(0.6, 0.8) == pytest.approx(0.5)
    assert gain(0.5, 0.4) == pytest.approx(-0.2)
    assert math.isnan(gain(1.0, 1.0))
    with pytest.raises(InputError):
        gain(60, 80)


def test_mean_of_leaves_nan_out() -> None:
    mean = mean_of([1.0, 2.0, 3.0, math.nan])
    assert (mean.value, mean.n) == (2.0, 3)
    assert mean.upper - mean.value == pytest.approx(1.95996 / math.sqrt(3), rel=1e-4)


def test_the_interval_of_few_values_is_students() -> None:
    mean = mean_of_few([1.0, 2.0, 3.0, math.nan])
    assert (mean.value, mean.n) == (2.0, 3)
    assert mean.value - mean.lower == mean.upper - mean.value == pytest.approx(4.30265 / math.sqrt(3), rel=1e-4)
    assert (mean_of_few([0.5]).lower, mean_of_few([]).n) == (-math.inf, 0)


# Realism ---------------------------------------------------------------------------------------------------------


def test_frechet_distance_of_known_gaussians() -> None:
    assert frechet_distance_of_gaussians([0], [[4.0]], [3], [[1.0]]) == pytest.approx(9 + 1)
    a, b = np.diag([1.0, 4, 9]), np.diag([4.0, 1, 0])
    expected = 5 + (1 - 2) ** 2 + (2 - 1) ** 2 + 3**2
    assert frechet_distance_of_gaussians([0, 0, 0], a, [1, 2, 0], b) == pytest.approx(expected)
    turn, _ = np.linalg.qr(RNG.standard_normal((3, 3)))
    turned = frechet_distance_of_gaussians([0, 0, 0], turn @ a @ turn.T, turn @ [1, 2, 0], turn @ b @ turn.T)
    assert turned == pytest.approx(expected)


def test_frechet_distance_of_covariances_that_do_not_commute() -> None:
    a, b = np.array([[2.0, 1], [1, 2]]), np.array([[3.0, 0], [0, 1]])
    # For 2×2: tr √(AB) = √(tr AB + 2·√det AB).
    trace = math.sqrt(np.trace(a @ b) + 2 * math.sqrt(np.linalg.det(a @ b)))
    assert frechet_distance_of_gaussians([0, 0], a, [0, 0], b) == pytest.approx(8 - 2 * trace)


def test_frechet_distance_is_stable_for_singular_covariances() -> None:
    features = RNG.standard_normal((10, 64))
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(features, features + 0.5) == pytest.approx(64 * 0.25)
    assert frechet_distance(np.zeros((5, 3)), np.ones((5, 3))) == pytest.approx(3)


def test_frechet_distance_refuses_what_has_no_covariance() -> None:
    with pytest.raises(InputError, match="at least two"):
        frechet_distance(np.zeros((1, 3)), np.zeros((5, 3)))
    with pytest.raises(InputError, match="NaN"):
        frechet_distance(np.full((4, 3), np.nan), np.zeros((5, 3)))


def test_split_distance_does_not_reward_copies() -> None:
    features = RNG.standard_normal((40, 8))
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-9)
    assert split_frechet_distance(features, features).value > 0.1
    assert split_frechet_distance(features, features) == split_frechet_distance(features, features)


# Metrics of other papers -----------------------------------------------------------------------------------------


def test_mnac_counts_attributes() -> None:
    before = np.array([[0.9, 0.1, 0.2], [0.9, 0.9, 0.9]])
    after = np.array([[0.1, 0.2, 0.9], [0.8, 0.7, 0.4]])
    assert mnac(before, after).value == 1.5


def test_cd_is_zero_where_changes_follow_the_data() -> None:
    data = np.array([[0, 0], [1, 1], [0, 0], [1, 1]])
    before, together, alone = np.array([[0, 0], [1, 1]]), np.array([[1, 1], [0, 0]]), np.array([[1, 0], [0, 1]])
    assert cd(before, together, 0, data) == pytest.approx(0)
    assert cd(before, alone, 0, data) == pytest.approx(1)


def test_cout_of_a_mean_classifier_is_known() -> None:
    def query(images: Tensor) -> Tensor:
        p = images.mean(dim=(1, 2, 3))
        return torch.stack([1 - p, p], dim=1)

    x, x_cf = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)
    x_cf[0] = 1.0
    source, target = torch.tensor([0, 0]), torch.tensor([1, 1])
    # Image 0 moves in a straight line from −1 to 1; image 1 stays at −1.
    np.testing.assert_allclose(cout(query, x, x_cf, source, target, steps=8), [0, -1], atol=1e-6)
    x_cf[0] = 0.0
    x_cf[0, :, 0, :] = 1.0
    # A quarter of the pixels is inserted first, then nothing moves: −1 → −0.5, then flat.
    np.testing.assert_allclose(cout(query, x, x_cf, source, target, steps=8)[0], 0.25 * -0.75 + 0.75 * -0.5, atol=1e-6)


def test_identity_metrics_are_cosines() -> None:
    a, b = np.array([[1.0, 0], [1, 0], [1, 1]]), np.array([[2.0, 0], [0, 1], [1, 0]])
    assert fva(a, b).value == pytest.approx(2 / 3)
    assert fs(a, b).value == s3(a, b).value == pytest.approx((1 + 0 + math.sqrt(0.5)) / 3)
