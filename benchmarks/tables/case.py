"""What all methods are compared on.

Shapes: images [N, 3, H, W] in [0, 1].
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from audit.classifier import HuggingFaceClassifier
from audit.explain import Explainer, distil_pair, runners_up
from audit.finetune import Labelled
from audit.finetune_settings import FinetuneSettings
from audit.lpips import LPIPS
from benchmarks.quality import DISTIL_IMAGES, DISTIL_SEED, Run
from benchmarks.tables.network import QuickPrior
from benchmarks.tables.plan import MEMORY, SPACES, K, Row
from engine.counterfactual import CounterfactualSet
from engine.methods import METHODS, AnySettings
from engine.prior import Prior
from engine.surrogate import SurrogatePair
from engine.writing import write_text
from service.progress import distilling
from worlds import World
from worlds.classifiers import RECIPES
from worlds.measure import features
from worlds.store import open_classifier, open_prior
from worlds.world import Sample

BATCH = 10
GAIN_TEST_SEED = 870_001
TEST_SEED = 880_001
"""Of the pictures that all methods explain. No setting was chosen by a figure on them; SCE-LITE-HQ's redrawing of
portraits was, by their looks."""
CHECK_SEED = 920_001
"""Of pictures that nobody had seen when settings and encodings were fixed. The order of the rows is checked on them
once, and shown whatever it is."""
N_GAIN_TEST = 2_000


@dataclass(frozen=True)
class Case:
    """What all methods are compared on: one world's poisoned student, its surrogates and pictures."""

    world: World
    classifier: HuggingFaceClassifier
    surrogates: SurrogatePair
    oracle: HuggingFaceClassifier
    cache: Path
    batch: int = BATCH
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings by method that differ from the authors'."""
    perceptual: LPIPS | None = None
    repair: FinetuneSettings = field(default_factory=FinetuneSettings)
    """How the student is fine-tuned for the gain."""
    _priors: dict[str, Prior] = field(default_factory=dict, compare=False)

    def prior(self, space: str) -> Prior:
        """The world's latent or pixel-space prior, loaded once."""
        if space not in self._priors:
            prior = open_prior(self.world, part=SPACES[space])
            self._priors[space] = (
                QuickPrior(prior, self.surrogates.guide.network, self.world.size) if space == "pixel" else prior
            )
        return self._priors[space]

    def start(self, row: Row) -> AnySettings:
        """The settings that calibration starts from: the method's own defaults."""
        changes = {**MEMORY.get(row.method, {}), **self.changes.get(row.method, {})}
        return METHODS[row.method].defaults.changed(**{**changes, "k": K})

    def tried(self, row: Row, changes: Mapping[str, Any]) -> AnySettings:
        """A candidate of calibration; what was asked for on the command line stands above it."""
        return self.start(row).changed(**{**changes, **self.changes.get(row.method, {})})

    def targets(self, images: Tensor) -> list[int]:
        """The other class of each picture."""
        chosen: list[int] = runners_up(self.classifier.probabilities(images))[1].tolist()
        return chosen

    @property
    def trials(self) -> Path:
        """Where counterfactuals are kept that nobody needs on another machine."""
        return self.cache / self.world.name

    def place(self, row: Row, settings: AnySettings) -> Path:
        """The folder of a row's counterfactuals among others; another model or setting is another folder."""
        parts = [settings.digest, *self.models(row).values()]
        return Path(row.name) / hashlib.sha256("".join(parts).encode()).hexdigest()[:16]

    def models(self, row: Row) -> dict[str, str]:
        """What a record of this row was measured of.

        Surrogates are known by their recipes and not by their weights: those that the records were measured with are
        shipped beside them. Whoever distils others should keep other records.
        """
        recipes = [one.recipe.model_dump(mode="json") for one in (self.surrogates.guide, self.surrogates.evaluator)]
        return {
            "row": row.name,
            "prior": self.prior(row.space).content_hash,
            "classifier": self.classifier.content_hash,
            "oracle": self.oracle.content_hash,
            "surrogates": hashlib.sha256(json.dumps(recipes, sort_keys=True).encode()).hexdigest(),
            "perceptual": self.perceptual.content_hash if self.perceptual and has_perceptual_loss(row) else "False",
        }

    @cached_property
    def originals(self) -> Labelled:
        """The student's own training pictures."""
        recipe = RECIPES[self.world.name]["student"]
        learned = self.world.poisoned(recipe.images, recipe.seed, recipe.rho)
        return Labelled.of(learned.images, learned.labels)

    @cached_property
    def tested(self) -> Sample:
        """Unpoisoned pictures for the gain."""
        return self.world.sample(N_GAIN_TEST, GAIN_TEST_SEED)


def has_perceptual_loss(row: Row) -> bool:
    """Whether a perceptual distance changes what the row's method finds."""
    return "perceptual" in type(METHODS[row.method].defaults).model_fields


def hash_of_causes(data: Sample) -> str:
    """SHA-256 over what pictures of a world were rendered from.

    Processors round differently, so that a few grey levels of the same pictures are others on another machine. What was
    made of them is to be found there nevertheless.
    """
    return hashlib.sha256(data.factors.round(6).to_csv(index=False).encode()).hexdigest()


def run_of(case: Case, row: Row, data: Sample, sets: list[CounterfactualSet]) -> Run:
    """Counterfactual sets with what judges them."""
    return Run(
        Explainer(case.prior(row.space), case.classifier, case.surrogates, case.start(row), method=row.method),
        data,
        sets,
    )


def change(oracle: HuggingFaceClassifier, run: Run, k: int = 0) -> np.ndarray:
    """[N, D] how far each picture's counterfactual k moved in the oracle's features."""
    return moved_in_oracle(oracle, run.data.images, run.images(k))


def moved_in_oracle(oracle: HuggingFaceClassifier, before: Tensor, after: Tensor) -> np.ndarray:
    """[N, D] how far pictures moved in the oracle's features."""
    return (features(oracle, after) - features(oracle, before)).numpy()


def open_case(
    world: World,
    cache: Path,
    surrogates: Path,
    *,
    batch: int = BATCH,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    lpips: Path | None = None,
    repair_steps: int | None = None,
) -> Case:
    """The student of a world with its surrogates, from their folder or distilled now."""
    classifier = open_classifier(world, "student")
    data = world.sample(DISTIL_IMAGES, DISTIL_SEED)
    with distilling() as report:
        pair = distil_pair(classifier, data.images, surrogates, images_hash=hash_of_causes(data), progress=report)
    repair = FinetuneSettings() if repair_steps is None else FinetuneSettings(steps=repair_steps)
    perceptual = LPIPS.load(lpips) if lpips else None
    oracle = open_classifier(world, "oracle")
    return Case(world, classifier, pair, oracle, cache, batch, changes or {}, perceptual, repair)


def once(file: Path, work: Callable[[], Any]) -> Any:
    """What a JSON file holds; where there is none, the work is done and written to it."""
    if not file.is_file():
        write_text(file, json.dumps(work(), allow_nan=False))
    return json.loads(file.read_text(encoding="utf-8"))
