"""The repair's benchmark: what its intervals and promises are."""

import math

import pytest

from benchmarks.cfkd import CHANGED, interval, summarise


def line(seed: int, gain: float, worst: tuple[float, float], ordinary: tuple[float, float]) -> dict[str, object]:
    figures = {f"{name}_{when}": 0.5 for name in CHANGED for when in ("before", "after")}
    figures |= dict(zip(("worst_group_before", "worst_group_after"), worst, strict=True))
    figures |= dict(zip(("poisoned_before", "poisoned_after"), ordinary, strict=True))
    return {**figures, "seed": seed, "gain": gain, "verdict_before": "FAIL"}


def test_three_values_have_the_interval_of_students_t() -> None:
    """t with two degrees of freedom is 4.303 at 97.5 %; 1, 2, 3 have a standard error of 1/√3."""
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0
    assert found["high"] - 2.0 == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert found["low"] == pytest.approx(4.0 - found["high"])


def test_one_value_bounds_nothing() -> None:
    assert interval([0.7]) == {"mean": 0.7, "low": -math.inf, "high": math.inf}


def test_promises_are_kept_by_the_mean_and_the_worst_group_by_every_seed() -> None:
    kept = summarise([line(0, 0.55, (0.1, 0.9), (1.0, 0.985)), line(1, 0.75, (0.1, 0.8), (1.0, 1.0))])
    assert (kept["gain_kept"], kept["worst_group_kept"], kept["ordinary_kept"]) == (True, True, True)
    missed = summarise([line(0, 0.5, (0.5, 0.5), (1.0, 0.97)), line(1, 0.6, (0.1, 0.9), (1.0, 1.0))])
    assert (missed["gain_kept"], missed["worst_group_kept"], missed["ordinary_kept"]) == (False, False, False)
