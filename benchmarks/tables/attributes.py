"""What edits changed, in the world's own words: beside Table 1, how many attributes of a picture moved, and which.

The features that Table 1 measures sparsity in belong to the oracle, which was trained to see the label and nothing
else: there a spurious feature that is turned over looks like noise. A reader of all attributes sees it. What it is
worth is shown by edits that nobody has to judge: one attribute turned over in the world, noise, a mere round trip.

Sparsity is that of changes in units of what the reader errs by: a factor that it hardly reads jitters in any picture,
and must not pass for the one thing that changed.

Shapes: images [N, 3, H, W] in [0, 1]; A attributes of the reader, F factors that it can read; change [N, A], signed,
in standard deviations of the world; moved [N, F], its lengths.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from torch import Tensor

from audit.classifier import HuggingFaceClassifier
from audit.metrics import CONFIDENCE, Array, Bools, Floats, Rate, hoyer_sparsity, mean_of, sparsity
from benchmarks.tables.case import Case
from benchmarks.tables.figures import NOISE, Figure, Figures, noisy, round_trip, sparsity_between, turned
from worlds.attributes import by_factor, factors_of, legibility, read
from worlds.store import open_reader
from worlds.world import Sample, World

ORACLE = "oracle"
"""Key of the sparsity in the oracle's features, for comparison."""
LEGIBLE = 0.5
"""Share of a factor's variance that has to be read rightly; the others are left out."""


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

    def figures(self, change: Array) -> Figures:
        """How many factors moved, which, and how sparse that is; pictures that are as they were count for nothing."""
        moved = self.moved(change) / self.error
        moved = moved[(moved > 0).any(axis=1)]
        beyond = moved > 1
        causes = {name: self.factors.index(name) for name in ("label", "confounder")}
        nuisances = np.delete(beyond, list(causes.values()), axis=1)
        return {
            "sparsity": Figure.of(mean_of(sparsity(moved))),
            "hoyer": Figure.of(mean_of(hoyer_sparsity(moved))),
            "changed": Figure.of(mean_of(beyond.sum(1))),
            "nuisances": Figure.of(mean_of(nuisances.sum(1))),
            **{name: share_of(beyond[:, place]) for name, place in causes.items()},
        }


def share_of(hits: Bools) -> Figure:
    """The share of pictures in which something happened."""
    return Figure.of(Rate.of(int(hits.sum()), len(hits), CONFIDENCE))


def controls(case: Case, attributes: Attributes, data: Sample) -> dict[str, Figures]:
    """By what they are: edits that need no judge, and show what the figures are worth, the oracle's among them."""
    edits = {
        f"control: {case.world.confounder_name} turned over in the world": turned(case, data, "confounder"),
        "control: label turned over in the world": turned(case, data, "label"),
        f"control: white noise of {NOISE:.0%}": noisy(data),
        "control: encoded and decoded": round_trip(case, data),
        "control: another picture": data.images.roll(1, 0),
    }
    return {
        name: attributes.figures(attributes.change(data.images, images))
        | {ORACLE: sparsity_between(case, data.images, images)}
        for name, images in edits.items()
    }
