"""What all methods are compared on, and their counterfactuals, each batch of which is made once.

Shapes: images [N, 3, H, W] in [0, 1].
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from audit.classifier import HuggingFaceClassifier
from audit.explain import Explainer, distil_pair, runners_up
from audit.finetune import Labelled
from audit.finetune_settings import FinetuneSettings
from audit.lpips import LPIPS
from benchmarks.quality import DISTIL_IMAGES, DISTIL_SEED, Run
from benchmarks.tables.network import QuickPrior
from benchmarks.tables.plan import MEMORY, SPACES, TOGETHER, K, Row
from engine.counterfactual import Cost, CounterfactualSet
from engine.guidance import Model
from engine.methods import METHODS, AnySettings
from engine.prior import Prior
from engine.surrogate import SurrogatePair
from engine.tries import query
from engine.writing import replacing, write_text
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

    def place(self, row: Row, settings: AnySettings, data: Sample, seeds: Sequence[int] | None = None) -> Path:
        """The folder of counterfactuals among others; another model, setting, picture or seed is another folder."""
        parts = [settings.digest, *self.models(row).values(), hash_of_causes(data)]
        parts += [] if seeds is None else [str(list(seeds))]
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

    def firsts(self, row: Row, settings: AnySettings) -> AnySettings:
        """Settings that make no more than the first counterfactuals which these would make."""
        return settings if row.method in TOGETHER else settings.changed(k=1)

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


def make_sets(
    case: Case,
    row: Row,
    settings: AnySettings,
    data: Sample,
    root: Path | None = None,
    seeds: Sequence[int] | None = None,
) -> list[CounterfactualSet]:
    """The counterfactuals of pictures by one method, each batch read from the disk or made and written there.

    They lie under `root`, without one under the case's trials. Without `seeds` a picture's is its place.
    """
    folder = (case.trials if root is None else root) / case.place(row, settings, data, seeds)
    seeds = range(len(data.images)) if seeds is None else seeds
    images, sets = data.images, list[CounterfactualSet]()
    targets = case.targets(images)
    title = f"{case.world.name} {row.name}"
    for start in tqdm(range(0, len(images), case.batch), desc=title, unit="batch", leave=False):
        rows = slice(start, start + case.batch)
        file = folder / f"{start:05d}.safetensors"
        if not file.is_file():
            made = METHODS[row.method](
                case.prior(row.space),
                case.classifier,
                case.surrogates.guide,
                images[rows],
                targets[rows],
                settings,
                list(seeds[rows]),
                perceptual=case.perceptual,
            )
            write_sets(made, file)
        sets += read_sets(file, case.classifier, images[rows], settings)
    return sets


def write_sets(sets: Sequence[CounterfactualSet], file: Path) -> None:
    """A batch of counterfactual sets as one safetensors file, written under a temporary name.

    Pictures have 8 bits, as any that a person is shown, and edits one bit a pixel.
    """
    edits = np.packbits(torch.stack([found.edit_masks for found in sets]).numpy(), axis=-1)
    images = torch.stack([found.images for found in sets]).mul(255).round().byte()
    rest = [
        {
            "target": found.target,
            "seed": found.seed,
            "factors": found.factors,
            "hashes": found.hashes,
            "costs": [dataclasses.asdict(cost) for cost in found.costs],
            "setup": dataclasses.asdict(found.setup),
        }
        for found in sets
    ]
    with replacing(file) as partial:
        save_file({"images": images, "edits": torch.from_numpy(edits)}, partial, {"sets": json.dumps(rest)})


def read_sets(file: Path, f: Model, x0: Tensor, settings: AnySettings) -> list[CounterfactualSet]:
    """The counterfactual sets of a file that `write_sets` wrote; f is asked of the pictures as they are stored.

    What flips only between two grey levels has not flipped.
    """
    with safe_open(file, "pt") as stored:
        rest = json.loads(stored.metadata()["sets"])
        rounded, bits = stored.get_tensor("images"), stored.get_tensor("edits")
    edits = torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1, count=x0.shape[-1])).bool()
    images = torch.where(edits, rounded.to(x0.dtype) / 255, x0[:, None])
    with torch.no_grad():
        source_logits = query(f, x0)
        logits = query(f, images.flatten(0, 1)).unflatten(0, images.shape[:2])
    return [
        CounterfactualSet(
            x0=x0[b],
            source=int(source_logits[b].argmax()),
            target=one["target"],
            images=images[b],
            soft_masks=edits[b].to(x0.dtype),
            edit_masks=edits[b],
            flipped=tuple((logits[b].argmax(1) == one["target"]).tolist()),
            logits=logits[b],
            source_logits=source_logits[b],
            seed=one["seed"],
            recipe=settings,
            factors=tuple(one["factors"]),
            hashes=one["hashes"],
            costs=tuple(Cost(**cost) for cost in one["costs"]),
            setup=Cost(**one["setup"]),
        )
        for b, one in enumerate(rest)
    ]


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
