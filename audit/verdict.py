"""From audited images to PASS, FAIL or INCONCLUSIVE, at any time, with error probabilities that hold.

The unit is the audited image: its K counterfactuals are not independent, its neighbours in a random order are. The
*reliance* of an image is 1 where its first counterfactual is valid and the teacher judges it false: the classifier
changed its mind, the real class did not (audit.run says why the first alone). Any number in [0, 1] is taken. An image
without a judged valid counterfactual has no reliance; it counts for the flip rate only. Each direction (source →
target) has a confidence sequence of its mean reliance, and a limit: the policy's, or a higher one while an accepted
finding lasts.

FAIL  some direction's lower bound lies above its limit.
PASS  every direction's upper bound lies at or below its limit.

Which errors are controlled, with D directions named before the first image:

* If no direction's reliance exceeds its limit, a FAIL ever appears with probability at most alpha. It needs one of D
  lower bounds to be wrong, so each of them has the error alpha / D (Bonferroni).
* If some direction's reliance exceeds its limit, a PASS ever appears with probability at most alpha. It needs the upper
  bound of that very direction to be wrong, so each upper bound has the error alpha: "all of them" needs no correction.

Only one of the two mistakes is possible for a given classifier, so a verdict is wrong with probability at most alpha,
however often one looked and for whatever reason one stopped.

The numbers of the whole verdict are those of the worst direction, not of a pool: a shortcut that works one way only
would be halved by a pool, and what the pool weighs is an accident of the data set. [greatest lower, greatest upper]
holds the greatest true reliance, each end with probability 1 − alpha, and contains the greatest mean. Where accepted
findings give limits of different height, these numbers are of the directions with the limit that decides, so that
lower > limit in every FAIL and upper ≤ limit in every PASS.

Prerequisites, and what they block:

| not met                                           | blocks        | because                                       |
|---------------------------------------------------|---------------|-----------------------------------------------|
| evaluator agreement, teacher accuracy             | PASS and FAIL | what was measured may not be reliance         |
| number of measured images                         | PASS and FAIL | too few to look at for anyone to believe it   |
| a mean that fits all images of a direction        | PASS and FAIL | the images did not come in random order       |
| flip rate, judged share, images of each direction | PASS only     | what was not flipped or judged could hide     |
|                                                   |               | reliance; what was found in the rest stands   |

A number that was not measured is not met. Flip rates are compared as they are, without bounds.
"""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from audit.confidence import ConfidenceSequence, Step
from audit.policy import AcceptedFinding, Policy
from engine.errors import InputError

__all__ = ["DirectionRecord", "Judge", "Observation", "Outcome", "Prerequisites", "Verdict"]


class Outcome(StrEnum):
    """What an audit says of a classifier."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        """What the gate hands to a pipeline."""
        return {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INCONCLUSIVE: 3}[self]


@dataclass(frozen=True)
class Prerequisites:
    """What has to be known of the measuring instruments; None where it was not measured."""

    evaluator_agreement: float | None
    """Share of held-out images on which the evaluator says what the classifier says."""
    teacher_accuracy: float | None
    """Share of original images that the teacher judges right."""


class Observation(NamedTuple):
    """One audited image."""

    direction: str
    reliance: float | None
    flipped: bool


class DirectionRecord(BaseModel):
    """What is known of one direction."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    direction: str
    reliance: float | None
    """Mean over the measured images; None where there is none."""
    lower: float
    upper: float
    limit: float
    n_images: int
    n_flipped: int
    n_measured: int
    flip_rate: float | None
    accepted: str | None
    """Why a higher limit than the policy's holds, if it does."""
    history: tuple[Step, ...]
    """(n, mean, lower, upper) after each measured image, to be drawn."""


class Verdict(BaseModel):
    """The outcome of an audit and the numbers and sentences that explain it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    outcome: Outcome
    reliance: float | None
    """Greatest mean reliance of a direction; None where nothing was measured."""
    lower: float
    upper: float
    limit: float
    alpha: float
    worst_direction: str | None
    """The direction of that reliance."""
    pooled_reliance: float | None
    """Mean over all measured images of all directions, for information; no bound belongs to it."""
    n_images: int
    """Audited images."""
    n_measured: int
    """Those with a reliance, on which the bounds rest."""
    flip_rate: float | None
    directions: tuple[DirectionRecord, ...]
    reasons: tuple[str, ...]
    """Sentences for people, the most important first."""

    def report(self) -> dict[str, Any]:
        """The verdict as it stands in report.json, where the outcome is called `verdict`."""
        content = self.model_dump(mode="json")
        return {"verdict": content.pop("outcome"), **content}


@dataclass
class _Direction:
    """The running state of one direction."""

    name: str
    limit: float
    finding: AcceptedFinding | None
    accepted: bool
    sequence: ConfidenceSequence
    n_images: int = 0
    n_flipped: int = 0
    reliances: list[float] = field(default_factory=list)

    @property
    def n_measured(self) -> int:
        return len(self.reliances)

    @property
    def counts(self) -> bool:
        """Whether it has a say; a direction that is tolerated up to 1 has none."""
        return self.limit < 1

    @property
    def exceeds(self) -> bool:
        return self.sequence.lower > self.limit

    @property
    def keeps(self) -> bool:
        return self.sequence.upper <= self.limit

    @property
    def flip_rate(self) -> float | None:
        return self.n_flipped / self.n_images if self.n_images else None

    def record(self) -> DirectionRecord:
        return DirectionRecord(
            direction=self.name,
            reliance=self.sequence.mean if self.n_measured else None,
            lower=self.sequence.lower,
            upper=self.sequence.upper,
            limit=self.limit,
            n_images=self.n_images,
            n_flipped=self.n_flipped,
            n_measured=self.n_measured,
            flip_rate=self.flip_rate,
            accepted=self.finding.reason if self.finding and self.accepted else None,
            history=tuple(self.sequence.history),
        )


class Judge:
    """Takes one audited image after the other and says when it is enough, and what it means.

    The state is a function of the arguments and of the observations in their order: replaying them restores it.
    """

    def __init__(self, policy: Policy, directions: Sequence[str], today: datetime.date) -> None:
        """`directions` are all that will be audited: how many they are is part of the error control."""
        if not directions or len(set(directions)) != len(directions):
            raise InputError(f"a verdict needs directions that differ, at least one, not {list(directions)}")
        self.policy = policy
        self.today = today
        self._directions = {}
        for name in directions:
            finding = policy.finding(name)
            self._directions[name] = _Direction(
                name,
                policy.limit_of(name, today),
                finding,
                finding is not None and finding.holds(today),
                ConfidenceSequence.one_sided(policy.alpha / len(directions), policy.alpha),
            )

    @classmethod
    def replay(
        cls, policy: Policy, directions: Sequence[str], today: datetime.date, observations: Iterable[Observation]
    ) -> "Judge":
        """The judge who has seen these observations in this order."""
        judge = cls(policy, directions, today)
        for observation in observations:
            judge.observe(*observation)
        return judge

    def observe(self, direction: str, reliance: float | None, flipped: bool) -> None:
        """One more audited image, in random order.

        `flipped` says whether its counterfactual is valid; `reliance` is None where it is not, or got no verdict.
        """
        if direction not in self._directions:
            known = ", ".join(self._directions)
            raise InputError(f"the direction {direction!r} was not named before the audit; it knows {known}")
        if reliance is not None and not 0 <= reliance <= 1:
            raise InputError(f"the reliance of an image lies between 0 and 1, not at {reliance}")
        if reliance is not None and not flipped:
            raise InputError("an image that was not flipped has no valid counterfactual, hence no reliance")
        state = self._directions[direction]
        state.n_images += 1
        state.n_flipped += bool(flipped)
        if reliance is not None:
            state.reliances.append(float(reliance))
            state.sequence.update(reliance)

    @property
    def n_images(self) -> int:
        """Audited images."""
        return sum(d.n_images for d in self._directions.values())

    @property
    def n_measured(self) -> int:
        """Audited images with a reliance."""
        return sum(d.n_measured for d in self._directions.values())

    @property
    def open_directions(self) -> tuple[str, ...]:
        """Directions of which more images could still matter; the others need no more counterfactuals.

        Skipping images by this list keeps all error probabilities: it depends on the past alone.
        """
        if self.n_measured < self.policy.min_images:
            return tuple(d.name for d in self._counting or self._directions.values())
        return tuple(d.name for d in self._counting if not d.keeps or self._hidden(d))

    @property
    def decided(self) -> bool:
        """Whether the images say PASS or FAIL; what is known of the instruments may still turn it inconclusive."""
        return self._finding() in (Outcome.PASS, Outcome.FAIL)

    @property
    def finished(self) -> bool:
        """Whether the audit may stop: it is decided, or the policy grants no more images, or no more can help."""
        return self.decided or self.n_images >= self.policy.max_images or bool(self._broken)

    @property
    def progress(self) -> str:
        """Each direction's bounds so far, in a few words."""
        return ", ".join(
            f"{d.name} {d.sequence.lower:.2f} to {d.sequence.upper:.2f}" for d in self._directions.values()
        )

    def verdict(self, prerequisites: Prerequisites) -> Verdict:
        """The verdict on what has been observed so far."""
        unsound = self._unsound(prerequisites)
        outcome = Outcome.INCONCLUSIVE if unsound else self._finding()
        group = self._deciding_group()
        measured = [d for d in group if d.n_measured]
        worst = max(measured, key=lambda d: d.sequence.mean, default=None)
        pooled = [r for d in self._directions.values() for r in d.reliances]
        return Verdict(
            outcome=outcome,
            reliance=worst.sequence.mean if worst else None,
            lower=max(d.sequence.lower for d in group),
            upper=max(d.sequence.upper for d in group),
            limit=group[0].limit,
            alpha=self.policy.alpha,
            worst_direction=worst.name if worst else None,
            pooled_reliance=sum(pooled) / len(pooled) if pooled else None,
            n_images=self.n_images,
            n_measured=self.n_measured,
            flip_rate=sum(d.n_flipped for d in self._directions.values()) / self.n_images if self.n_images else None,
            directions=tuple(d.record() for d in self._directions.values()),
            reasons=tuple(self._reasons(outcome, unsound)),
        )

    # What the images say -----------------------------------------------------------------------------------------

    @property
    def _counting(self) -> list[_Direction]:
        return [d for d in self._directions.values() if d.counts]

    @property
    def _broken(self) -> list[_Direction]:
        return [d for d in self._directions.values() if d.sequence.broken]

    def _finding(self) -> Outcome:
        """The outcome if the instruments are sound."""
        if self._broken or self.n_measured < self.policy.min_images:
            return Outcome.INCONCLUSIVE
        if any(d.exceeds for d in self._counting):
            return Outcome.FAIL
        if all(d.keeps and not self._hidden(d) for d in self._counting):
            return Outcome.PASS
        return Outcome.INCONCLUSIVE

    def _deciding_group(self) -> list[_Direction]:
        """The directions that share the limit which is exceeded most, or else kept least."""
        candidates = self._counting or list(self._directions.values())
        over = [d for d in candidates if d.exceeds]
        if over:
            limit = max(over, key=lambda d: d.sequence.lower - d.limit).limit
        else:
            limit = max(candidates, key=lambda d: d.sequence.upper - d.limit).limit
        return [d for d in candidates if d.limit == limit]

    # Sentences ---------------------------------------------------------------------------------------------------

    def _unsound(self, prerequisites: Prerequisites) -> list[str]:
        """Why neither PASS nor FAIL can be said, whatever the bounds are."""
        policy, sentences = self.policy, []
        for what, value, wanted in (
            (
                "agreement of the evaluator with the classifier",
                prerequisites.evaluator_agreement,
                policy.min_evaluator_agreement,
            ),
            ("accuracy of the teacher on original images", prerequisites.teacher_accuracy, policy.min_teacher_accuracy),
        ):
            if value is None:
                sentences.append(f"The {what} was not measured; the policy asks for {_percent(wanted)}.")
            elif not value >= wanted:  # NaN is not met either
                sentences.append(f"The {what} is {_percent(value)}; the policy asks for {_percent(wanted)}.")
        for d in self._broken:
            sentences.append(
                f"{d.name}: early and late images contradict each other, so they cannot have come in random order."
            )
        if self.n_measured < policy.min_images:
            sentences.append(
                f"Only {_images(self.n_measured)} could be measured, of {self.n_images} audited; "
                f"the policy asks for {policy.min_images}."
            )
        return sentences

    def _hidden(self, d: _Direction) -> list[str]:
        """Why reliance could hide in the images of a direction that were not measured."""
        policy, sentences = self.policy, []
        if d.n_images == 0:
            return [f"{d.name}: no image was audited."]
        if d.n_flipped == 0:
            return [f"{d.name}: none of {_images(d.n_images)} could be flipped, so nothing is known."]
        if d.flip_rate is not None and d.flip_rate < policy.min_flip_rate:
            sentences.append(
                f"{d.name}: {_percent(d.flip_rate)} of {_images(d.n_images)} were flipped; "
                f"the policy asks for {_percent(policy.min_flip_rate)}."
            )
        if d.n_measured < policy.min_measured_share * d.n_flipped:
            sentences.append(
                f"{d.name}: the teacher could judge {d.n_measured} of {_images(d.n_flipped)} that were flipped; "
                f"the policy asks for {_percent(policy.min_measured_share)}."
            )
        if d.n_measured < policy.min_per_direction:
            sentences.append(
                f"{d.name}: {_images(d.n_measured)} could be measured; the policy asks for {policy.min_per_direction}."
            )
        return sentences

    def _reasons(self, outcome: Outcome, unsound: list[str]) -> list[str]:
        sure = f"{_percent(1 - self.policy.alpha)} confidence"
        exceeding = sorted((d for d in self._counting if d.exceeds), key=lambda d: d.limit - d.sequence.lower)
        bounds = [
            f"{d.name}: a spurious feature alone flips the classifier in {_percent(d.sequence.mean)} of the "
            f"counterfactuals of {_images(d.n_measured)} (bounds {_range(d)}); the limit of {_percent(d.limit)} is "
            f"exceeded with {sure}."
            for d in exceeding
        ]
        if outcome is Outcome.PASS:
            bounds = [
                f"{d.name}: with {sure} a spurious feature alone flips the classifier in at most "
                f"{_percent(d.sequence.upper)} of the counterfactuals, within the limit of {_percent(d.limit)}, "
                f"after {_images(d.n_measured)}."
                for d in self._counting
            ]
            if not bounds:
                bounds = ["Every direction is accepted, so none was left to judge."]
        elif outcome is Outcome.INCONCLUSIVE:
            bounds += [
                f"{d.name}: after {_images(d.n_measured)} the reliance lies between {_range(d)}, on both sides of the "
                f"limit of {_percent(d.limit)}."
                for d in self._counting
                if d.n_measured and not d.exceeds and not d.keeps
            ]
        hidden = [sentence for d in self._counting for sentence in self._hidden(d)]
        notes = bounds + hidden if outcome is Outcome.FAIL else hidden + bounds
        return unsound + notes + self._findings()

    def _findings(self) -> list[str]:
        """What became of the accepted findings."""
        sentences = []
        for finding in self.policy.accepted:
            day = finding.expires.isoformat()
            if finding.direction not in self._directions:
                sentences.append(f"{finding.direction}: a finding is accepted, but this audit has no such direction.")
            elif finding.holds(self.today):
                sentences.append(
                    f"{finding.direction}: a reliance of up to {_percent(finding.limit)} is accepted until {day}: "
                    f"{finding.reason.rstrip('.')}."
                )
            else:
                sentences.append(
                    f"{finding.direction}: the accepted finding ({finding.reason.rstrip('.')}) has expired on {day} "
                    "and counts again."
                )
        return sentences


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def _images(n: int) -> str:
    return "1 image" if n == 1 else f"{n} images"


def _range(d: _Direction) -> str:
    return f"{_percent(d.sequence.lower)} and {_percent(d.sequence.upper)}"
