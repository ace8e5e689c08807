"""Teachers: did the real class change, or only something that happens to go with it?

A teacher sees an original and a valid counterfactual of it and answers *true* (the real class changed), *false* (it did
not: the classifier was moved by something else) or *out of distribution* (the picture is no longer one of its kind).
Every teacher states how often it is right about originals, for a verdict is no better than its teacher.

Shapes: N counterfactuals, images [N, 3, H, W] in [0, 1], edits [N, 1, H, W] of bool, latents [N, D].
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import InputError
from engine.rate import Rate

SURE = 0.9
MIN_PER_CLASS = 10


class Judgement(StrEnum):
    """What a teacher says of one counterfactual."""

    TRUE = "true"
    FALSE = "false"
    OUT_OF_DISTRIBUTION = "out_of_distribution"


@dataclass(frozen=True)
class Pairs:
    """Originals and their counterfactuals, as a teacher sees them."""

    x: Tensor
    x_cf: Tensor
    edits: Tensor
    names: tuple[str, ...]
    """One name per counterfactual, the key of stored verdicts."""
    rows: tuple[int, ...]
    """The data set's row of each original."""
    targets: tuple[int, ...]
    """The class that each counterfactual was made for, and that the classifier now sees."""

    def __len__(self) -> int:
        return len(self.x)


class Teacher(Protocol):
    """Who judges counterfactuals."""

    @property
    def name(self) -> str:
        """What the report calls it."""
        ...

    @property
    def accuracy(self) -> Rate | None:
        """How often it is right about originals; None where there is nothing to be right about."""
        ...

    @property
    def content_hash(self) -> str | None:
        """What tells it from another teacher of the same name; None where nothing does."""
        ...

    def __call__(self, pairs: Pairs) -> list[Judgement | None]:
        """One judgement per pair; None where this teacher has no opinion."""
        ...


@dataclass(frozen=True)
class OracleTeacher:
    """A classifier that is trusted: the real class changed if it says another class than before.

    Where it gives no class at least the probability `sure`, the picture is out of distribution. Where it sees another
    class than before, but not the counterfactual's target (the original was classified wrongly, and the edit made it
    what the classifier had taken it for), it has no opinion: the class changed, but not to what the classifier says.
    """

    probabilities: Callable[[Tensor], Tensor]
    accuracy: Rate
    sure: float = SURE
    name: str = "oracle classifier"
    content_hash: str | None = None
    """The classifier's."""

    @classmethod
    def tested(
        cls,
        probabilities: Callable[[Tensor], Tensor],
        x: Tensor,
        labels: Tensor,
        *,
        content_hash: str | None = None,
    ) -> "OracleTeacher":
        """An oracle whose accuracy is measured on originals."""
        if probabilities(x[:1]).shape[1] <= int(labels.max()):
            raise InputError("The teacher knows fewer classes than the data set has labels.")
        right = int((probabilities(x).argmax(1) == labels).sum())
        return cls(probabilities, Rate.of(right, len(labels)), content_hash=content_hash)

    def __call__(self, pairs: Pairs) -> list[Judgement | None]:
        """Judgements by the class that the oracle sees before and after."""
        if not len(pairs):
            return []
        before, after = self.probabilities(pairs.x), self.probabilities(pairs.x_cf)
        seen = zip(before.argmax(1).tolist(), *(column.tolist() for column in after.max(1)), pairs.targets, strict=True)
        return [self._judge(was, p, now, target) for was, p, now, target in seen]

    def _judge(self, was: int, p: float, now: int, target: int) -> Judgement | None:
        if p < self.sure:
            return Judgement.OUT_OF_DISTRIBUTION
        if now == was:
            return Judgement.FALSE
        return Judgement.TRUE if now == target else None


@dataclass(frozen=True)
class RegionTeacher:
    """A map of where the label lives: an edit is true if at least the share `inside` of its area lies there."""

    regions: Callable[[Sequence[int]], Tensor]
    """Data set rows to masks [N, 1, H, W]; 1 where the label lives."""
    inside: float = 0.5
    name: str = "label regions"
    accuracy: None = None
    content_hash: str | None = None
    """Of the masks, where whoever has them states it."""

    def __call__(self, pairs: Pairs) -> list[Judgement | None]:
        """Judgements by where the edits lie; none for an empty edit."""
        if not len(pairs):
            return []
        regions = self.regions(pairs.rows).float()
        if regions.shape != pairs.edits.shape:
            raise InputError(
                f"The label regions are {list(regions.shape)}, but the edits {list(pairs.edits.shape)}: give one mask "
                "per image, of the prior's size."
            )
        weight = pairs.edits.float()
        area = weight.sum((1, 2, 3))
        share = (weight * regions).sum((1, 2, 3)) / area.clamp(min=1)
        return [
            None if a == 0 else Judgement.TRUE if s >= self.inside else Judgement.FALSE
            for a, s in zip(area.tolist(), share.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Probe:
    """A linear read-out of one named 0/1 column from latents, with its accuracy on held-out images."""

    column: str
    weight: Tensor  # [D]
    bias: float
    scale: float
    """Distance between the two groups' mean scores: a shift of 1 is a whole change of the attribute."""
    accuracy: Rate

    def score(self, latents: Tensor) -> Tensor:
        """[N] above 0 where the column is read as 1."""
        return latents @ self.weight + self.bias


@dataclass(frozen=True)
class AttributeTeacher:
    """Probes on the prior's latents: which named column did the edit move, and was the label among them?

    True if the label's probe changed its mind, else false. `accuracy` is the label probe's on held-out images.
    """

    encode: Callable[[Tensor], Tensor]
    label: Probe
    attributes: tuple[Probe, ...]
    name: str = "attribute columns"
    content_hash: str | None = None
    """Of what the probes learned from. Their weights differ in the last digits from one thread count to another."""

    @property
    def accuracy(self) -> Rate:
        """Of the label's probe."""
        return self.label.accuracy

    def __call__(self, pairs: Pairs) -> list[Judgement | None]:
        """Judgements by the label's probe."""
        if not len(pairs):
            return []
        before, after = (self.label.score(self.encode(x).flatten(1)) for x in (pairs.x, pairs.x_cf))
        return [Judgement.TRUE if c else Judgement.FALSE for c in ((before > 0) != (after > 0)).tolist()]

    def shifts(self, x: Tensor, x_cf: Tensor) -> dict[str, np.ndarray]:
        """By column, how far each edit moved it, in units of a whole change; the label's first."""
        before, after = (self.encode(images).flatten(1) for images in (x, x_cf))
        return {
            probe.column: ((probe.score(after) - probe.score(before)) / probe.scale).numpy()
            for probe in (self.label, *self.attributes)
        }


def fit_probe(column: str, latents: Tensor, values: Tensor, *, decay: float = 1e-2, seed: int = 0) -> Probe:
    """Regularised logistic regression on standardised latents; one image in four is held out for the accuracy."""
    values = values.to(torch.float64)
    if not set(values.unique().tolist()) <= {0.0, 1.0}:
        raise InputError(f"The column {column!r} holds other values than 0 and 1; probes read two-valued columns.")
    ones = int(values.sum())
    if min(ones, len(values) - ones) < MIN_PER_CLASS:
        raise InputError(f"The column {column!r} has fewer than {MIN_PER_CLASS} images of one value; leave it out.")
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    held, used = order[: len(order) // 4], order[len(order) // 4 :]
    x = latents.to(torch.float64)
    mean, std = x[used].mean(0), x[used].std(0).clamp(min=1e-6)
    standard = (x - mean) / std / x.shape[1] ** 0.5
    weight = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        score = standard[used] @ weight[:-1] + weight[-1]
        loss = F.binary_cross_entropy_with_logits(score, values[used]) + decay * weight[:-1].square().mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    found = weight.detach()
    slope = found[:-1] / std / x.shape[1] ** 0.5
    bias = float(found[-1] - mean @ slope)
    score = x @ slope + bias
    gap = float(score[used][values[used] == 1].mean() - score[used][values[used] == 0].mean())
    right = int(((score[held] > 0) == (values[held] > 0.5)).sum())
    return Probe(column, slope.float(), bias, max(gap, 1e-6), Rate.of(right, len(held)))


@dataclass(frozen=True)
class StoredTeacher:
    """Verdicts that a person gave, by the counterfactual's name."""

    verdicts: Mapping[str, Judgement]
    name: str = "stored verdicts"
    accuracy: None = None

    @property
    def content_hash(self) -> str:
        """SHA-256 of the verdicts, whatever their order."""
        return _digest(sorted((name, str(verdict)) for name, verdict in self.verdicts.items()))

    @classmethod
    def load(cls, file: Path | str) -> "StoredTeacher":
        """Verdicts of a JSON file: {counterfactual's name: "true" | "false" | "out_of_distribution"}."""
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"The verdicts {file} cannot be read as JSON: {error}.") from None
        if not isinstance(content, dict):
            raise InputError(f"The verdicts {file} have to be one JSON object of name and verdict.")
        try:
            return cls({str(name): Judgement(verdict) for name, verdict in content.items()})
        except ValueError as error:
            known = ", ".join(Judgement)
            raise InputError(f"The verdicts {file} hold an unknown one ({error}); known are {known}.") from None

    def __call__(self, pairs: Pairs) -> list[Judgement | None]:
        """What was stored; None where nothing was."""
        return [self.verdicts.get(name) for name in pairs.names]


@dataclass(frozen=True)
class MajorityTeacher:
    """Several teachers: what more than half of those with an opinion say; without such a majority, nothing."""

    teachers: tuple[Teacher, ...]

    def __post_init__(self) -> None:
        if not self.teachers:
            raise InputError("A majority needs at least one teacher.")

    @property
    def name(self) -> str:
        """All names."""
        return "majority of " + ", ".join(teacher.name for teacher in self.teachers)

    @property
    def accuracy(self) -> Rate | None:
        """The lowest that is stated: a majority is not assumed to be better than its weakest member."""
        stated = [teacher.accuracy for teacher in self.teachers if teacher.accuracy is not None]
        return min(stated, key=lambda rate: rate.value) if stated else None

    @property
    def content_hash(self) -> str:
        """SHA-256 of the members' names and hashes."""
        return _digest([(teacher.name, teacher.content_hash) for teacher in self.teachers])

    def __call__(self, pairs: Pairs) -> list[Judgement | None]:
        """The majority's judgement of each pair."""
        opinions = [teacher(pairs) for teacher in self.teachers]
        return [_majority([opinion[n] for opinion in opinions]) for n in range(len(pairs))]


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _majority(opinions: Sequence[Judgement | None]) -> Judgement | None:
    given = [opinion for opinion in opinions if opinion is not None]
    if not given:
        return None
    winner, votes = Counter(given).most_common(1)[0]
    return winner if 2 * votes > len(given) else None
