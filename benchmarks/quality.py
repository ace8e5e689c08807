"""Quality of counterfactuals on the embedded worlds: `python -m benchmarks.quality --world portraits --n 100`.

Counterfactuals of the poisoned student and of its clean twin, K = 2 per image, judged by the classifier, by the
evaluator (never by the guide), and by the world's own truth. Writes JSON, a table and a picture grid.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from audit.classifier import HuggingFaceClassifier
from audit.explain import Explainer, distil_pair
from audit.metrics import (
    diversity,
    edited,
    edited_area,
    flip_rate,
    frechet_distance,
    hoyer_sparsity,
    mean_of,
    na,
    nafr,
    sparsity,
)
from audit.pictures import heat_map, save_png, sheet
from benchmarks.numbers import write_numbers
from engine.counterfactual import CounterfactualSet
from engine.prior import Prior
from engine.recipe import Recipe
from engine.sampling import reconstruct
from service.progress import distilling
from worlds import WORLDS, World
from worlds.measure import features, predictions
from worlds.store import open_classifier, open_prior, open_recipe
from worlds.truth import edit_shares
from worlds.world import Sample

RESULTS = Path(__file__).parent / "results"
DISTIL_SEED = 700_001
TEST_SEED = {"portraits": 830_001, "histology": 860_001}
"""Of the pictures; no setting was chosen on them."""
DISTIL_IMAGES = 2_000
BATCH = 20
GRID_COLUMNS = 12
PAPER = {
    "portraits": {"row": "CelebA-Blond (Male)", "na": 1.0, "sparsity": 0.716, "nafr": 0.828, "diversity": 0.358},
    "histology": {"row": "Camelyon17 (Hosp.)", "na": 0.758, "sparsity": 0.539, "nafr": 0.475, "diversity": 0.389},
}


@dataclass(frozen=True)
class Run:
    """All counterfactuals of one classifier on the test pictures."""

    explainer: Explainer
    data: Sample
    sets: list[CounterfactualSet]

    def images(self, k: int) -> Tensor:
        """The k-th counterfactual of every picture, [N, 3, H, W]."""
        return torch.stack([found.images[k] for found in self.sets])

    def edits(self, k: int) -> Tensor:
        """Where it may differ from its original, [N, 1, H, W] of bool."""
        return torch.stack([found.edit_masks[k] for found in self.sets])

    def flipped(self, k: int) -> np.ndarray:
        """Whether the classifier gives the target."""
        return np.array([found.flipped[k] for found in self.sets])

    def confirmed(self, k: int) -> np.ndarray:
        """Whether the evaluator gives the target."""
        return np.array([self.explainer.evaluator_flipped(found)[k] for found in self.sets])


def make(world: World, role: str, n: int, cache: Path, recipe: Recipe) -> Run:
    """Distils the surrogates of one classifier and makes its counterfactuals."""
    prior, classifier = open_prior(world), open_classifier(world, role)
    pictures = world.sample(DISTIL_IMAGES, DISTIL_SEED).images
    with distilling() as report:
        surrogates = distil_pair(classifier, pictures, cache, progress=report)
    explainer = Explainer(prior, classifier, surrogates, recipe)
    data = world.sample(n, TEST_SEED[world.name])
    targets = (1 - classifier.probabilities(data.images).argmax(1)).tolist()
    sets: list[CounterfactualSet] = []
    for start in tqdm(range(0, n, BATCH), desc=f"{world.name} {role}: counterfactuals", unit="batch"):
        rows = slice(start, start + BATCH)
        seeds = list(range(n))[rows]
        sets += explainer(data.images[rows], targets[rows], seeds)
    return Run(explainer, data, sets)


SHARES = ("share_label_region", "share_confounder_region", "share_elsewhere", "oracle_follows")


def shares(world: World, run: Run, oracle: HuggingFaceClassifier) -> dict[str, float | list[float]]:
    """Where the edits of valid first counterfactuals lie, against ground truth, and how many of them change the label
    in the oracle's eyes too."""
    valid = torch.tensor(run.flipped(0) & run.confirmed(0))
    if not valid.any():
        return dict.fromkeys(SHARES, float("nan"))
    factors = run.data.factors[valid.numpy()]
    found = edit_shares(world, factors, run.data.images[valid], run.images(0)[valid], run.edits(0)[valid])
    targets = torch.tensor([counterfactual.target for counterfactual in run.sets])
    was, now = predictions(oracle, run.data.images), predictions(oracle, run.images(0))
    follows = ((now == targets) & (now != was))[valid].float()
    parts = zip(SHARES, (found.label, found.confounder, found.elsewhere, follows), strict=True)
    means = {name: mean_of(part.double().numpy()) for name, part in parts}
    return {name: mean.value for name, mean in means.items()} | {
        f"{name}_interval": [mean.lower, mean.upper] for name, mean in means.items()
    }


def judge(world: World, run: Run, oracle: HuggingFaceClassifier, prior: Prior) -> dict[str, object]:
    """The figures of one run."""
    x, first, second = run.data.images, run.images(0), run.images(1)
    flips, confirmed = run.flipped(0), run.confirmed(0)
    valid = flips & confirmed
    areas = edited_area(run.edits(0)[:, 0])
    pairs = [(found, k) for found in run.sets for k in (0, 1)]
    outside = [torch.equal(f.images[k][:, ~f.edit_masks[k, 0]], f.x0[:, ~f.edit_masks[k, 0]]) for f, k in pairs]
    changed_first, changed_second = edited(x, first, 0.0), edited(x, second, 0.0)
    encoder = torch.stack([features(oracle, images) for images in (x, first, second)])
    delta = (encoder[1:] - encoder[:1]).transpose(0, 1)
    valid_both = np.stack([valid, run.flipped(1) & run.confirmed(1)], axis=1)
    variety = diversity(delta.numpy(), valid_both)
    real = features(oracle, world.sample(len(x), TEST_SEED[world.name] + 1).images)
    pair = run.explainer.surrogates
    cost = [found.cost for found in run.sets]
    rates = {"flip_rate": flip_rate(flips), "na": na(flips, confirmed), "nafr": nafr(flips, confirmed)}
    return {
        "n": len(x),
        **{name: rate.value for name, rate in rates.items()},
        **{f"{name}_interval": [rate.lower, rate.upper] for name, rate in rates.items()},
        "flip_rate_second": flip_rate(run.flipped(1)).value,
        "area_median": float(np.median(areas[valid])) if valid.any() else float("nan"),
        "outside_identical": all(outside),
        "second_disjoint": bool(~(changed_first & changed_second).any()),
        "evaluator_agreement": pair.evaluator.agreement.rate.value,
        "guide_agreement": pair.guide.agreement.rate.value,
        "sparsity": float(np.nanmean(sparsity(delta[valid, 0].numpy()))) if valid.any() else float("nan"),
        "hoyer": float(np.nanmean(hoyer_sparsity(delta[valid, 0].numpy()))) if valid.any() else float("nan"),
        "diversity": variety.absolute.value,
        "diversity_pairs": variety.pairs,
        "frechet_counterfactuals": frechet_distance(real, features(oracle, first)),
        "frechet_reconstructions": frechet_distance(real, features(oracle, reconstruct(prior, x))),
        "frechet_originals": frechet_distance(real, features(oracle, x)),
        "encoder": "last features of the world's oracle",
        "seconds_per_counterfactual": sum(c.seconds for c in cost) / (2 * len(cost)),
        "network_calls_per_counterfactual": sum(c.network_calls for c in cost) / (2 * len(cost)),
        "tries_per_counterfactual": sum(c.tries for c in cost) / (2 * len(cost)),
    }


def grid(run: Run) -> Tensor:
    """Rows for the picture: originals, first counterfactuals, their heat maps, second counterfactuals."""
    columns = slice(0, GRID_COLUMNS)
    x = run.data.images[columns]
    first, second = run.images(0)[columns], run.images(1)[columns]
    return torch.stack([x, first, heat_map(x, first), second])


def main(argv: list[str] | None = None) -> int:
    """Runs student and twin of one world, or of both, and writes what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--world", choices=list(WORLDS), default="portraits")
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--recipe", type=Path, help="another recipe than the embedded one")
    parser.add_argument("--cache", type=Path, default=Path("out/cache"), help="where surrogates are kept")
    parser.add_argument("--picture", type=Path, help="where the grid goes (default: benchmarks/results)")
    arguments = parser.parse_args(argv)
    world = WORLDS[arguments.world]
    recipe = (Recipe.load(arguments.recipe) if arguments.recipe else open_recipe(world)).changed(k=2)
    prior, oracle = open_prior(world), open_classifier(world, "oracle")
    student = make(world, "student", arguments.n, arguments.cache, recipe)
    twin = make(world, "twin", arguments.n, arguments.cache, recipe)
    found = judge(world, student, oracle, prior)
    found["student"] = shares(world, student, oracle)
    found["twin"] = {**shares(world, twin, oracle), "flip_rate": flip_rate(twin.flipped(0)).value}
    found["recipe"] = recipe.model_dump(mode="json")
    for key, value in found.items():
        paper = PAPER[world.name].get(key)
        print(f"{key:34} {value}" + (f"   (paper, {PAPER[world.name]['row']}: {paper})" if paper is not None else ""))
    if arguments.json:
        write_numbers(arguments.json, found)
    picture = arguments.picture or RESULTS / f"quality-{world.name}.png"
    save_png(sheet([*grid(student), *grid(twin)[1:]]), picture)
    print(f"picture: {picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
