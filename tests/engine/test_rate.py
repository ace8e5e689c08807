"""Rates: Wilson intervals against known values."""

import numpy as np
import pytest

from engine.errors import InputError
from engine.rate import Rate


@pytest.mark.parametrize(
    ("successes", "n", "lower", "upper"),
    [(5, 10, 0.23659, 0.76341), (0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (97, 100, 0.91548, 0.98974)],
)
def test_wilson_interval_has_its_known_values(successes: int, n: int, lower: float, upper: float) -> None:
    rate = Rate.of(successes, n)
    assert (rate.value, rate.n) == (successes / n, n)
    assert (rate.lower, rate.upper) == (pytest.approx(lower, abs=1e-4), pytest.approx(upper, abs=1e-4))


def test_a_rate_of_nothing_says_nothing() -> None:
    rate = Rate.of(0, 0)
    assert np.isnan(rate.value) and (rate.lower, rate.upper) == (0.0, 1.0)
    with pytest.raises(InputError):
        Rate.of(3, 2)
