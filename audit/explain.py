"""One image, K counterfactuals, and the files a person needs to judge them.

Shapes: an image is [3, H, W] in [0, 1]; K counterfactuals are [K, 3, H, W].
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audit.classifier import Classifier
from audit.dataset import Dataset
from audit.metrics import edited_area
from audit.pictures import heat_map, save_png, sheet, to_pil
from engine.counterfactual import CancelToken, CounterfactualSet, Progress
from engine.errors import RecipeError, TargetError
from engine.memory import Plan, plan_memory
from engine.methods import DEFAULT, AnySettings, Method, method_named
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.sampling import generate
from engine.surrogate import EVALUATOR, GUIDE, Surrogate, SurrogatePair, SurrogateRecipe
from engine.surrogate_cache import distil_cached

FORMAT = 1
FEW_PICTURES = 1_000


@dataclass(frozen=True)
class Explainer:
    """Everything that counterfactuals of one classifier need."""

    prior: Prior
    classifier: Classifier
    surrogates: SurrogatePair
    recipe: AnySettings
    """A Recipe, or the settings of another method."""
    max_memory: int | None = None
    """Bytes that a run may need at its peak; see engine.memory."""
    runtime: Callable[[Recipe, tuple[int, int], int], Runtime] | None = None
    """Gives the runtime for a recipe, an image size (H, W) and a largest batch, such as engine.runtime.choice's
    RuntimeChoice; without it the prior runs in eager torch."""
    method: str = DEFAULT

    def __post_init__(self) -> None:
        check_method(self.method, memory=self.max_memory)
        self.how.check(self.recipe)

    @property
    def how(self) -> Method:
        """The method that makes the counterfactuals."""
        return method_named(self.method)

    def plan(self, images: Tensor) -> Plan | None:
        """How images [N, 3, H, W] are worked on inside `max_memory`; None where no budget is stated."""
        if self.max_memory is None or not isinstance(self.recipe, Recipe):
            return None
        size = (images.shape[2], images.shape[3])
        guide = self.surrogates.guide
        return plan_memory(self.prior, self.recipe, size, len(images), self.max_memory, f=self.classifier, f_hat=guide)

    def __call__(
        self,
        images: Tensor,
        targets: list[int],
        seeds: list[int] | None = None,
        *,
        plan: Plan | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancel: CancelToken | None = None,
    ) -> list[CounterfactualSet]:
        """Counterfactual sets of images [N, 3, H, W]: one batch, or as many as the plan says (default: its own)."""
        plan = plan or self.plan(images)
        recipe, runtime = self.recipe, None
        size = len(images) if plan is None else plan.batch
        if isinstance(recipe, Recipe):
            recipe = recipe if plan is None else plan.apply(recipe)
            runtime = None if self.runtime is None else self.runtime(recipe, (images.shape[2], images.shape[3]), size)
        sets: list[CounterfactualSet] = []
        for rows in (slice(start, start + size) for start in range(0, len(images), size)):
            sets += self.how(
                self.prior,
                self.classifier,
                self.surrogates.guide,
                images[rows],
                targets[rows],
                recipe,
                None if seeds is None else seeds[rows],
                runtime=runtime,
                progress=progress,
                cancel=cancel,
            )
        return sets

    def evaluator_flipped(self, found: CounterfactualSet) -> list[bool]:
        """Whether the evaluator, which had no part in the search, also gives the target."""
        return (self.surrogates.evaluator.predict(found.images) == found.target).tolist()


def check_method(name: str, runtime: str = "torch", memory: object = None) -> None:
    """A RecipeError for an unknown method, or for one that cannot run on a runtime or inside a memory budget."""
    method = method_named(name)
    method.check_runtime(runtime)
    if memory is not None and not method.runs_graphs:
        raise RecipeError(f"A memory budget can be planned for the method {DEFAULT} alone, not for {name}.")


def distil_pair(
    classifier: Classifier,
    images: Tensor,
    cache: Path,
    *,
    images_hash: str | None = None,
    guide: SurrogateRecipe = GUIDE,
    evaluator: SurrogateRecipe = EVALUATOR,
    progress: Callable[[str, int, int], None] | None = None,
    cancel: CancelToken | None = None,
) -> SurrogatePair:
    """Guide and evaluator of a classifier, distilled on images by queries alone, or read from the cache.

    `images_hash` is as in engine.surrogate_cache.distil_cached.
    """

    def one(recipe: SurrogateRecipe) -> Surrogate:
        return distil_cached(
            classifier.probabilities,
            images,
            recipe,
            classifier_hash=classifier.content_hash,
            folder=cache,
            images_hash=images_hash,
            progress=None if progress is None else lambda done, steps: progress(recipe.role, done, steps),
            cancel=None if cancel is None else cancel.is_set,
        )

    return SurrogatePair(one(guide), one(evaluator))


def distillation_pictures(dataset: Dataset, prior: Prior, n: int, seed: int = 0) -> Tensor:
    """Up to n pictures of a data set in random order; where there are few, samples of the prior are added."""
    found = [x for _, x in islice(dataset.readable(dataset.order(seed)), n)]
    if len(found) < min(n, FEW_PICTURES):
        found += generate(prior, min(n, FEW_PICTURES) - len(found), dataset.size, seed)
    return torch.stack(found)


def runners_up(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """(predicted class, most probable class besides it) of each image, [N] and [N]."""
    predicted = probabilities.argmax(1)
    return predicted, probabilities.scatter(1, predicted[:, None], -1.0).argmax(1)


def choose_target(classifier: Classifier, image: Tensor, name: str | None) -> int:
    """The index of the named class, or the most probable class besides the predicted one."""
    predicted, other = (int(found) for found in runners_up(classifier.probabilities(image[None])))
    if name is None:
        return other
    if name not in classifier.labels:
        known = ", ".join(classifier.labels)
        raise TargetError(f"The target {name!r} is unknown; the classifier knows: {known}.")
    target = classifier.labels.index(name)
    if target == predicted:
        raise TargetError(f"The classifier says {name!r} already; choose another target.")
    return target


def summary(explainer: Explainer, found: CounterfactualSet, plan: Plan | None = None) -> dict[str, Any]:
    """One counterfactual set as JSON: what was asked, what came out, what it cost, and how to make it again."""
    labels = explainer.classifier.labels
    second = explainer.evaluator_flipped(found)
    areas = edited_area(found.edit_masks[:, 0])
    return {
        "format": FORMAT,
        "method": explainer.method,
        "source": labels[found.source],
        "target": labels[found.target],
        "source_probability": float(found.source_logits.softmax(0)[found.source]),
        "counterfactuals": [
            {
                "flipped": found.flipped[k],
                "evaluator_flipped": second[k],
                "target_probability": float(found.logits[k].softmax(0)[found.target]),
                "edited_area": float(areas[k]),
                "escalation": found.factors[k],
                "cost": asdict(found.costs[k]),
            }
            for k in range(len(found.images))
        ],
        "agreement": {
            role: asdict(surrogate.agreement)
            for role, surrogate in (
                ("guide", explainer.surrogates.guide),
                ("evaluator", explainer.surrogates.evaluator),
            )
        },
        "plan": None if plan is None else plan.as_dict(),
        "seed": found.seed,
        "recipe": found.recipe.model_dump(mode="json"),
        # The engine knows the guide as a function; the surrogate itself knows what it is.
        "hashes": {
            **found.hashes,
            "guide": explainer.surrogates.guide.weights_hash,
            "evaluator": explainer.surrogates.evaluator.weights_hash,
        },
    }


def write_explanation(explainer: Explainer, found: CounterfactualSet, out: Path, plan: Plan | None = None) -> Path:
    """Writes the pictures and explanation.json into `out` and returns the path of the overview picture.

    All files are made in a folder beside it first; explanation.json is moved last, so where it stands all stands.
    """
    out.mkdir(parents=True, exist_ok=True)
    zoom = max(1, 256 // found.x0.shape[2])
    with tempfile.TemporaryDirectory(dir=out, prefix=".partial-") as scratch:
        folder = Path(scratch)
        save_png(to_pil(found.x0), folder / "original.png")
        columns = [found.x0]
        for k, image in enumerate(found.images):
            save_png(to_pil(image), folder / f"counterfactual-{k + 1}.png")
            save_png(to_pil(found.soft_masks[k].expand(3, -1, -1)), folder / f"mask-{k + 1}.png")
            columns += [image, heat_map(found.x0[None], image[None])[0]]
        save_png(sheet([torch.stack(columns)], zoom), folder / "explanation.png")
        text = json.dumps(summary(explainer, found, plan), indent=2, allow_nan=False)
        (folder / "explanation.json").write_text(text + "\n", encoding="utf-8")
        for file in sorted(folder.iterdir(), key=lambda f: f.name == "explanation.json"):
            file.replace(out / file.name)
    return out / "explanation.png"
