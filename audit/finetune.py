"""Fine-tuning a classifier with counterfactuals: half of every batch are counterfactuals, half are originals.

The counterfactuals carry the class that the picture really has, so the feature that moved no longer tells the classes
apart; the originals keep what the classifier knew. A part of both is held out, and the weights that are best there are
kept, the untouched ones among them: by validation, fine-tuning never makes a classifier worse.

Shapes: images [N, 3, H, W], labels [N], logits [N, classes].
"""

import copy
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn import functional as F

from audit.classifier import HuggingFaceClassifier
from audit.finetune_settings import FinetuneSettings
from engine.errors import ClassifierError, InputError

__all__ = [
    "Finetuned",
    "Labelled",
    "Validation",
    "at_temperature",
    "expected_calibration_error",
    "finetune",
    "fit_temperature",
    "predict",
    "save_classifier",
    "validate",
]

BINS = 15
MAX_VALIDATED = 512
"""Held-out originals that are looked at: validation is done many times, and more would hardly be more exact."""
TEMPERATURES = (0.05, 20.0)
WARMUP = 0.1
FLOOR = 1e-30
"""Least probability that enters a logarithm."""


@dataclass(frozen=True)
class Labelled:
    """Pictures with the class that they really have, in memory as bytes."""

    images: Tensor
    """[N, 3, H, W] of uint8."""
    labels: Tensor
    """[N] class indices."""
    origins: Tensor
    """[N] which picture each was made from: what has one origin is held out together or not at all."""

    @classmethod
    def of(cls, images: Tensor, labels: Tensor, origins: Iterable[int] | None = None) -> "Labelled":
        """Of images in [0, 1]; without origins each picture is its own."""
        found = torch.arange(len(images)) if origins is None else torch.tensor(list(origins), dtype=torch.int64)
        if not len(images) == len(labels) == len(found):
            raise InputError(f"{len(images)} pictures do not go with {len(labels)} labels and {len(found)} origins.")
        return cls(images.mul(255).round().byte(), labels.long(), found)

    def __len__(self) -> int:
        return len(self.images)

    def floats(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Images in [0, 1] of some rows."""
        return self.images[rows].float() / 255

    def rows(self, rows: Tensor) -> "Labelled":
        """Some of them, by index or mask."""
        return Labelled(self.images[rows], self.labels[rows], self.origins[rows])

    def split(self, share: float, seed: int) -> tuple["Labelled", "Labelled"]:
        """(to learn from, held out).

        The seed and the origin alone decide where a picture goes, so that it stays there when others join; only where
        one side would be empty, the origin closest to it changes sides.
        """
        origins = np.unique(self.origins.numpy())
        if len(origins) < 2:
            raise InputError("Pictures of at least two originals are needed: one to learn from and one to hold out.")
        draws = np.array([np.random.SeedSequence([seed, int(o)]).generate_state(1)[0] / 2**32 for o in origins])
        ranked = np.sort(draws)
        limit = float(np.clip(share, np.nextafter(ranked[0], 1), ranked[-1]))
        held = torch.isin(self.origins, torch.from_numpy(origins[draws < limit]))
        return self.rows(~held), self.rows(held)


@dataclass(frozen=True)
class Validation:
    """How a classifier does on what was held out."""

    counterfactuals: float
    originals: float
    loss: float
    """Mean cross-entropy of the two halves."""

    @property
    def score(self) -> float:
        """Mean of both accuracies."""
        return (self.counterfactuals + self.originals) / 2

    def better_than(self, other: "Validation") -> bool:
        """By the score; where that is equal, as it often is on few pictures, by the loss."""
        return (self.score, -self.loss) > (other.score, -other.loss)


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned classifier, and how it did on what was held out."""

    classifier: HuggingFaceClassifier
    before: Validation
    after: Validation
    step: int
    """The step whose weights were kept; 0 where none was better than the untouched classifier."""


def finetune(
    classifier: HuggingFaceClassifier,
    counterfactuals: Labelled,
    originals: Labelled,
    settings: FinetuneSettings | None = None,
    *,
    seed: int = 0,
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Finetuned:
    """A copy of the classifier that learned from counterfactuals and originals; the one handed in is not touched.

    Counterfactuals are drawn evenly over their labels: where one direction has most of them, the other still counts.
    Statistics of batch normalisation stay as they are, since a batch half of counterfactuals is like no data that the
    classifier will see. `augment` changes images [B, 3, H, W] in [0, 1] before they are learned from (default: none).
    """
    settings = settings or FinetuneSettings()
    for data in (counterfactuals, originals):
        _check_labels(data, classifier.labels)
    learned_cf, held_cf = counterfactuals.split(settings.held_out, seed)
    learned, held = originals.split(settings.held_out, seed)
    student = copy.deepcopy(classifier)
    device = student.mean.device
    before = validate(student, held_cf, held)
    best, best_step = before, 0
    best_weights = copy.deepcopy(student.model.state_dict())
    student.model.requires_grad_(True)
    optimiser = torch.optim.AdamW(student.model.parameters(), lr=settings.rate, weight_decay=settings.weight_decay)
    half = settings.batch // 2
    weights = _even(learned_cf.labels)
    # Dropout draws from the global generator, which is given back as it was.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for step in range(settings.steps):
            g = torch.Generator().manual_seed(seed * 1_000_003 + step)
            rows_cf = torch.multinomial(weights, half, replacement=True, generator=g)
            rows = torch.randint(len(learned), (half,), generator=g)
            x = torch.cat([learned_cf.floats(rows_cf), learned.floats(rows)])
            y = torch.cat([learned_cf.labels[rows_cf], learned.labels[rows]])
            if augment is not None:
                x = augment(x, g)
            for group in optimiser.param_groups:
                group["lr"] = settings.rate * _schedule(step, settings.steps)
            _learning(student.model)
            loss = F.cross_entropy(student(x.to(device)), y.to(device))
            if not math.isfinite(float(loss.detach())):
                raise ClassifierError(f"Fine-tuning diverged in step {step + 1}; choose a smaller learning rate.")
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(student.model.parameters(), 1.0)
            optimiser.step()
            if (step + 1) % settings.every == 0 or step + 1 == settings.steps:
                now = validate(student, held_cf, held)
                if now.better_than(best):
                    best, best_step = now, step + 1
                    best_weights = copy.deepcopy(student.model.state_dict())
            if progress is not None:
                progress(step + 1, settings.steps)
    student.model.load_state_dict(best_weights)
    student.eval().requires_grad_(False)
    return Finetuned(student, before, best, best_step)


def validate(classifier: HuggingFaceClassifier, counterfactuals: Labelled, originals: Labelled) -> Validation:
    """Accuracies and loss of a classifier, in eval mode, on held-out counterfactuals and originals."""
    classifier.eval()
    originals = originals.rows(torch.arange(min(len(originals), MAX_VALIDATED)))
    halves = [(predict(classifier, data), data.labels) for data in (counterfactuals, originals)]
    rates = [float((p.argmax(1) == labels).double().mean()) for p, labels in halves]
    loss = sum(float(F.nll_loss(p.clamp_min(FLOOR).log(), labels)) for p, labels in halves) / 2
    return Validation(rates[0], rates[1], loss)


def predict(classifier: HuggingFaceClassifier, data: Labelled, batch: int = 256) -> Tensor:
    """Probabilities [N, classes] on the CPU, a batch at a time: only so many bytes become floats at once."""
    device = classifier.mean.device
    parts = [
        classifier.probabilities(data.floats(slice(start, start + batch)).to(device)).cpu()
        for start in range(0, len(data), batch)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, len(classifier.labels))


def save_classifier(classifier: HuggingFaceClassifier, source: Path, folder: Path) -> None:
    """Saves a classifier as a Hugging Face folder of safetensors with the preprocessing of the folder `source`."""
    preprocessing = (source / "preprocessor_config.json").read_bytes()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model: Any = classifier.model
    model.save_pretrained(partial)
    (partial / "preprocessor_config.json").write_bytes(preprocessing)
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)


# Calibration -----------------------------------------------------------------------------------------------------


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Σ over equal bins of confidence of (share of pictures) · |accuracy − mean confidence|."""
    if not len(labels):
        raise InputError("A calibration error needs at least one picture.")
    confidence, predicted = probabilities.double().max(1)
    right = (predicted == labels).double()
    which = (confidence * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, right - confidence)
    return float(gap.abs().sum() / len(labels))


def fit_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """The T at which softmax(logits / T) gives the labels the highest likelihood; below 1 it sharpens.

    As in Platt's method the labels count as right with probability (n + 1) / (n + 2): where all n pictures are
    classified correctly, every smaller T would be better, and n of them prove no greater confidence than that.
    """
    log_p = probabilities.double().clamp_min(FLOOR).log()
    doubt = 1 / (len(labels) + 2)

    def loss(log_temperature: float) -> float:
        log_q = (log_p / math.exp(log_temperature)).log_softmax(1)
        right = log_q.gather(1, labels[:, None])[:, 0]
        wrong = (log_q.sum(1) - right) / (log_q.shape[1] - 1)
        return -float(((1 - doubt) * right + doubt * wrong).mean())

    low, high = (math.log(t) for t in TEMPERATURES)
    return math.exp(float(minimize_scalar(loss, bounds=(low, high), method="bounded").x))


def at_temperature(probabilities: Tensor, temperature: float) -> Tensor:
    """softmax(logits / T), from probabilities alone: they are logits up to a constant per row."""
    return (probabilities.double().clamp_min(FLOOR).log() / temperature).softmax(1)


# Inside ----------------------------------------------------------------------------------------------------------


def _check_labels(data: Labelled, labels: tuple[str, ...]) -> None:
    if not len(data):
        raise InputError("There are no pictures to learn from.")
    if int(data.labels.min()) < 0 or int(data.labels.max()) >= len(labels):
        raise InputError(f"The classifier knows {len(labels)} classes; a label to learn from is none of them.")


def _even(labels: Tensor) -> Tensor:
    """Weights [N] under which every label that occurs is drawn equally often."""
    counts = torch.bincount(labels)
    return 1 / counts[labels].double()


def _schedule(step: int, steps: int) -> float:
    """A linear warm-up over the first tenth, then a cosine to zero."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _learning(model: nn.Module) -> None:
    """Train mode, but for batch normalisation."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
