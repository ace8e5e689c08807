"""What edits changed, in the world's own words: the encoding e(·) of sparsity and diversity, and what moved.

The paper leaves e open; its authors' code encodes a picture as the attributes that a network reads off it. So do the
tables, with the reader of all attributes that each world has. Changes are in units of what the reader errs by: a factor
that it hardly reads jitters in any picture, and must not pass for the one thing that changed.

Two other encodings stand beside it: the same attributes in standard deviations, and the features of the world's oracle,
which was trained to see the label and nothing else. What each is worth is asked of edits that nobody has to judge. One
attribute turned over in the world itself is the sparsest edit there is; noise and a mere round trip are none; another
picture altogether changes everything. An encoding that does not put the first above the others tells nothing of edits.

Shapes: images [N, 3, H, W] in [0, 1]; A attributes of the reader, F factors that it can read, L attributes of these;
change [N, A], signed, in standard deviations of the world; moved [N, F], its lengths; pairs [N, K, A], the changes of
pictures with K valid counterfactuals.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from torch import Tensor

from audit.classifier import HuggingFaceClassifier
from audit.metrics import CONFIDENCE, Array, Bools, Floats, Rate, diversity, hoyer_sparsity, mean_of, sparsity
from benchmarks.quality import Run
from benchmarks.tables.case import Case, moved_in_oracle
from benchmarks.tables.figures import NOISE, Figure, Figures, noisy, round_trip, turned, valid_flips
from benchmarks.tables.plan import K
from worlds.attributes import by_factor, factor_of, factors_of, legibility, read
from worlds.store import open_reader
from worlds.world import Sample, World

LEGIBLE = 0.5
"""Share of a factor's variance that has to be read rightly; the others are left out."""
ENCODINGS = {
    "attributes": "attributes, in units of the reader's error",
    "deviations": "attributes, in standard deviations",
    "oracle": "the oracle's features",
}
"""What sparsity can be measured in, the tables' own choice first."""
CONTROL = "control: "


@dataclass(frozen=True)
class Attributes:
    """The factors of a world that can be read off a picture, and how surely."""

    reader: HuggingFaceClassifier
    factors: tuple[str, ...]
    error: Floats
    """[F] what the reader's error stays below in nearly all pictures; a factor that went further has moved."""

    @classmethod
    @cache
    def of(cls, world: World) -> "Attributes":
        """A world's reader, tried on held-out pictures."""
        reader = open_reader(world)
        share, error = legibility(world, reader)
        legible = share >= LEGIBLE
        chosen = [name for name, good in zip(factors_of(reader.labels), legible, strict=True) if good]
        return cls(reader, tuple(chosen), error[legible])

    def change(self, before: Tensor, after: Tensor) -> Floats:
        """[N, A] how far the reading of each attribute changed."""
        return read(self.reader, after) - read(self.reader, before)

    def moved(self, change: Array) -> Floats:
        """[N, F] how far each legible factor moved."""
        names = factors_of(self.reader.labels)
        return by_factor(self.reader.labels, change)[:, [names.index(name) for name in self.factors]]

    def encoded(self, change: Array) -> Floats:
        """[..., L] the change of all legible attributes in units of the reader's error, as directions are compared in.

        Its length is that of the factors' lengths: an angle is two attributes and one factor.
        """
        factors = [factor_of(name) for name in self.reader.labels]
        legible = [place for place, name in enumerate(factors) if name in self.factors]
        units = [self.error[self.factors.index(factors[place])] for place in legible]
        return np.asarray(change, dtype=np.float64)[..., legible] / units

    def sparsities(self, change: Array) -> Floats:
        """[N] sparsity of each picture's change as the tables rank it; NaN for a picture that is as it was."""
        return sparsity(self.moved(change) / self.error)

    def figures(self, change: Array, valid: Bools) -> Figures:
        """Sparsity, which factors moved and how many; pictures that are as they were count for nothing."""
        moved, sparse = self.moved(change) / self.error, self.sparsities(change)
        beyond = moved[(moved > 0).any(axis=1)] > 1
        causes = {name: self.factors.index(name) for name in ("label", "confounder")}
        nuisances = np.delete(beyond, list(causes.values()), axis=1)
        return {
            "sparsity": Figure.of(mean_of(sparse)),
            "sparsity_valid": Figure.of(mean_of(sparse[valid])),
            "hoyer": Figure.of(mean_of(hoyer_sparsity(moved))),
            "sparsity_deviations": Figure.of(mean_of(sparsity(self.moved(change)))),
            "changed": Figure.of(mean_of(beyond.sum(1))),
            "nuisances": Figure.of(mean_of(nuisances.sum(1))),
            **{name: share_of(beyond[:, place]) for name, place in causes.items()},
        }

    def figures_of_pairs(self, pairs: Floats) -> Figures:
        """How different the first two counterfactuals are, where both are valid."""
        different = diversity(self.encoded(pairs), np.ones(pairs.shape[:2], dtype=bool)).absolute
        return {"diversity": Figure.of(different), "pairs": Figure(float(len(pairs)), n=len(pairs))}

    def pairs(self, run: Run) -> Floats:
        """[N, K, A] how far each attribute moved in all counterfactuals of the pictures where all are valid."""
        change = np.stack([self.change(run.data.images, run.images(k)) for k in range(K)], axis=1)
        return np.asarray(change[valid_flips(run).all(axis=1)])

    def figures_of_run(self, run: Run) -> Figures:
        """Everything of counterfactuals that are at hand."""
        first = self.change(run.data.images, run.images(0))
        return self.figures(first, valid_flips(run)[:, 0]) | self.figures_of_pairs(self.pairs(run))


def share_of(hits: Bools) -> Figure:
    """The share of pictures in which something happened."""
    return Figure.of(Rate.of(int(hits.sum()), len(hits), CONFIDENCE))


@dataclass(frozen=True)
class Control:
    """An edit that nobody has to judge."""

    change: Floats
    """[N, A]"""
    in_oracle: Floats
    """[N, D] in the oracle's features."""
    perfect: bool
    """Whether it is one attribute turned over in the world."""

    def sparsities(self, attributes: Attributes) -> dict[str, Floats]:
        """By encoding: [N] the sparsity of each picture's change."""
        moved = attributes.moved(self.change)
        found = (sparsity(moved / attributes.error), sparsity(moved), sparsity(self.in_oracle))
        return dict(zip(ENCODINGS, found, strict=True))

    def figures(self, attributes: Attributes) -> Figures:
        """The columns that a method's counterfactuals have, where they mean something for a control."""
        found = attributes.figures(self.change, np.ones(len(self.change), dtype=bool))
        del found["sparsity_valid"]
        return found | {"sparsity_oracle": Figure.of(mean_of(sparsity(self.in_oracle)))}


def controls(case: Case, attributes: Attributes, data: Sample) -> dict[str, Control]:
    """By what they are: two perfect edits, two that are none, and one that changes everything."""
    perfect = {
        f"{case.world.confounder_name} turned over in the world": turned(case, data, "confounder"),
        "label turned over in the world": turned(case, data, "label"),
    }
    others = {
        f"white noise of {NOISE:.0%}": noisy(data),
        "encoded and decoded": round_trip(case, data),
        "another picture": data.images.roll(1, 0),
    }
    return {
        CONTROL + name: Control(
            attributes.change(data.images, images),
            moved_in_oracle(case.oracle, data.images, images),
            perfect=name in perfect,
        )
        for name, images in (perfect | others).items()
    }


def worth(attributes: Attributes, shown: Mapping[str, Control]) -> dict[str, Figures]:
    """By encoding, then by control that is no perfect edit: how often a perfect edit is sparser than that.

    The share is over all pairs of pictures and both perfect edits: 1 where the encoding always tells them apart, 1/2
    where it guesses. No method has a say in it.
    """
    found = {name: control.sparsities(attributes) for name, control in shown.items()}
    perfect = [name for name, control in shown.items() if control.perfect]
    table = dict[str, Figures]()
    for encoding, title in ENCODINGS.items():
        table[title] = {}
        for other in (name for name in shown if name not in perfect):
            told = [share_above(found[name][encoding], found[other][encoding]) for name in perfect]
            table[title][other] = Figure(float(np.mean(told)), n=len(found[other][encoding]))
    return table


def share_above(these: Floats, those: Floats) -> float:
    """The share of pairs in which one of these lies above one of those, a tie counting half."""
    difference = these[:, None] - those[None]
    return float(np.mean((difference > 0) + 0.5 * (difference == 0)))
