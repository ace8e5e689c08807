"""The numbers of Tables 1 and 2, each with its interval and its N."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from audit.classifier import HuggingFaceClassifier
from audit.finetune import Labelled, finetune, predict
from audit.metrics import (
    Mean,
    Rate,
    diversity,
    edited_area,
    flip_rate,
    frechet_distance,
    gain,
    group_accuracies,
    mean_of,
    mean_of_few,
    na,
    nafr,
    sparsity,
)
from audit.teachers import Judgement, OracleTeacher, Pairs
from benchmarks.quality import Run
from benchmarks.tables.case import TEST_SEED, Case, change, once, run_of
from benchmarks.tables.plan import K, Row
from engine.counterfactual import CounterfactualSet
from service.progress import counting
from worlds.measure import features
from worlds.world import Sample

NOISE = 0.05
"""Standard deviation of the noise whose sparsity is shown beside the methods'."""
FEWEST_REPAIRS, MOST_REPAIRS = 5, 20
EXACT = 0.005
"""Fine-tunings are repeated until their mean is as exact as this. Where each of them repairs everything, the fewest are
enough; elsewhere the gain differs by up to a third of itself from one seed to the next."""


@dataclass(frozen=True)
class Figure:
    """One number of a table with its interval, where it has one."""

    value: float
    lower: float = -math.inf
    upper: float = math.inf
    n: int = 0

    @classmethod
    def of(cls, found: Mean | Rate) -> "Figure":
        """A mean or a rate."""
        return cls(found.value, found.lower, found.upper, found.n)


Figures = dict[str, Figure]


def measured(case: Case, row: Row, data: Sample, sets: list[CounterfactualSet]) -> Figures:
    """Table 1's columns for one method but the gain, sparsity and diversity in the oracle's features only."""
    run = run_of(case, row, data, sets)
    flipped, confirmed, valid = run.flipped(0), run.confirmed(0), valid_flips(run)
    delta = np.stack([change(case.oracle, run, k) for k in range(K)], axis=1)
    first = valid[:, 0]
    figures = {
        "na": Figure.of(na(flipped, confirmed)),
        "nafr": Figure.of(nafr(flipped, confirmed)),
        "flip_rate": Figure.of(flip_rate(flipped)),
    }
    every = sparsity(delta[:, 0])
    figures["sparsity_oracle"] = Figure.of(mean_of(every))
    figures["sparsity_oracle_valid"] = Figure.of(mean_of(every[first]))
    figures["diversity_oracle"] = Figure.of(diversity(delta, valid).absolute)
    figures["area"] = Figure.of(mean_of(edited_area(run.edits(0)[:, 0])[first] if first.any() else []))
    real = features(case.oracle, case.world.sample(len(sets), TEST_SEED + 1).images)
    figures["realism"] = Figure(frechet_distance(real, features(case.oracle, run.images(0))), n=len(sets))
    return figures


def valid_flips(run: Run) -> np.ndarray:
    """[N, K] whether the student flips and the evaluator confirms it."""
    return np.stack([run.flipped(k) & run.confirmed(k) for k in range(K)], axis=1)


def on_same_pictures(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Figures:
    """Our sparsity and theirs on pictures that both flip validly; None stands for a picture that one does not.

    A method that flips only what a small edit flips has the sparsity of easy pictures; side by side it has not.
    """
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    columns = {"ours": [a for a, _ in both], "theirs": [b for _, b in both], "lead": [a - b for a, b in both]}
    figures = {name: Figure.of(mean_of(values)) for name, values in columns.items()}
    return {"pictures": Figure(float(len(both)), n=len(both)), **figures}


def turned(case: Case, data: Sample, factor: str) -> Tensor:
    """Pictures with one factor turned over in the world itself: a perfect edit."""
    return case.world.render(case.world.intervene(data.factors, flip=factor), data.images.shape[-1]).images


def noisy(data: Sample) -> Tensor:
    """Pictures with white noise: a change that means nothing, the same every time."""
    noise = torch.randn(data.images.shape, generator=torch.Generator().manual_seed(TEST_SEED))
    return (data.images + NOISE * noise).clamp(0, 1)


def round_trip(case: Case, data: Sample) -> Tensor:
    """D(E(x)): what the latent prior's autoencoder leaves of pictures, no edit at all."""
    prior = case.prior("latent")
    with torch.no_grad():
        return torch.cat([prior.decode(prior.encode(part)).clamp(0, 1) for part in data.images.split(case.batch)])


def gained(case: Case, run: Run, repairs: int) -> Figure:
    """The share of the student's group error that is gone after fine-tuning on this method's false counterfactuals.

    It is the mean of fine-tunings of different seeds, of as many `repairs` at the most, and the interval is theirs.
    Where no valid counterfactual is false there is nothing to learn from, the student stays as it is, and the gain is
    0.
    """
    if repairs < 1:
        return Figure(math.nan)
    chosen = [(int(b), int(k)) for b, k in np.argwhere(valid_flips(run))]
    false = []
    if chosen:
        pairs = Pairs(
            x=torch.stack([run.sets[b].x0 for b, _ in chosen]),
            x_cf=torch.stack([run.sets[b].images[k] for b, k in chosen]),
            edits=torch.stack([run.sets[b].edit_masks[k] for b, k in chosen]),
            names=tuple(f"{b}-{k}" for b, k in chosen),
            rows=tuple(b for b, _ in chosen),
            targets=tuple(run.sets[b].target for b, _ in chosen),
        )
        teacher = OracleTeacher.tested(case.oracle.probabilities, run.data.images, run.data.labels)
        false = [pair for pair, said in zip(chosen, teacher(pairs), strict=True) if said is Judgement.FALSE]
    if len({b for b, _ in false}) < 2:
        return Figure(0.0, n=0)
    lessons = Labelled.of(
        torch.stack([run.sets[b].images[k] for b, k in false]),
        run.data.labels[[b for b, _ in false]],
        [b for b, _ in false],
    )
    parts = [case.classifier.content_hash.encode(), str(asdict(case.repair)).encode()]
    parts += [lessons.images.numpy().tobytes(), lessons.labels.numpy().tobytes()]
    key = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    before = average_group_accuracy(case, case.classifier)

    def repaired(seed: int) -> float:
        with counting(f"{case.world.name}: repair {seed + 1} of {repairs}", "step") as progress:
            better = finetune(
                case.classifier, lessons, case.originals, case.repair, seed=seed, progress=progress
            ).classifier
        return gain(before, average_group_accuracy(case, better))

    kept = case.cache / case.world.name / "repairs"
    return Figure.of(repeated(lambda seed: once(kept / f"{key}-{seed}.json", lambda: repaired(seed)), repairs))


def repeated(work: Callable[[int], float], most: int) -> Mean:
    """The mean of what the seeds 0, 1, … give, of the fewest that make it exact and of `most` where none do."""
    values = list[float]()
    for seed in range(most):
        mean = mean_of_few(values)
        if seed >= FEWEST_REPAIRS and mean.upper - mean.value <= EXACT:
            break
        values.append(work(seed))
    return mean_of_few(values)


def average_group_accuracy(case: Case, classifier: HuggingFaceClassifier) -> float:
    """Average group accuracy on unpoisoned pictures."""
    test = case.tested
    found = predict(classifier, Labelled.of(test.images, test.labels)).argmax(1)
    return group_accuracies(found, test.labels, test.confounders).aga.value
