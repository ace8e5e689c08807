"""Bounds for the mean of observations in [0, 1] that hold at every sample size at once.

The method is testing by betting (Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting",
2024). Against the claim "the mean is at most m" a gambler stakes the share u of his capital on each observation x and
owns 1 − u + u·x/m times as much afterwards. If the claim holds, the capital is a supermartingale, and by Ville's
inequality it ever reaches 1/α with probability at most α, however long one looks and whenever one stops. Every m with
a capital of 1/α or more is ruled out; the largest of them is the lower bound. The upper bound is that of 1 − x.

Nobody knows the best u beforehand, so the capital is spread over many. For each u the capital falls as m grows, and so
does every mixture: what is ruled out is exactly an interval [0, lower), and "lower > limit" is the same event as "the
test against the limit rejects". The bounds that are shown and the decisions that are made cannot disagree.

Which mixture is a matter of speed only. Mean number of images to a decision about the limit 0.2 in 1000 simulated
audits each, α = 0.05 below and 0.025 above the limit, cut at 400:

| true mean               |   0 | .02 | .05 |  .1 |  .3 |  .4 |  .5 |  .8 |
|-------------------------|-----|-----|-----|-----|-----|-----|-----|-----|
| density 2u: Beta(2, 1)  |  18 |  23 |  36 |  92 | 210 |  49 |  21 | 5.1 |
| Beta(1, 1)              |  20 |  26 |  39 |  94 | 180 |  46 |  21 | 6.4 |
| Beta(1, 1/2)            |  17 |  23 |  37 |  99 | 199 |  50 |  22 | 5.7 |
| Beta(1/2, 1/2)          |  19 |  25 |  40 | 103 | 184 |  48 |  21 | 5.7 |
| two-sided Beta(1/2,1/2) |  24 |  32 |  51 | 136 | 203 |  53 |  24 | 6.6 |
| predictable plug-in, ½  |  26 |  30 |  41 |  96 | 230 |  58 |  23 | 6.3 |

Large stakes pay where the truth is far from the limit, which is where an audit should be short, so Beta(2, 1) is
taken. Stakes depend on no observation: the mixture over them learns the good one by itself.

Shapes: V distinct values, U stakes.
"""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import betainc, roots_jacobi

from engine.errors import InputError

__all__ = ["ConfidenceSequence", "Step", "fixed_size", "log_capital"]

Floats = npt.NDArray[np.float64]

LARGEST_FIXED_SIZE = 100_000
ROOT_TOLERANCE = 1e-12

# Gauss nodes of the density 2u on (0, 1). A finite mixture is as valid as the integral it stands for.
_NODES, _WEIGHTS = roots_jacobi(64, 0, 1)
STAKES: Floats = (1 + _NODES) / 2
LOG_WEIGHTS: Floats = np.log(_WEIGHTS / _WEIGHTS.sum())


def log_capital(values: npt.ArrayLike, counts: npt.ArrayLike, m: float) -> Floats:
    """Logarithm of the capital won against "the mean is at most m" when value v of [V] was seen counts[..., v] times.

    The order of the observations does not matter, so counts are all there is to know.
    """
    if not 0 < m <= 1:
        raise InputError(f"a bet needs a mean in (0, 1] to bet against, not {m}")
    gains = np.log1p(STAKES * (np.asarray(values, dtype=np.float64)[:, None] / m - 1))  # [V, U]
    return np.asarray(np.logaddexp.reduce(LOG_WEIGHTS + np.asarray(counts, dtype=np.float64) @ gains, axis=-1))


class Step(NamedTuple):
    """What is known after n observations."""

    n: int
    mean: float
    lower: float
    upper: float


class ConfidenceSequence:
    """Bounds of a mean that are right at all sample sizes together with probability 1 − alpha.

    Observations are independent draws of one distribution on [0, 1], binary or not; or, more generally, the mean of
    each given all before it is the same number. The bounds are statements about that distribution, from which a data
    set drawn in random order is a sample; they claim nothing tighter about a finite set of which a part has been seen.

    Bounds never widen: what was ruled out once stays so (the running intersection).
    """

    def __init__(self, alpha: float) -> None:
        self._start(alpha / 2, alpha / 2)

    @classmethod
    def one_sided(cls, alpha_lower: float, alpha_upper: float) -> "ConfidenceSequence":
        """Two bounds with an error of their own each; both are right with probability 1 − alpha_lower − alpha_upper."""
        sequence = cls.__new__(cls)
        sequence._start(alpha_lower, alpha_upper)
        return sequence

    def _start(self, alpha_lower: float, alpha_upper: float) -> None:
        for alpha in (alpha_lower, alpha_upper):
            if not 0 < alpha < 1:
                raise InputError(f"an error probability lies between 0 and 1, not at {alpha}")
        self._alpha_lower = alpha_lower
        self._alpha_upper = alpha_upper
        self._counts: Counter[float] = Counter()
        self._lower = 0.0
        self._below_one = 0.0
        """Lower bound of the mean of 1 − x."""
        self._broken = False
        self._history: list[Step] = []

    def update(self, x: float) -> tuple[float, float]:
        """The bounds (lower, upper) after one more observation."""
        if not 0 <= x <= 1:
            raise InputError(f"an observation lies between 0 and 1, not at {x}")
        self._counts[float(x)] += 1
        values = np.array(sorted(self._counts))
        counts = np.array([self._counts[v] for v in values.tolist()])
        lower = _ruled_out(values, counts, self._alpha_lower, self._lower)
        below_one = _ruled_out(1 - values, counts, self._alpha_upper, self._below_one)
        if self._broken or lower > 1 - below_one:
            self._broken = True
        else:
            self._lower, self._below_one = lower, below_one
        n = self.n
        self._history.append(Step(n, float(values @ counts) / n, self.lower, self.upper))
        return self.lower, self.upper

    @property
    def n(self) -> int:
        """Number of observations."""
        return self._counts.total()

    @property
    def mean(self) -> float:
        """Mean of the observations; NaN where there is none."""
        return self._history[-1].mean if self._history else math.nan

    @property
    def lower(self) -> float:
        """The mean is at least this."""
        return self._lower

    @property
    def upper(self) -> float:
        """The mean is at most this."""
        return 1 - self._below_one

    @property
    def broken(self) -> bool:
        """Whether no mean is left that fits all observations; the bounds then stay where they last made sense.

        A constant mean does this with probability alpha at most; a mean that drifts does it sooner or later.
        """
        return self._broken

    @property
    def history(self) -> list[Step]:
        """One (n, mean, lower, upper) for each observation."""
        return list(self._history)


def _ruled_out(values: Floats, counts: npt.NDArray[np.int_], alpha: float, known: float) -> float:
    """Largest m that the bets rule out as a mean, but at least `known`, by bisection.

    The search ends on its ruled-out side, so that its tolerance makes the bound looser, never tighter.
    """
    threshold = -math.log(alpha)
    # At the mean of the observations no stake has won anything: log(1 + a) ≤ a.
    low, high = known, float(values @ counts) / int(counts.sum())
    if high <= max(low, ROOT_TOLERANCE) or (low > 0 and log_capital(values, counts, low) < threshold):
        return known
    while high - low > ROOT_TOLERANCE:
        middle = (low + high) / 2
        if log_capital(values, counts, middle) >= threshold:
            low = middle
        else:
            high = middle
    return low


def fixed_size(limit: float, alternative: float, alpha: float = 0.05, power: float = 0.95) -> int:
    """Smallest number of binary observations with which the exact one-sided binomial test reaches the power.

    It tests "the mean is at most the limit" if the alternative lies above the limit, and "at least" if below. Its size
    has to be chosen before the first observation, for one alternative; that is what a confidence sequence is spared.
    """
    for name, value in (("limit", limit), ("alternative", alternative)):
        if not 0 <= value <= 1:
            raise InputError(f"the {name} lies between 0 and 1, not at {value}")
    for name, value in (("alpha", alpha), ("power", power)):
        if not 0 < value < 1:
            raise InputError(f"{name} lies between 0 and 1, not at {value}")
    if alternative < limit:
        limit, alternative = 1 - limit, 1 - alternative
    critical = 0
    if alternative > limit:
        for size in range(1, LARGEST_FIXED_SIZE + 1):
            while _at_least(critical, size, limit) > alpha:
                critical += 1
            if _at_least(critical, size, alternative) >= power:
                return size
    raise InputError(
        f"no test of {LARGEST_FIXED_SIZE} observations or fewer tells {alternative} from {limit}; move them apart"
    )


def _at_least(successes: int, n: int, p: float) -> float:
    """P(S ≥ successes) of a binomial S."""
    if successes <= 0:
        return 1.0
    return 0.0 if successes > n else float(betainc(successes, n - successes + 1, p))
