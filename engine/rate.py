"""A share of cases that never goes without its n and its interval."""

import math
from dataclasses import dataclass
from statistics import NormalDist

from engine.errors import InputError


@dataclass(frozen=True)
class Rate:
    """A share of n cases with its 95 % Wilson interval; NaN and [0, 1] where n is 0."""

    value: float
    n: int
    lower: float
    upper: float

    @classmethod
    def of(cls, successes: int, n: int, confidence: float = 0.95) -> "Rate":
        """The rate successes / n."""
        if not 0 <= successes <= n:
            raise InputError(f"{successes} successes of {n} is no rate")
        if n == 0:
            return cls(math.nan, 0, 0.0, 1.0)
        z = NormalDist().inv_cdf(0.5 + confidence / 2)
        p = successes / n
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        # The bounds at 0 and n successes are exact; rounding must not push them past the value.
        return cls(p, n, 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)
