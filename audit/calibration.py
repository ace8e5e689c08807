"""Finds the strength, the guidance and τ at which a prior explains a classifier.

First the strength: the largest at which an unguided walk to noise and back keeps the classifier's label, so that
whatever flips it later is the guidance and not the loss of detail. Some higher ones are tried too: masks and
proximity hold back much of what the bare walk loses. Then a small search over guidance and τ, scored by flips that the
evaluator confirms, less what the edits touch beyond a fifth of the picture. Among settings that are about as good the
gentlest guidance wins: a strong push leaves smears where a weak one leaves the work to the generator.

Shapes: images [N, 3, H, W] in [0, 1].
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from audit.explain import Explainer, runners_up
from audit.metrics import edited_area
from engine.errors import InputError
from engine.methods import DEFAULT
from engine.recipe import Recipe
from engine.sampling import image_to_image

STRENGTHS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
GUIDANCE = (0.1, 0.2, 0.3)
TAUS = (0.15, 0.3)
TRIED_STRENGTHS = 3
"""The strength that keeps the label and every second one above it."""
LABEL_KEPT = 0.95
AREA_WEIGHT = 1.0
LARGEST_AREA = 0.2
ABOUT_AS_GOOD = 0.01


@dataclass(frozen=True)
class Trial:
    """One setting that was tried, and how it did."""

    strength: float
    eta: float
    tau: float
    flip_rate: float
    nafr: float
    area_median: float
    score: float


@dataclass(frozen=True)
class Calibration:
    """The recipe that was found, and everything that was tried on the way."""

    recipe: Recipe
    label_kept: dict[float, float]
    """Share of images whose label an unguided walk keeps, by strength."""
    trials: tuple[Trial, ...]
    n: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "n": self.n,
            "label_kept": {str(strength): share for strength, share in self.label_kept.items()},
            "trials": [asdict(trial) for trial in self.trials],
            "recipe": self.recipe.model_dump(mode="json"),
        }


def calibrate(
    explainer: Explainer,
    images: Tensor,
    *,
    strengths: Sequence[float] = STRENGTHS,
    guidance: Sequence[float] = GUIDANCE,
    taus: Sequence[float] = TAUS,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """The best recipe for this prior and classifier, starting from the explainer's own."""
    if len(images) < 4:
        raise InputError(f"Calibration needs at least 4 images; these are {len(images)}.")
    if not isinstance(explainer.recipe, Recipe):
        raise InputError(f"Calibration finds a recipe of {DEFAULT}; the method {explainer.method} has none.")
    recipe = explainer.recipe.changed(k=1)
    kept = _labels_kept(explainer, images, recipe, strengths)
    good = [strength for strength, share in kept.items() if share >= LABEL_KEPT]
    keeping = max(good) if good else min(kept)
    tried = sorted(strength for strength in kept if strength >= keeping)[::2][:TRIED_STRENGTHS]
    trials: list[Trial] = []
    grid = [(strength, eta, tau) for strength in tried for eta in guidance for tau in taus]
    for done, (strength, eta, tau) in enumerate(grid, start=1):
        trials.append(_try(explainer, images, recipe.changed(strength=strength, eta=eta, tau=tau)))
        if progress is not None:
            progress(done, len(grid))
    best = choose(trials)
    found = explainer.recipe.changed(strength=best.strength, eta=best.eta, tau=best.tau)
    return Calibration(found, kept, tuple(trials), len(images))


def choose(trials: Sequence[Trial]) -> Trial:
    """Of the trials that are about as good as the best, that of the gentlest guidance, then of the smallest area."""
    enough = max(trial.score for trial in trials) - ABOUT_AS_GOOD
    return min((t for t in trials if t.score >= enough), key=lambda t: (t.eta, t.area_median))


def _labels_kept(
    explainer: Explainer, images: Tensor, recipe: Recipe, strengths: Sequence[float]
) -> dict[float, float]:
    """By strength, the share of images that the classifier calls the same after an unguided walk."""
    before = explainer.classifier.probabilities(images).argmax(1)
    plan = explainer.plan(images)
    limits = {} if plan is None else {"batch": plan.micro_batch}
    shares = {}
    for strength in strengths:
        after = image_to_image(explainer.prior, images, recipe.steps, strength, recipe.seed, **limits)
        same = explainer.classifier.probabilities(after).argmax(1) == before
        shares[strength] = float(same.float().mean())
    return shares


def _try(explainer: Explainer, images: Tensor, recipe: Recipe) -> Trial:
    tried = replace(explainer, recipe=recipe)
    _, targets = runners_up(explainer.classifier.probabilities(images))
    sets = tried(images, targets.tolist(), seeds=list(range(len(images))))
    flipped = np.array([found.flipped[0] for found in sets])
    confirmed = np.array([tried.evaluator_flipped(found)[0] for found in sets]) & flipped
    areas = np.array([edited_area(found.edit_masks[:, 0])[0] for found in sets])
    return Trial(recipe.strength, recipe.eta, recipe.tau, float(flipped.mean()), *scored(confirmed, areas))


def scored(confirmed: np.ndarray, areas: np.ndarray) -> tuple[float, float, float]:
    """(NAFR, median area, score) of flips [N] that the evaluator confirms and the shares of pictures [N] they edit.

    The score is the NAFR less what edits touch beyond `LARGEST_AREA`; where nothing is confirmed, the area is all.
    """
    nafr = float(confirmed.mean())
    area = float(np.median(areas[confirmed])) if confirmed.any() else 1.0
    return nafr, area, nafr - AREA_WEIGHT * max(0.0, area - LARGEST_AREA)
