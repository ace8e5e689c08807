"""How a calibration chooses among what it tried."""

from audit.calibration import Trial, choose


def trial(eta: float, area: float, score: float) -> Trial:
    return Trial(0.7, eta, 0.2, 1.0, 1.0, area, score)


def test_the_gentlest_of_those_that_are_about_as_good_is_chosen() -> None:
    strong, gentle, weak = trial(0.3, 0.05, 1.0), trial(0.1, 0.1, 0.995), trial(0.05, 0.1, 0.9)
    assert choose([strong, gentle, weak]) is gentle


def test_among_equally_gentle_ones_the_smaller_edit_is_chosen() -> None:
    large, small = trial(0.1, 0.2, 1.0), trial(0.1, 0.1, 0.995)
    assert choose([large, small]) is small
