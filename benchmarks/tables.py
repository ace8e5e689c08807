"""The paper's tables on an embedded world, all methods in one run: `python -m benchmarks.tables --world portraits`.

Table 1 compares methods, Table 2 gradient sources of SCE-LITE-HQ, Table 3 cost. Every method is tuned with the same
budget: as many settings, the authors' own among them, on as many pictures, chosen by the same score. Counterfactuals
are judged by the student's evaluator, never by a guide, on the same pictures and seeds for all.

Every batch, trial, repair and timing is on the disk as soon as it is done; a run that was killed goes on from there.
A method that breaks is reported as broken. `NAME@latent` runs a method on the world's latent prior instead of its own
pixel-space diffusion.
"""

import argparse
import csv
import dataclasses
import hashlib
import io
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from audit.calibration import AREA_WEIGHT, LARGEST_AREA
from audit.classifier import HuggingFaceClassifier
from audit.explain import Explainer, distil_pair, runners_up
from audit.finetune import Labelled, finetune, predict
from audit.lpips import LPIPS
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
    na,
    nafr,
    sparsity,
)
from audit.pictures import save_png, sheet
from audit.teachers import Judgement, OracleTeacher, Pairs
from benchmarks.memory import MB, peak_rss, weight_bytes
from benchmarks.quality import DISTIL_IMAGES, DISTIL_SEED, RESULTS, TEST_SEED, Run
from engine.errors import Cancelled, InputError, PfungstError
from engine.loop import Cost, CounterfactualSet
from engine.methods import DEFAULT, METHODS, method_named
from engine.methods.search import Perceptual
from engine.prior import Prior
from engine.recipe import Recipe
from engine.settings import Settings
from engine.surrogate import SurrogatePair
from service.progress import counting, distilling
from worlds import WORLDS, World
from worlds.classifiers import RECIPES
from worlds.measure import features
from worlds.pixel import open_pixel
from worlds.store import open_classifier, open_prior, open_recipe
from worlds.world import Sample

K = 2
BATCH = 10
CALIBRATION_SEED = 810_001
GAIN_TEST_SEED = 820_001
N_GAIN_TEST = 2_000
TRIALS = 6
CALIBRATION_IMAGES = 12
GAIN_SEEDS = 3
TIMING_RUNS = 3
TIMING_BATCH = 4
GRID_COLUMNS = 12
LABEL_WIDTH = 110

IN_PIXELS = ("dime", "fastdime", "fastdime-2", "fastdime-2+", "ace", "sce")
"""Methods whose authors ran them on a diffusion over pixels."""
SOURCES: dict[str, str] = {
    "vanilla": "Vanilla gradient",
    "smoothgrad": "SmoothGrad",
    "smoothdiff": "SmoothDiff",
    "ig": "Integrated gradients (IG)",
    "smoothgrad_ig": "SmoothGrad × IG",
    "smoothdiff_ig": "SmoothDiff × IG",
    "path_gradient": "IG without its factor: path gradient",
    "surrogate": "Smoothed classifier",
}
MEMORY: dict[str, dict[str, Any]] = {"ace": {"micro_batch": 4}, "sce": {"micro_batch": 2}}
"""Back-propagation through whole chains holds all of their activations."""
SHORT: dict[str, dict[str, Any]] = {
    **{name: {"steps": 50} for name in ("dime", "fastdime", "fastdime-2", "fastdime-2+")},
    "ace": {"iterations": (25,)},
    "sce": {"steps": 40, "iterations": (25,)},
}
"""Schedules of --short: a quarter of DiME's steps, half of ACE's and SCE's iterations. The tables say so."""

STRONG, FIERCE = (20.0, 40.0, 80.0), (100.0, 300.0, 900.0)
"""Guidance beyond the authors': a rectified flow has far less posterior variance, by which it is multiplied."""
CANDIDATES: dict[str, tuple[dict[str, Any], ...]] = {
    DEFAULT: ({}, {"eta": 0.1}, {"eta": 0.2}, {"eta": 0.3}, {"tau": 0.15}, {"tau": 0.3}),
    "dime": (
        {},
        {"guidance": STRONG},
        {"guidance": FIERCE},
        {"guidance": STRONG, "strength": 0.5},
        {"guidance": FIERCE, "strength": 0.5},
        {"guidance": STRONG, "strength": 0.2},
    ),
    **dict.fromkeys(
        ("fastdime", "fastdime-2", "fastdime-2+"),
        (
            {},
            {"guidance": STRONG},
            {"guidance": FIERCE},
            {"guidance": STRONG, "strength": 0.5},
            {"guidance": FIERCE, "strength": 0.5},
            {"guidance": FIERCE, "strength": 0.5, "threshold": 0.3},
        ),
    ),
    "ace": (
        {},
        {"dilation": 5},
        {"dilation": 5, "threshold": 0.3},
        {"strength": 0.2},
        {"strength": 0.2, "dilation": 5},
        {"step_size": 2 / 255, "dilation": 5},
    ),
    "sce": (
        {},
        {"rate": 0.3},
        {"rate": 3.0},
        {"rate": 10.0},
        {"rate": 3.0, "threshold": 0.3},
        {"rate": 3.0, "strength": 0.15},
    ),
    "diffeocf": (
        {},
        {"rate": 0.02},
        {"rate": 0.05},
        {"confidence": 0.9},
        {"rate": 0.02, "confidence": 0.9},
        {"composite": "decoded"},
    ),
    "dive": (
        {},
        {"rate": 0.02},
        {"rate": 0.1},
        {"lasso": 1e-2},
        {"rate": 0.1, "lasso": 1e-2},
        {"diversity": 0.1},
    ),
}
"""The settings each method is tried with: its authors' (or the embedded recipe) first, then as many others for all."""

PAPER_ROW = {"portraits": "CelebA-Blond (Male)", "histology": "Camelyon17 (Hosp.)"}
PAPER1: dict[str, dict[str, dict[str, float]]] = {
    "portraits": {
        "ace": {"na": 0.388, "sparsity": 0.723, "nafr": 0.675, "diversity": 0.432, "gain": 0.134},
        "dime": {"na": 0.1948, "sparsity": 0.7006, "nafr": 0.1948, "diversity": 0.3848, "gain": 0.217},
        "fastdime": {"na": 0.6846, "sparsity": 0.7088, "nafr": 0.2, "diversity": 0.4256, "gain": 0.136},
        "sce": {"na": 0.9886, "sparsity": 0.718, "nafr": 0.865, "diversity": 0.456, "gain": 0.1501},
        DEFAULT: {"na": 1.0, "sparsity": 0.716, "nafr": 0.828, "diversity": 0.358, "gain": 0.216},
    },
    "histology": {
        "ace": {"na": 0.328, "sparsity": 0.409, "nafr": 0.19, "diversity": 0.057, "gain": 0.07},
        "dime": {"na": 0.478, "sparsity": 0.658, "nafr": 0.44, "diversity": 0.125, "gain": -0.038},
        "fastdime": {"na": 0.36, "sparsity": 0.48, "nafr": 0.27, "diversity": 0.035, "gain": 0.163},
        "sce": {"na": 0.953, "sparsity": 0.376, "nafr": 0.505, "diversity": 0.322, "gain": 0.222},
        DEFAULT: {"na": 0.758, "sparsity": 0.539, "nafr": 0.475, "diversity": 0.389, "gain": 0.479},
    },
}
PAPER2: dict[str, dict[str, float]] = {
    "vanilla": {"nafr": 0.28, "na": 0.444, "sparsity": 0.732, "diversity": 0.755},
    "smoothgrad": {"nafr": 0.56, "na": 0.8, "sparsity": 0.728, "diversity": 0.613},
    "smoothdiff": {"nafr": 0.35, "na": 0.522, "sparsity": 0.741, "diversity": 0.75},
    "ig": {"nafr": 0.36, "na": 0.554, "sparsity": 0.732, "diversity": 0.746},
    "smoothgrad_ig": {"nafr": 0.18, "na": 0.295, "sparsity": 0.708, "diversity": 0.673},
    "smoothdiff_ig": {"nafr": 0.23, "na": 0.343, "sparsity": 0.704, "diversity": 0.701},
    "surrogate": {"nafr": 0.72, "na": 0.867, "sparsity": 0.721, "diversity": 0.624},
}
PAPER3: dict[str, dict[str, float]] = {
    "ace": {"seconds_per_sample": 25.05, "peak_mb": 40961},
    "dime": {"seconds_per_sample": 27.04, "peak_mb": 965},
    "fastdime": {"seconds_per_sample": 1.76, "peak_mb": 964},
    "sce": {"seconds_per_sample": 32.40, "peak_mb": 52999},
    DEFAULT: {"seconds_per_sample": 0.66, "peak_mb": 11569},
}


@dataclass(frozen=True)
class Row:
    """One line of a table: a method on a prior."""

    method: str
    space: str  # "latent" or "pixel"

    @classmethod
    def of(cls, text: str) -> "Row":
        """`dime` is DiME where its authors ran it, `dime@latent` is DiME on the world's latent prior."""
        name, at, space = text.partition("@")
        own = "pixel" if method_named(name).name in IN_PIXELS else "latent"
        if at and space not in ("latent", "pixel"):
            raise InputError(f"{text!r:.80}: a method runs @latent or @pixel.")
        return cls(name, space if at else own)

    @property
    def name(self) -> str:
        """The key in JSON."""
        return self.method if Row.of(self.method) == self else f"{self.method}@{self.space}"

    @property
    def title(self) -> str:
        """In tables."""
        return METHODS[self.method].title + ("" if Row.of(self.method) == self else f" ({self.space})")


ROWS = (*METHODS, *(f"{name}@latent" for name in IN_PIXELS))


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
    perceptual: Perceptual | None = None
    _priors: dict[str, Prior] = field(default_factory=dict, compare=False)

    def prior(self, space: str) -> Prior:
        """The world's latent or pixel-space prior, loaded once."""
        if space not in self._priors:
            self._priors[space] = open_prior(self.world) if space == "latent" else open_pixel(self.world)
        return self._priors[space]

    def start(self, row: Row) -> Settings:
        """The settings that calibration starts from: the authors', or the embedded recipe of SCE-LITE-HQ."""
        own: Settings = open_recipe(self.world) if row.method == DEFAULT else METHODS[row.method].defaults
        changes = {**MEMORY.get(row.method, {}), **self.changes.get(row.method, {})}
        return own.changed(**{**changes, "k": K})

    def targets(self, images: Tensor) -> list[int]:
        """The other class of each picture."""
        chosen: list[int] = runners_up(self.classifier.probabilities(images))[1].tolist()
        return chosen

    def folder(self, row: Row, settings: Settings, images: Tensor) -> Path:
        """Where counterfactuals are kept; another model, setting or picture is another folder."""
        parts = [settings.digest, self.prior(row.space).content_hash, self.classifier.content_hash]
        parts += [self.surrogates.guide.weights_hash, str(self.perceptual is not None)]
        parts.append(hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest())
        return self.cache / self.world.name / row.name / hashlib.sha256("".join(parts).encode()).hexdigest()[:16]

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


# Counterfactuals -------------------------------------------------------------------------------------------------


def make_sets(case: Case, row: Row, settings: Settings, images: Tensor) -> list[CounterfactualSet]:
    """The counterfactuals of pictures by one method, each batch read from the disk or made and written there."""
    folder = case.folder(row, settings, images)
    sets: list[CounterfactualSet] = []
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
                list(range(len(images)))[rows],
                perceptual=case.perceptual,
            )
            write_sets(made, file)
        sets += read_sets(file, settings)
    return sets


def write_sets(sets: Sequence[CounterfactualSet], file: Path) -> None:
    """A batch of counterfactual sets as one safetensors file, written under a temporary name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.stack([getattr(found, name) for found in sets]).contiguous()
        for name in ("x0", "images", "soft_masks", "edit_masks", "logits", "source_logits")
    }
    rest = [
        {
            "source": found.source,
            "target": found.target,
            "flipped": found.flipped,
            "seed": found.seed,
            "factors": found.factors,
            "hashes": found.hashes,
            "costs": [dataclasses.asdict(cost) for cost in found.costs],
            "setup": dataclasses.asdict(found.setup),
        }
        for found in sets
    ]
    partial = file.with_name(file.name + ".partial")
    save_file(tensors, partial, {"sets": json.dumps(rest)})
    partial.replace(file)


def read_sets(file: Path, settings: Settings) -> list[CounterfactualSet]:
    """The counterfactual sets of a file that `write_sets` wrote."""
    with safe_open(file, "pt") as stored:
        rest = json.loads(stored.metadata()["sets"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is not a mapping
    return [
        CounterfactualSet(
            **{name: tensor[b] for name, tensor in tensors.items()},
            source=one["source"],
            target=one["target"],
            flipped=tuple(one["flipped"]),
            seed=one["seed"],
            recipe=settings,
            factors=tuple(one["factors"]),
            hashes=one["hashes"],
            costs=tuple(Cost(**cost) for cost in one["costs"]),
            setup=Cost(**one["setup"]),
        )
        for b, one in enumerate(rest)
    ]


# Calibration -----------------------------------------------------------------------------------------------------


def calibrate(case: Case, row: Row, trials: int, pictures: int) -> tuple[Settings, list[dict[str, Any]]]:
    """(the best of the method's first `trials` candidates, what each did) on as many pictures for every method.

    The score is that of `pfungst calibrate`: flips that the evaluator confirms, less what edits touch beyond a fifth of
    the picture. The earlier candidate wins where two are equal, the authors' own first of all.
    """
    start = case.start(row)
    if trials < 1:
        return start, []
    data = case.world.sample(pictures, CALIBRATION_SEED)
    done: list[dict[str, Any]] = []
    for changes in CANDIDATES[row.method][:trials]:
        settings = start.changed(**{**changes, "k": 1})
        run = Run(_explainer(case, row), data, make_sets(case, row, settings, data.images))
        confirmed = run.flipped(0) & run.confirmed(0)
        areas = edited_area(run.edits(0)[:, 0])
        area = float(np.median(areas[confirmed])) if confirmed.any() else 1.0
        nafr = float(confirmed.mean())
        done.append(
            {
                "changes": changes,
                "flip_rate": float(run.flipped(0).mean()),
                "nafr": nafr,
                "area_median": area,
                "score": nafr - AREA_WEIGHT * max(0.0, area - LARGEST_AREA),
            }
        )
    best = max(done, key=lambda trial: trial["score"])  # max() keeps the first of equals
    return start.changed(**best["changes"]), done


# Figures ---------------------------------------------------------------------------------------------------------


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


def measured(case: Case, row: Row, data: Sample, sets: list[CounterfactualSet], repairs: int) -> Figures:
    """Table 1's columns for one method; `repairs` is the number of fine-tunings that the gain is a mean of."""
    run = Run(_explainer(case, row), data, sets)
    flipped, confirmed = (np.stack([by(k) for k in range(K)], axis=1) for by in (run.flipped, run.confirmed))
    valid = flipped & confirmed
    encoded = torch.stack([features(case.oracle, x) for x in (data.images, run.images(0), run.images(1))])
    delta = (encoded[1:] - encoded[:1]).transpose(0, 1).numpy()
    first = valid[:, 0]
    figures = {
        "na": Figure.of(na(flipped[:, 0], confirmed[:, 0])),
        "nafr": Figure.of(nafr(flipped[:, 0], confirmed[:, 0])),
        "flip_rate": Figure.of(flip_rate(flipped[:, 0])),
    }
    figures["sparsity"] = Figure.of(mean_of(sparsity(delta[first, 0]) if first.any() else []))
    figures["diversity"] = Figure.of(diversity(delta, valid).absolute)
    figures["area"] = Figure.of(mean_of(edited_area(run.edits(0)[:, 0])[first] if first.any() else []))
    real = features(case.oracle, case.world.sample(len(sets), TEST_SEED + 1).images)
    figures["realism"] = Figure(frechet_distance(real, encoded[1]), n=len(sets))
    figures["gain"] = gained(case, run, valid, repairs)
    return figures


def gained(case: Case, run: Run, valid: np.ndarray, repairs: int) -> Figure:
    """The share of the student's group error that is gone after fine-tuning on this method's false counterfactuals.

    Where no valid counterfactual is false there is nothing to learn from, the student stays as it is, and the gain is
    0. The interval is that of the fine-tuning seeds.
    """
    if repairs < 1:
        return Figure(math.nan)
    chosen = [(int(b), int(k)) for b, k in np.argwhere(valid)]
    false = []
    if chosen:
        pairs = Pairs(
            x=torch.stack([run.sets[b].x0 for b, _ in chosen]),
            x_cf=torch.stack([run.sets[b].images[k] for b, k in chosen]),
            edits=torch.stack([run.sets[b].edit_masks[k] for b, k in chosen]),
            names=tuple(f"{b}-{k}" for b, k in chosen),
            rows=tuple(b for b, _ in chosen),
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
    parts = [case.classifier.content_hash.encode(), lessons.images.numpy().tobytes(), lessons.labels.numpy().tobytes()]
    key = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    before = _aga(case, case.classifier)
    values = []
    for seed in range(repairs):

        def repaired(seed: int = seed) -> float:
            with counting(f"{case.world.name}: repair {seed + 1} of {repairs}", "step") as progress:
                better = finetune(case.classifier, lessons, case.originals, seed=seed, progress=progress).classifier
            return gain(before, _aga(case, better))

        values.append(_once(case.cache / case.world.name / "repairs" / f"{key}-{seed}.json", repaired))
    return Figure.of(mean_of(values))


def _aga(case: Case, classifier: HuggingFaceClassifier) -> float:
    """Average group accuracy on unpoisoned pictures."""
    test = case.tested
    found = predict(classifier, Labelled.of(test.images, test.labels)).argmax(1)
    return group_accuracies(found, test.labels, test.confounders).aga.value


def _once(file: Path, work: Callable[[], Any]) -> Any:
    """What a JSON file holds; where there is none, the work is done and written to it."""
    if not file.is_file():
        result = work()
        _write(file, json.dumps(result))
    return json.loads(file.read_text(encoding="utf-8"))


def _explainer(case: Case, row: Row) -> Explainer:
    return Explainer(case.prior(row.space), case.classifier, case.surrogates, open_recipe(case.world))


# Cost ------------------------------------------------------------------------------------------------------------


def timed(case: Case, row: Row, settings: Settings, pictures: int) -> dict[str, float]:
    """What one process sees of a method: seconds and network calls per sample for one counterfactual, peak memory."""
    data = case.world.sample(pictures, TEST_SEED)
    prior, targets = case.prior(row.space), case.targets(data.images)
    with torch.no_grad():  # libraries set themselves up at the first call
        path = prior.path(2, 0.5, case.world.size, case.world.size)
        prior.predict(prior.encode(data.images[:1]), path.timesteps[0])
    start = time.perf_counter()
    found = METHODS[row.method](
        prior,
        case.classifier,
        case.surrogates.guide,
        data.images,
        targets,
        settings.changed(k=1),
        list(range(pictures)),
        perceptual=case.perceptual,
    )
    seconds = (time.perf_counter() - start) / pictures
    return {"seconds": seconds, "network_calls": sum(one.cost.network_calls for one in found) / pictures}


def child(arguments: argparse.Namespace) -> dict[str, float]:
    """The answer of a process that only loads (without --child-settings) or also makes counterfactuals."""
    case, row = open_case(arguments), Row.of(arguments.child)
    prior = case.prior(row.space)
    answer = {"seconds": 0.0, "network_calls": 0.0}
    if arguments.child_settings:
        settings = case.start(row).load(arguments.child_settings)
        answer = timed(case, row, settings, arguments.timing_batch)
    weights = weight_bytes(prior, case.classifier, case.surrogates.guide.network)
    return {**answer, "peak_rss": peak_rss(), "weights": weights}


def cost_of(case: Case, row: Row, settings: Settings, arguments: argparse.Namespace) -> Figures:
    """Table 3's columns for one method: medians over processes of their own.

    Peak memory is that of the process less that of one which only loads the same models, plus their weights.
    """
    key = hashlib.sha256(f"{settings.digest}{arguments.timing_batch}{case.prior(row.space).content_hash}".encode())
    folder = case.cache / case.world.name / "timings" / f"{row.name}-{key.hexdigest()[:16]}"
    stored = folder / "settings.json"
    folder.mkdir(parents=True, exist_ok=True)
    settings.save(stored)
    base = _once(folder / "load.json", lambda: _spawn(row, None, arguments))
    answers = [
        _once(folder / f"run-{number}.json", lambda: _spawn(row, stored, arguments))
        for number in tqdm(range(TIMING_RUNS), desc=f"{case.world.name} {row.name}: timing", unit="run", leave=False)
    ]
    seconds = [answer["seconds"] for answer in answers]
    peaks = [(answer["peak_rss"] - base["peak_rss"] + answer["weights"]) / MB for answer in answers]
    return {
        "seconds_per_sample": Figure(statistics.median(seconds), min(seconds), max(seconds), len(seconds)),
        "peak_mb": Figure(statistics.median(peaks), min(peaks), max(peaks), len(peaks)),
        "network_calls": Figure(statistics.median(a["network_calls"] for a in answers), n=len(answers)),
    }


def _spawn(row: Row, settings: Path | None, arguments: argparse.Namespace) -> Any:
    command = [sys.executable, "-m", "benchmarks.tables", "--world", arguments.world, "--child", row.name]
    command += ["--cache", str(arguments.cache), "--surrogates", str(arguments.surrogates)]
    command += ["--timing-batch", str(arguments.timing_batch)]
    command += ["--child-settings", str(settings)] if settings else []
    command += ["--lpips", str(arguments.lpips)] if arguments.lpips else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{row.name} failed in a process of its own: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])


# Tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column: its key, its heading, whether more is better, and how its numbers are printed."""

    key: str
    heading: str
    more: bool = True
    percent: bool = True
    digits: int = 1

    def text(self, value: float) -> str:
        """A value as it stands in the table."""
        return "–" if not math.isfinite(value) else f"{value * (100 if self.percent else 1):.{self.digits}f}"


COLUMNS1 = (
    Column("na", "NA"),
    Column("sparsity", "sparsity"),
    Column("nafr", "NAFR"),
    Column("diversity", "diversity"),
    Column("gain", "gain"),
    Column("flip_rate", "flip rate"),
    Column("area", "edited area", more=False),
    Column("realism", "Fréchet", more=False, percent=False, digits=2),
)
COLUMNS2 = tuple(c for key in ("nafr", "na", "sparsity", "diversity") for c in COLUMNS1 if c.key == key)
COLUMNS3 = (
    Column("seconds_per_sample", "seconds per sample", more=False, percent=False, digits=2),
    Column("peak_mb", "peak MB", more=False, percent=False, digits=0),
    Column("network_calls", "network calls", more=False, percent=False, digits=0),
)


@dataclass
class Table:
    """A table of the paper with our numbers: rows of figures by key, or why a row is broken."""

    title: str
    columns: tuple[Column, ...]
    paper: Mapping[str, Mapping[str, float]]
    rows: dict[str, Figures] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def places(self, column: Column) -> dict[str, int]:
        """1 for the best rows of a column and 2 for the second best, by the number as it is printed."""
        values = {
            row: round(figures[column.key].value, column.digits + (2 if column.percent else 0))
            for row, figures in self.rows.items()
            if column.key in figures and math.isfinite(figures[column.key].value)
        }
        ranked = sorted(set(values.values()), reverse=column.more)
        return {row: ranked.index(value) + 1 for row, value in values.items() if ranked.index(value) < 2}

    def markdown(self) -> str:
        """The table with intervals, the paper's number in brackets, the best bold and the second underlined."""
        head = ["", *(f"{c.heading} {'↑' if c.more else '↓'}" for c in self.columns)]
        lines = [f"## {self.title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        places = {column.key: self.places(column) for column in self.columns}
        for row, figures in self.rows.items():
            cells = [self.titles.get(row, row)]
            for column in self.columns:
                figure = figures.get(column.key, Figure(math.nan))
                text = column.text(figure.value)
                text = {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(places[column.key].get(row, 0), text)
                if math.isfinite(figure.value) and math.isfinite(figure.lower) and math.isfinite(figure.upper):
                    text += f" <sub>{column.text(figure.lower)}–{column.text(figure.upper)}</sub>"
                paper = self.paper.get(row, {}).get(column.key)
                cells.append(text + (f" ({column.text(paper)})" if paper is not None else ""))
            lines.append(f"| {' | '.join(cells)} |")
        for row, reason in self.broken.items():
            lines.append(f"| {self.titles.get(row, row)} | broken: {reason} |{' |' * (len(self.columns) - 1)}")
        return "\n".join(lines) + "\n"

    def records(self) -> list[dict[str, Any]]:
        """One record per number, for CSV."""
        return [
            {
                "table": self.title,
                "row": row,
                "metric": column.key,
                "value": _number(figures[column.key].value),
                "lower": _number(figures[column.key].lower),
                "upper": _number(figures[column.key].upper),
                "n": figures[column.key].n,
                "paper": self.paper.get(row, {}).get(column.key),
                "place": self.places(column).get(row),
            }
            for row, figures in self.rows.items()
            for column in self.columns
            if column.key in figures
        ]

    def as_dict(self) -> dict[str, Any]:
        """Row → metric → value, with the intervals beside them."""
        return {
            row: {
                **{key: _number(figure.value) for key, figure in figures.items()},
                "intervals": {key: [_number(f.lower), _number(f.upper)] for key, f in figures.items()},
            }
            for row, figures in self.rows.items()
        }


def _number(value: float) -> float | None:
    """JSON knows no NaN and no infinity."""
    return value if math.isfinite(value) else None


def grid(originals: Tensor, rows: Mapping[str, Tensor]) -> Image.Image:
    """Originals above one line of counterfactuals per method, each with its name."""
    lines = {"original": originals, **rows}
    pictures = sheet([x[:GRID_COLUMNS] for x in lines.values()])
    canvas = Image.new("RGB", (pictures.width + LABEL_WIDTH, pictures.height), "white")
    canvas.paste(pictures, (LABEL_WIDTH, 0))
    pen = ImageDraw.Draw(canvas)
    height = pictures.height / len(lines)
    for i, name in enumerate(lines):
        pen.text((4, int(height * i + height / 2) - 6), name, fill="black")
    return canvas


def open_case(arguments: argparse.Namespace) -> Case:
    """The student of a world with its surrogates, from the cache or distilled now."""
    world = WORLDS[arguments.world]
    classifier = open_classifier(world, "student")
    pictures = world.sample(DISTIL_IMAGES, DISTIL_SEED).images
    with distilling() as report:
        surrogates = distil_pair(classifier, pictures, arguments.surrogates, progress=report)
    return Case(
        world,
        classifier,
        surrogates,
        open_classifier(world, "oracle"),
        arguments.cache,
        arguments.batch,
        changes_of(arguments),
        LPIPS.load(arguments.lpips) if arguments.lpips else None,
    )


def changes_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings by method that were asked for with --short and --settings."""
    changes: dict[str, dict[str, Any]] = {name: dict(short) for name, short in SHORT.items()} if arguments.short else {}
    if arguments.settings:
        try:
            given = json.loads(arguments.settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"--settings {arguments.settings} cannot be read as JSON: {error}.") from None
        for name, more in given.items():
            changes[method_named(name).name] = {**changes.get(name, {}), **more}
    return changes


def fill(case: Case, arguments: argparse.Namespace) -> tuple[dict[int, Table], dict[str, Any], Image.Image | None]:
    """(the tables that were asked for, every row's settings and trials, the picture grid)."""
    world = case.world
    rows = [Row.of(text) for text in arguments.methods]
    titles = {row.name: row.title for row in rows}
    batch = arguments.timing_batch
    tables = {
        1: Table(
            f"Table 1: methods on {world.name}, N = {arguments.n} (in brackets: the paper, {PAPER_ROW[world.name]})",
            COLUMNS1,
            PAPER1[world.name],
            titles=titles,
        ),
        2: Table(
            f"Table 2: gradient sources of SCE-LITE-HQ on {world.name}, N = {arguments.n} (in brackets: the paper, "
            "CelebA-Blond)",
            COLUMNS2,
            PAPER2,
            titles=SOURCES,
        ),
        3: Table(
            f"Table 3: cost on {world.name}, one counterfactual each of a batch of {batch}, CPU, median of "
            f"{TIMING_RUNS} runs and their range (in brackets: the paper, one H100, batch not stated)",
            COLUMNS3,
            PAPER3,
            titles=titles,
        ),
    }
    tables = {number: table for number, table in tables.items() if number in arguments.tables}
    data = world.sample(arguments.n, TEST_SEED)
    tuned: dict[str, Any] = {}
    pictures: dict[str, Tensor] = {}
    bar = tqdm(rows, desc=f"{world.name}: methods", unit="method")
    for row in bar:
        bar.set_postfix_str(row.name)
        try:
            settings, trials = calibrate(case, row, arguments.trials, arguments.calibration_images)
            tuned[row.name] = {"settings": settings.model_dump(mode="json"), "trials": trials, "prior": row.space}
            if 1 in tables:
                sets = make_sets(case, row, settings, data.images)
                tables[1].rows[row.name] = measured(case, row, data, sets, arguments.repairs)
                pictures[row.name] = torch.stack([found.images[0] for found in sets[:GRID_COLUMNS]])
            if 2 in tables and row == Row.of(DEFAULT):
                _fill_sources(case, row, settings, data, tables[2])
            if 3 in tables:
                tables[3].rows[row.name] = cost_of(case, row, settings, arguments)
        except Cancelled:
            raise
        except PfungstError as error:
            for number in {1, 3} & tables.keys():
                tables[number].broken[row.name] = str(error)
    return tables, tuned, grid(data.images[:GRID_COLUMNS], pictures) if pictures else None


def _fill_sources(case: Case, row: Row, settings: Settings, data: Sample, table: Table) -> None:
    """Table 2: the tuned recipe of SCE-LITE-HQ with every gradient source."""
    assert isinstance(settings, Recipe)
    for source in SOURCES:
        try:
            sets = make_sets(case, row, settings.changed(gradient=source), data.images)
            found = measured(case, row, data, sets, repairs=0)
            table.rows[source] = {column.key: found[column.key] for column in COLUMNS2}
        except Cancelled:
            raise
        except PfungstError as error:
            table.broken[source] = str(error)


def notes(arguments: argparse.Namespace) -> list[str]:
    """What a reader has to know before the numbers are believed."""
    lines = [
        f"Calibration budget, the same for every method: {arguments.trials} settings on "
        f"{arguments.calibration_images} pictures that are not among the {arguments.n}, the authors' own first.",
        "SCE-LITE-HQ starts from its embedded recipe, which an earlier calibration chose from 12 (portraits) or 18 "
        "(histology) settings on 24 pictures: in all it has had more tuning than the others.",
        "Bold is best, underlined second best, by the printed number. Small figures are 95 % intervals; in Table 3 the "
        "range of the runs. Sparsity, diversity and Fréchet distance are in the last features of the world's oracle.",
        "DiME, FastDiME, ACE and SCE run on a pixel-space diffusion, the others on the latent prior; (latent) marks "
        "those that ran there instead.",
        f"Gain: mean of {arguments.repairs} fine-tunings on the method's own false counterfactuals, judged by the "
        "oracle; 0 where a method found none.",
        "The perceptual loss of DiME and FastDiME is LPIPS."
        if arguments.lpips
        else "DiME and FastDiME run without their perceptual loss, for which no network is embedded; see --lpips.",
        f"Measured on {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; no GPU.",
    ]
    if arguments.short:
        lines.append(f"Schedules are shorter than the authors': {json.dumps(SHORT)}.")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Fills the tables of one world and writes Markdown, CSV, a picture grid and, where asked, JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--world", choices=list(WORLDS), default="portraits")
    parser.add_argument("--n", type=int, default=100, help="pictures (default: 100)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--methods", nargs="+", default=list(ROWS), metavar="NAME", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--tables", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--trials", type=int, default=TRIALS, help="settings tried per method, 0 for the authors'")
    parser.add_argument("--calibration-images", type=int, default=CALIBRATION_IMAGES)
    parser.add_argument("--repairs", type=int, default=GAIN_SEEDS, help="fine-tunings that the gain is a mean of")
    parser.add_argument("--batch", type=int, default=BATCH, help="pictures at a time")
    parser.add_argument("--timing-batch", type=int, default=TIMING_BATCH, help="pictures of a timing run")
    parser.add_argument("--short", action="store_true", help="shorter schedules for the slow baselines")
    parser.add_argument("--settings", type=Path, help="JSON: method → settings that differ from the authors'")
    parser.add_argument("--lpips", type=Path, help="LPIPS weights for the perceptual loss of DiME and FastDiME")
    parser.add_argument("--cache", type=Path, default=Path("out/tables"), help="where finished parts are kept")
    parser.add_argument("--surrogates", type=Path, default=Path("out/cache"), help="where surrogates are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where Markdown, CSV and picture go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-settings", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(child(arguments)))
        return 0
    case = open_case(arguments)
    tables, tuned, picture = fill(case, arguments)
    write_results(case.world.name, tables, tuned, picture, arguments)
    return 0


def write_results(
    world: str,
    tables: Mapping[int, Table],
    tuned: Mapping[str, Any],
    picture: Image.Image | None,
    arguments: argparse.Namespace,
) -> None:
    """Markdown, CSV and picture into the results folder, JSON where it was asked for."""
    said = notes(arguments)
    text = "\n".join([f"# The paper's tables on {world}", "", *(f"* {line}" for line in said), ""])
    text += "\n" + "\n".join(table.markdown() for table in tables.values())
    print(text)
    stem = arguments.results / f"tables-{world}"
    _write(stem.with_suffix(".md"), text)
    records = [record for table in tables.values() for record in table.records()]
    stream = io.StringIO()
    writer = csv.DictWriter(
        stream, ["table", "row", "metric", "value", "lower", "upper", "n", "paper", "place"], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(records)
    _write(stem.with_suffix(".csv"), stream.getvalue())
    if picture is not None:
        save_png(picture, stem.with_suffix(".png"))
    if arguments.json:
        content: dict[str, Any] = {f"table{number}": table.as_dict() for number, table in tables.items()}
        content["broken"] = {row: why for table in tables.values() for row, why in table.broken.items()}
        content |= {"world": world, "n": arguments.n, "batch": arguments.timing_batch, "notes": said, "methods": tuned}
        _write(arguments.json, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


if __name__ == "__main__":
    raise SystemExit(main())
