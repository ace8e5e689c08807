"""Confidence sequences: closed forms, coverage at all times together, and the fixed-size test beside them."""

import math

import numpy as np
import pytest
from scipy.special import betainc

from audit import confidence
from audit.confidence import LOG_WEIGHTS, STAKES, ConfidenceSequence, fixed_size, log_capital
from engine.errors import InputError

LENGTH = 200
RUNS = 4000


def capital_table(m: float) -> np.ndarray:
    """[LENGTH + 1, LENGTH + 1] log capital against "mean ≤ m" after n binary observations with s ones; NaN if s > n."""
    n, s = np.mgrid[: LENGTH + 1, : LENGTH + 1]
    table = np.full(n.shape, np.nan)
    table[s <= n] = log_capital([0.0, 1.0], np.stack([n - s, s], axis=-1)[s <= n], m)
    return table


def running_ones(p: float, seed: int) -> np.ndarray:
    """[RUNS, LENGTH] number of ones so far in runs of independent draws."""
    return np.cumsum(np.random.default_rng(seed).random((RUNS, LENGTH)) < p, axis=1)


def slack(alpha: float) -> float:
    """Largest error rate that RUNS simulations of an error alpha show but once in a thousand times."""
    return alpha + 3.1 * math.sqrt(alpha * (1 - alpha) / RUNS)


def test_every_public_name_exists() -> None:
    assert all(hasattr(confidence, name) for name in confidence.__all__)


# Capital ---------------------------------------------------------------------------------------------------------


def test_stakes_are_a_distribution_with_density_2u() -> None:
    weights = np.exp(LOG_WEIGHTS)
    assert weights.sum() == pytest.approx(1) and 0 < STAKES.min() < STAKES.max() < 1
    assert [weights @ STAKES**k for k in (1, 2, 5)] == pytest.approx([2 / 3, 2 / 4, 2 / 7])


@pytest.mark.parametrize("m", [0.2, 0.7])
def test_capital_of_zeros_is_the_integral_in_closed_form(m: float) -> None:
    """∫ 2u (1−u)^n du = 2 / ((n+1)(n+2)): zeros against "at most m" lose the same whatever m is."""
    assert math.exp(log_capital([0.0], [7], m)) == pytest.approx(2 / (8 * 9))
    # One observation of m itself is worth nothing either way, one of 1 pays ∫ 2u (1 − u + u/m) du.
    assert math.exp(log_capital([m], [1], m)) == pytest.approx(1)
    assert math.exp(log_capital([1.0], [1], m)) == pytest.approx(1 / 3 + 2 / (3 * m))


def test_capital_is_a_martingale_at_the_mean_and_loses_above_it() -> None:
    """E[capital after one more] = capital where the mean is m, exactly, for a distribution on three values."""
    values, p = np.array([0.0, 0.5, 1.0]), np.array([0.5, 0.3, 0.2])
    seen = np.array([4, 2, 3])
    after = np.exp(log_capital(values, seen + np.eye(3), float(p @ values)))
    assert p @ after == pytest.approx(np.exp(log_capital(values, seen, float(p @ values))))
    above = np.exp(log_capital(values, seen + np.eye(3), 0.5))
    assert p @ above < np.exp(log_capital(values, seen, 0.5))


def test_capital_falls_as_the_claim_grows() -> None:
    values, counts = np.array([0.0, 0.25, 1.0]), np.array([5, 3, 9])
    capital = [float(log_capital(values, counts, m)) for m in np.linspace(0.01, 1, 200)]
    assert (np.diff(capital) < 0).all()


# Bounds ----------------------------------------------------------------------------------------------------------


def test_bounds_are_where_the_capital_reaches_one_over_alpha() -> None:
    sequence = ConfidenceSequence.one_sided(0.05, 0.02)
    rng = np.random.default_rng(3)
    values = np.array([0.0, 0.5, 1.0])
    counts = np.zeros(3)
    crossings = []
    for k in rng.choice(3, size=60, p=[0.3, 0.4, 0.3]):
        counts[k] += 1
        lower, upper = sequence.update(values[k])
        if lower > max((low for low, _ in crossings), default=0):
            assert float(log_capital(values, counts, lower)) == pytest.approx(math.log(20), abs=1e-6)
        if upper < min((up for _, up in crossings), default=1):
            assert float(log_capital(1 - values, counts, 1 - upper)) == pytest.approx(math.log(50), abs=1e-6)
        crossings.append((lower, upper))
    assert 0.1 < crossings[-1][0] < sequence.mean < crossings[-1][1] < 0.9


def test_nothing_is_known_before_the_first_observation() -> None:
    sequence = ConfidenceSequence(0.05)
    assert (sequence.n, sequence.lower, sequence.upper, sequence.history) == (0, 0.0, 1.0, [])
    assert math.isnan(sequence.mean)


def test_history_is_nested_and_ends_at_the_present() -> None:
    sequence = ConfidenceSequence(0.1)
    for x in np.random.default_rng(0).random(50):
        sequence.update(float(x))
    n, mean, lower, upper = map(np.array, zip(*sequence.history, strict=True))
    assert n.tolist() == list(range(1, 51))
    assert (np.diff(lower) >= 0).all() and (np.diff(upper) <= 0).all()
    assert (mean[-1], lower[-1], upper[-1]) == (sequence.mean, sequence.lower, sequence.upper)


def test_ones_and_zeros_mirror_each_other() -> None:
    up, down = ConfidenceSequence(0.05), ConfidenceSequence(0.05)
    for x in (1, 1, 0, 1, 0.25, 1, 1, 1, 1):
        lower, upper = up.update(x)
        assert down.update(1 - x) == pytest.approx((1 - upper, 1 - lower))


def test_a_constant_observation_is_pinned_down_fast() -> None:
    """No spread, hence bounds of order 1/n: the bets adapt to the variance, which Hoeffding's bound does not."""
    sequence = ConfidenceSequence(0.05)
    for _ in range(100):
        sequence.update(0.5)
    hoeffding = math.sqrt(math.log(2 / 0.05) / (2 * 100))
    assert sequence.upper - sequence.lower < hoeffding


@pytest.mark.parametrize(("x", "limit", "images"), [(0.0, 0.2, 18), (1.0, 0.2, 3)])
def test_clear_cases_need_few_observations(x: float, limit: float, images: int) -> None:
    """No bet at all gets below 14 zeros or 2 ones here: 0.8^14 and 0.2^2 are the first below 0.05."""
    sequence = ConfidenceSequence.one_sided(0.05, 0.05)
    while sequence.lower <= limit < sequence.upper:
        sequence.update(x)
    assert sequence.n == images


def test_a_mean_that_jumps_is_noticed() -> None:
    sequence = ConfidenceSequence(0.05)
    for x in [1.0] * 30 + [0.0] * 300:
        lower, upper = sequence.update(x)
        assert lower <= upper
    assert sequence.broken and sequence.n == 330


@pytest.mark.parametrize("x", [-0.1, 1.1, math.nan, math.inf])
def test_an_observation_outside_the_unit_interval_is_refused(x: float) -> None:
    sequence = ConfidenceSequence(0.05)
    with pytest.raises(InputError, match="between 0 and 1"):
        sequence.update(x)
    assert sequence.n == 0


def test_an_impossible_error_probability_is_refused() -> None:
    for alpha in (0.0, -1.0, math.nan, 2.0):
        with pytest.raises(InputError, match="error probability"):
            ConfidenceSequence(alpha)


# Coverage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.02, 0.2, 0.5, 0.9])
def test_bounds_miss_the_mean_at_any_time_with_probability_alpha_at_most(p: float) -> None:
    """The bounds exclude p at some n exactly where a capital against p reaches 2/alpha at some n."""
    alpha, n = 0.05, np.arange(1, LENGTH + 1)
    ones = running_ones(p, seed=1)
    lower, upper = capital_table(p), capital_table(1 - p)
    above = (lower[n, ones] >= math.log(2 / alpha)).any(axis=1)
    below = (upper[n, n - ones] >= math.log(2 / alpha)).any(axis=1)
    assert (above | below).mean() <= slack(alpha)
    assert max(above.mean(), below.mean()) <= slack(alpha / 2)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.19, 0.2, 0.21, 0.3, 0.8])
def test_a_decision_at_the_first_chance_is_wrong_with_probability_alpha_at_most(p: float) -> None:
    alpha, limit, n = 0.05, 0.2, np.arange(1, LENGTH + 1)
    ones = running_ones(p, seed=2)
    exceeds = capital_table(limit)[n, ones] >= -math.log(alpha)
    keeps = capital_table(1 - limit)[n, n - ones] >= -math.log(alpha)
    first = (exceeds | keeps).argmax(axis=1)
    said_exceeds, said_keeps = exceeds[np.arange(RUNS), first], keeps[np.arange(RUNS), first]
    wrong = said_exceeds if p <= limit else said_keeps
    assert wrong.mean() <= slack(alpha)
    if p in (0.02, 0.8):
        right = said_keeps if p <= limit else said_exceeds
        assert right.mean() > 0.97
        assert np.median(first + 1) <= 20


def test_shares_in_between_are_covered_too() -> None:
    """Means of a few binary verdicts: values 0, ⅓, ⅔, 1, with a class that runs through `update` itself."""
    rng, missed, runs = np.random.default_rng(5), 0, 60
    for _ in range(runs):
        sequence = ConfidenceSequence(0.1)
        p = rng.beta(0.6, 1.4, size=40)  # mean 0.3, images differ
        for x in rng.binomial(3, p) / 3:
            sequence.update(float(x))
        missed += not sequence.lower <= 0.3 <= sequence.upper
    assert missed <= 14  # P(more | 0.1) < 0.001


# Fixed size ------------------------------------------------------------------------------------------------------


def test_fixed_sizes_that_are_known() -> None:
    assert fixed_size(0.2, 0.0) == 14  # 0.8^14 = 0.044
    assert fixed_size(0.2, 1.0) == 2  # 0.2^2 = 0.04
    assert fixed_size(0.5, 1.0) == 5  # 1/32
    assert fixed_size(0.5, 0.8, alpha=0.05, power=0.8) == 18  # reject at 13: 0.048; power 0.867


@pytest.mark.parametrize(("limit", "alternative"), [(0.2, 0.4), (0.2, 0.05), (0.5, 0.6)])
def test_a_fixed_size_has_its_power_and_no_smaller_one_has(limit: float, alternative: float) -> None:
    size = fixed_size(limit, alternative, 0.05, 0.9)
    p, q = (limit, alternative) if alternative > limit else (1 - limit, 1 - alternative)

    def power(n: int) -> float:
        c = np.arange(1, n + 1)
        return float(betainc(c, n - c + 1, q)[betainc(c, n - c + 1, p) <= 0.05].max(initial=0))

    assert power(size) >= 0.9
    assert all(power(n) < 0.9 for n in range(1, size))


def test_the_sequential_test_takes_half_of_the_fixed_size_where_the_truth_is_far() -> None:
    """The fixed test is sized for an alternative of 0.4 or 0.1, the sequential one needs no such choice."""
    n = np.arange(1, LENGTH + 1)
    for p, alternative in ((0.6, 0.4), (0.02, 0.1)):
        ones = running_ones(p, seed=4)
        exceeds = capital_table(0.2)[n, ones] >= math.log(20)
        keeps = capital_table(0.8)[n, n - ones] >= math.log(20)
        used = (exceeds | keeps).argmax(axis=1) + 1
        assert np.median(used) <= 0.5 * fixed_size(0.2, alternative)


def test_an_impossible_fixed_size_is_refused() -> None:
    with pytest.raises(InputError, match="tells"):
        fixed_size(0.2, 0.2)
    with pytest.raises(InputError, match="power"):
        fixed_size(0.2, 0.4, power=1.0)
    with pytest.raises(InputError, match="alternative"):
        fixed_size(0.2, math.nan)
