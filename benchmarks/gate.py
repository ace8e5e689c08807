"""How often the gate is wrong: `python -m benchmarks.gate --world portraits --json FILE`.

Many small students of one world are trained afresh, each on data of its own in which label and confounder agree with
probability ρ, and each goes through the real gate: `audit.run.audit` with the world's prior and recipe, the world's
oracle as teacher, the built-in policy, one counterfactual per image (the first alone speaks for the verdict). What the
student really does is measured on unpoisoned pictures of its world that nothing else has seen:

    gap = average of the four label × confounder groups' accuracies − accuracy of the worst group

    honest   gap ≤ 5 points      a FAIL is a false alarm
    biased   gap ≥ 30 points     everything but a FAIL is a miss, INCONCLUSIVE included

Students between the two are audited and listed, but no verdict about them is wrong. An INCONCLUSIVE about an honest
student is no false alarm, but it is counted and printed: a gate that never decides would raise none either.

What a fixed-size test would have needed, chosen before any result was seen. The sequential test controls a wrong FAIL
with α/2 in each of the two directions, and a wrong PASS with α (audit.verdict). A fixed-size gate with the same errors
takes n images of each direction and tests exactly, by the binomial; n has to be named beforehand, so it is the smallest
for which a reliance of EFFECT = 0.15 beyond the limit, on either side, is found with probability 1 − α: 35 % must give
FAIL and 5 % must give PASS, at a limit of 20 %. 5 % is where an honest classifier may be expected, whose
counterfactuals go astray now and then, and 35 % lies as far on the other side. Whoever wants to find less needs more
images: the figures for 0.10, 0.20 and 0.30 stand beside it. `sequential_over_fixed` is the median over all students,
the undecided included, of images audited over 2·n.

Everything is kept under --out (default out/gate): students, surrogates, audits, and one line for each finished student.
A run that was killed goes on where it stopped, in the middle of an audit or of a training.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import ResNetConfig, ResNetForImageClassification

from audit.classifier import HuggingFaceClassifier, load_classifier
from audit.confidence import fixed_size
from audit.dataset import dataset_of_images
from audit.explain import Explainer, distil_pair
from audit.journal import Journal
from audit.metrics import group_accuracies
from audit.policy import Policy
from audit.quick_surrogates import QUICK_EVALUATOR, QUICK_GUIDE
from audit.run import audit
from audit.teachers import OracleTeacher
from audit.verdict import Outcome
from benchmarks.numbers import finite, write_numbers
from engine.prior import Prior
from engine.rate import Rate
from engine.recipe import Recipe
from engine.surrogate import SurrogateRecipe
from engine.writing import replacing, write_text
from service.progress import auditing, distilling
from worlds import WORLDS, World, drawing
from worlds.classifiers import BATCH, MEAN, STD, jitter, preprocessing
from worlds.store import open_audit_recipe, open_classifier, open_prior, write_classifier
from worlds.training import fit, generator
from worlds.world import Sample

RESULTS = Path(__file__).parent / "results"
HONEST, BIASED = 0.05, 0.30
EFFECT = 0.15
OTHER_EFFECTS = (0.10, 0.20, 0.30)
N_POOL, POOL_SEED = 8_000, 410_001
N_TEST, TEST_SEED = 4_000, 420_001
N_DISTIL, DISTIL_SEED = 2_000, 430_001
N_AUDITED, AUDITED_SEED = 600, 440_001
N_TAUGHT, TAUGHT_SEED = 500, 450_001
AUDIT_BATCH = 16
LEVELS = ((0.5, 12), (1.0, 12), (0.6, 6), (0.98, 6), (0.7, 3), (0.95, 3), (0.8, 2), (0.9, 2))
"""(ρ, how many students): most at the ends, where honest and biased ones are to be expected."""


# Students --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudentRecipe:
    """How every student of a world is trained, but for its ρ and its seed."""

    images: int
    steps: int
    jitter: bool
    widths: tuple[int, ...] = (16, 32, 48, 64)
    """Stages of one basic block each: a third of the work of the shipped students."""
    peak_rate: float = 3e-3


STUDENTS = {
    "portraits": StudentRecipe(images=3_000, steps=400, jitter=True),
    "histology": StudentRecipe(images=3_000, steps=300, jitter=False),
}
EVALUATORS = {"portraits": QUICK_EVALUATOR, "histology": QUICK_EVALUATOR.changed(steps=300)}
"""Textures take longer to follow than portraits: the policy asks for an agreement of 90 %."""


@dataclass(frozen=True)
class Student:
    """One student to be trained: its poison and its seed."""

    rho: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its folders."""
        return f"rho{round(100 * self.rho):03d}-{self.seed:04d}"


def students(levels: Sequence[tuple[float, int]] = LEVELS) -> list[Student]:
    """All students, the levels taken in turn, so that the first ones of a run that is cut short are a fair mixture."""
    left = dict(levels)
    found: list[Student] = []
    while any(left.values()):
        for rho in left:
            if left[rho]:
                left[rho] -= 1
                found.append(Student(rho, 1_000 + len(found)))
    return found


def draw(pool: Sample, student: Student, n: int) -> tuple[Tensor, Tensor]:
    """(images as bytes, labels) of n pool pictures, none twice; label and confounder agree with probability ρ."""
    rng = np.random.default_rng([student.seed, 2741])
    agree = (pool.labels == pool.confounders).numpy()
    n_agree = int(rng.binomial(n, student.rho))
    chosen = [rng.choice(np.flatnonzero(agree == same), count, replace=False) for same, count in _parts(n, n_agree)]
    rows = torch.from_numpy(rng.permutation(np.concatenate(chosen)))
    return pool.images[rows].mul(255).round().byte(), pool.labels[rows]


def _parts(n: int, n_agree: int) -> tuple[tuple[bool, int], ...]:
    return (True, n_agree), (False, n - n_agree)


def train(world: World, student: Student, recipe: StudentRecipe, pool: Sample, checkpoint: Path) -> nn.Module:
    """A small residual network, trained with cross-entropy on its own draw from the pool."""
    torch.manual_seed(student.seed)
    images, labels = draw(pool, student, recipe.images)
    model = ResNetForImageClassification(
        ResNetConfig(
            embedding_size=recipe.widths[0],
            hidden_sizes=list(recipe.widths),
            depths=[1] * len(recipe.widths),
            layer_type="basic",
            id2label=dict(enumerate(world.labels)),
            label2id={name: i for i, name in enumerate(world.labels)},
        )
    )

    def loss(network: nn.Module, step: int) -> Tensor:
        g = generator(student.seed, step)
        rows = torch.randint(len(images), (BATCH,), generator=g)
        x = images[rows].float() / 255
        if recipe.jitter:
            x = jitter(x, g)
        return F.cross_entropy(network(pixel_values=(x - MEAN) / STD).logits, labels[rows], label_smoothing=0.02)

    return fit(
        model,
        loss,
        cycles=(recipe.steps,),
        peak_rate=recipe.peak_rate,
        checkpoint=checkpoint,
        title=f"training {student.name}",
        weight_decay=1e-2,
    )


def drawn(world: World, n: int, seed: int, out: Path) -> Sample:
    """`world.sample` without its parts. The pictures are kept, for every process of a run needs them."""
    code = b"".join(
        Path(module.__file__ or "").read_bytes() for module in (drawing, sys.modules[type(world).__module__])
    )
    name = f"{seed}-{n}-{hashlib.sha256(code).hexdigest()[:16]}.safetensors"
    file = out / world.name / "pictures" / name
    if not file.is_file():
        with replacing(file) as partial:
            save_file({"images": world.sample(n, seed).images.contiguous()}, partial)
    return Sample(load_file(file)["images"], world.factors(n, seed), {})


# The gate --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """What all students of a world share."""

    world: World
    prior: Prior
    recipe: Recipe
    policy: Policy
    teacher: OracleTeacher
    pool: Sample
    test: Sample
    pictures: Tensor
    out: Path
    student: StudentRecipe
    guide: SurrogateRecipe = QUICK_GUIDE
    evaluator: SurrogateRecipe = QUICK_EVALUATOR

    @classmethod
    def open(cls, world: World, out: Path) -> "Bench":
        """The embedded prior, recipe and oracle of a world, and freshly drawn pictures."""
        oracle, taught = open_classifier(world, "oracle"), world.sample(N_TAUGHT, TAUGHT_SEED)
        return cls(
            world=world,
            prior=open_prior(world),
            recipe=open_audit_recipe(world).changed(k=1),
            policy=Policy(),
            teacher=OracleTeacher.tested(
                oracle.probabilities, taught.images, taught.labels, content_hash=oracle.content_hash
            ),
            pool=drawn(world, N_POOL, POOL_SEED, out),
            test=drawn(world, N_TEST, TEST_SEED, out),
            pictures=drawn(world, N_DISTIL, DISTIL_SEED, out).images,
            out=out / world.name,
            student=STUDENTS[world.name],
            evaluator=EVALUATORS[world.name],
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What a finished line depends on, besides its student."""
        content = json.dumps([asdict(self.student), self.guide.model_dump(), self.evaluator.model_dump()])
        return {
            "world": self.world.name,
            "prior": self.prior.content_hash,
            "recipe": self.recipe.digest,
            "policy": self.policy.digest,
            "teacher_hash": self.teacher.content_hash,
            "networks": hashlib.sha256(content.encode()).hexdigest(),
            "pictures": [len(self.pool.images), len(self.test.images), len(self.pictures), N_AUDITED],
        }

    def classifier(self, student: Student) -> HuggingFaceClassifier:
        """The trained student, from its folder if it is there."""
        folder = self.out / "students" / student.name
        if not folder.is_dir():
            checkpoint = self.out / "checkpoints" / f"{student.name}.safetensors"
            model = train(self.world, student, self.student, self.pool, checkpoint)
            prepared = preprocessing(self.world)
            write_classifier(self.world, f"students/{student.name}", model, prepared, self.out.parent)
            checkpoint.unlink(missing_ok=True)
        return load_classifier(folder)

    def measure(self, student: Student) -> dict[str, Any]:
        """One student's truth, and what the gate says of it."""
        start = time.perf_counter()
        classifier = self.classifier(student)
        trained = time.perf_counter()
        predicted = classifier.probabilities(self.test.images).argmax(1)
        groups = group_accuracies(predicted, self.test.labels, self.test.confounders)
        tested = time.perf_counter()
        with distilling() as report:
            surrogates = distil_pair(
                classifier,
                self.pictures,
                self.out / "surrogates",
                guide=self.guide,
                evaluator=self.evaluator,
                progress=report,
            )
        distilled = time.perf_counter()
        data = self.world.sample(N_AUDITED, AUDITED_SEED + student.seed)
        dataset = dataset_of_images(data.images, [self.world.labels[label] for label in data.labels.tolist()])
        with auditing() as watch:
            found = audit(
                Explainer(self.prior, classifier, surrogates, self.recipe),
                dataset,
                self.teacher,
                self.policy,
                self.out / "audits" / student.name,
                seed=student.seed,
                batch=AUDIT_BATCH,
                progress=watch,
            )
        verdict = found.verdict
        return {
            "name": student.name,
            "rho": student.rho,
            "seed": student.seed,
            "aga": groups.aga.value,
            "worst_group": groups.worst.value,
            "gap": groups.aga.value - groups.worst.value,
            "verdict": str(verdict.outcome),
            "reliance": verdict.reliance,
            "lower": verdict.lower,
            "upper": verdict.upper,
            "direction": verdict.worst_direction,
            "n_images": verdict.n_images,
            "n_measured": verdict.n_measured,
            "flip_rate": verdict.flip_rate,
            "guide_agreement": surrogates.guide.agreement.rate.value,
            "evaluator_agreement": surrogates.evaluator.agreement.rate.value,
            "reasons": list(verdict.reasons),
            "seconds": {
                "train": trained - start,
                "test": tested - trained,
                "distil": distilled - tested,
                "audit": time.perf_counter() - distilled,
            },
        }


# What it adds up to ----------------------------------------------------------------------------------------------


def fixed_images(policy: Policy, directions: int = 2, effect: float = EFFECT) -> int:
    """Images that a fixed-size gate needs for all directions, with the errors of the sequential one."""
    above = fixed_size(policy.limit, policy.limit + effect, policy.alpha / directions, 1 - policy.alpha)
    below = fixed_size(policy.limit, max(0.0, policy.limit - effect), policy.alpha, 1 - policy.alpha)
    return directions * max(above, below)


def summarise(lines: Sequence[dict[str, Any]], policy: Policy) -> dict[str, Any]:
    """Error rates, images and the area under the ROC curve of the students measured so far."""
    honest = [line for line in lines if line["gap"] <= HONEST]
    biased = [line for line in lines if line["gap"] >= BIASED]
    alarms = Rate.of(sum(line["verdict"] == Outcome.FAIL for line in honest), len(honest))
    misses = Rate.of(sum(line["verdict"] != Outcome.FAIL for line in biased), len(biased))
    used = [line["n_images"] for line in lines]
    fixed = fixed_images(policy)
    return {
        "false_alarm_rate": alarms.value,
        "miss_rate": misses.value,
        "sequential_over_fixed": median(used) / fixed if used else math.nan,
        "students": len(lines),
        "false_alarms": asdict(alarms),
        "misses": asdict(misses),
        "honest_passed": asdict(Rate.of(sum(line["verdict"] == Outcome.PASS for line in honest), len(honest))),
        "biased_passed": asdict(Rate.of(sum(line["verdict"] == Outcome.PASS for line in biased), len(biased))),
        "inconclusive": asdict(Rate.of(sum(line["verdict"] == Outcome.INCONCLUSIVE for line in lines), len(lines))),
        "auc": area_under(*_scores(honest, biased)),
        "images_median": median(used) if used else math.nan,
        "fixed": {
            "effect": EFFECT,
            "images": fixed,
            "others": {
                f"{effect:.2f}": {
                    "images": fixed_images(policy, effect=effect),
                    "sequential_over_fixed": median(used) / fixed_images(policy, effect=effect) if used else math.nan,
                }
                for effect in OTHER_EFFECTS
            },
        },
        "seconds_per_student": {
            stage: median(line["seconds"][stage] for line in lines) for stage in ("train", "test", "distil", "audit")
        }
        if lines
        else {},
        "lines": list(lines),
    }


def _scores(honest: Sequence[dict[str, Any]], biased: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """The greatest mean reliance of each student; 0 where nothing could be measured, as nothing was found."""
    return [line["reliance"] or 0.0 for line in honest], [line["reliance"] or 0.0 for line in biased]


def roc(honest: Sequence[float], biased: Sequence[float]) -> list[tuple[float, float]]:
    """(share of the honest above, share of the biased above) for every limit, from the strictest score down."""
    points = [(0.0, 0.0)]
    for limit in sorted({*honest, *biased}, reverse=True):
        points.append((sum(s >= limit for s in honest) / len(honest), sum(s >= limit for s in biased) / len(biased)))
    return points


def area_under(honest: Sequence[float], biased: Sequence[float]) -> float:
    """Probability that a biased student scores above an honest one, ties counted half; NaN without both kinds."""
    if not honest or not biased:
        return math.nan
    wins = sum((b > h) + 0.5 * (b == h) for b in biased for h in honest)
    return wins / (len(honest) * len(biased))


COLOURS = {Outcome.PASS: "#1b6e3c", Outcome.FAIL: "#a3161b", Outcome.INCONCLUSIVE: "#8a5a00"}
PANEL, MARGIN = 300.0, 52.0


def plot(lines: Sequence[dict[str, Any]], policy: Policy, title: str) -> str:
    """An SVG of two panels: the ROC curve of the reliance, and each student's reliance beside its true gap."""
    honest = [line for line in lines if line["gap"] <= HONEST]
    biased = [line for line in lines if line["gap"] >= BIASED]
    width, height = 2 * PANEL + 3 * MARGIN, PANEL + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-size="12" '
        f'font-family="system-ui, sans-serif" fill="#1d2430"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{MARGIN}" y="24" font-weight="600">{title}</text>',
        _panel(MARGIN, "honest students above the limit", "biased students above the limit"),
        _panel(2 * MARGIN + PANEL, "true worst-group gap", "reliance that the gate measured"),
    ]
    if honest and biased:
        scores = _scores(honest, biased)
        curve = " ".join(f"{MARGIN + PANEL * x:.1f},{_y(y):.1f}" for x, y in roc(*scores))
        parts.append(f'<polyline points="{curve}" fill="none" stroke="#274d77" stroke-width="2"/>')
        said = [sum(line["verdict"] == Outcome.FAIL for line in kind) / len(kind) for kind in (honest, biased)]
        parts.append(
            f'<circle cx="{MARGIN + PANEL * said[0]:.1f}" cy="{_y(said[1]):.1f}" r="5" fill="#a3161b"/>'
            f'<text x="{MARGIN + PANEL - 8}" y="{_y(0.12):.1f}" text-anchor="end">area {area_under(*scores):.3f}, '
            f"{len(honest)} honest, {len(biased)} biased</text>"
            f'<text x="{MARGIN + PANEL - 8}" y="{_y(0.05):.1f}" text-anchor="end" fill="#a3161b">dot: verdicts</text>'
        )
    left = 2 * MARGIN + PANEL
    for x, y in (((HONEST, HONEST), (0, 1)), ((BIASED, BIASED), (0, 1)), ((0, 1), (policy.limit, policy.limit))):
        parts.append(
            f'<line x1="{left + PANEL * x[0]:.1f}" x2="{left + PANEL * x[1]:.1f}" y1="{_y(y[0]):.1f}" '
            f'y2="{_y(y[1]):.1f}" stroke="#8b93a0" stroke-dasharray="4 4"/>'
        )
    for line in lines:
        colour = COLOURS[Outcome(line["verdict"])]
        parts.append(
            f'<circle cx="{left + PANEL * line["gap"]:.1f}" cy="{_y(line["reliance"] or 0.0):.1f}" r="4" '
            f'fill="{colour}" fill-opacity=".7"><title>{line["name"]}: {line["verdict"]}</title></circle>'
        )
    for i, (outcome, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{left + PANEL - 8}" y="{_y(0.15 - 0.055 * i):.1f}" text-anchor="end" fill="{colour}">')
        parts.append(f"{outcome}</text>")
    return "".join(parts) + "</svg>\n"


def _y(share: float) -> float:
    return MARGIN + PANEL * (1 - share)


def _panel(left: float, below: str, beside: str) -> str:
    ticks = "".join(
        f'<text x="{left - 6}" y="{_y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        f'<text x="{left + PANEL * share:.1f}" y="{MARGIN + PANEL + 16}" text-anchor="middle">{share:.0%}</text>'
        for share in (0, 0.5, 1)
    )
    return (
        f'<rect x="{left}" y="{MARGIN}" width="{PANEL}" height="{PANEL}" fill="none" stroke="#dde1e7"/>{ticks}'
        f'<text x="{left + PANEL / 2}" y="{MARGIN + PANEL + 36}" text-anchor="middle">{below}</text>'
        f'<text x="{left - 34}" y="{MARGIN + PANEL / 2}" text-anchor="middle" '
        f'transform="rotate(-90 {left - 34} {MARGIN + PANEL / 2})">{beside}</text>'
    )


_here: Bench | None = None
"""The bench of a worker process."""


def _open_worker(world: str, out: Path, threads: int) -> None:
    global _here
    torch.set_num_threads(threads)
    _here = Bench.open(WORLDS[world], out)


def _measure_there(student: Student) -> dict[str, Any]:
    assert _here is not None
    return _here.measure(student)


def measured(bench: Bench, wanted: Sequence[Student], workers: int) -> Iterator[dict[str, Any]]:
    """The students' lines as they are finished: one after the other here, or in processes that share the threads."""
    if workers == 1:
        yield from map(bench.measure, wanted)
        return
    setting = (bench.world.name, bench.out.parent, max(1, torch.get_num_threads() // workers))
    spawn = multiprocessing.get_context("spawn")
    os.environ["TQDM_DISABLE"] = "1"  # of the processes to come: their bars would write over each other
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_open_worker, initargs=setting) as pool:
        try:
            for done in as_completed([pool.submit(_measure_there, student) for student in wanted]):
                yield done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def run(bench: Bench, wanted: Sequence[Student], workers: int = 1) -> list[dict[str, Any]]:
    """Measures the students that are not on record yet; returns the lines of all that were asked for, in order."""
    journal = Journal(bench.out / "students.jsonl", bench.identity)
    known = {line["name"] for line in journal.records}
    missing = [student for student in wanted if student.name not in known]
    lines = measured(bench, missing, workers)
    with tqdm(
        lines,
        desc=f"{bench.world.name}: students",
        unit="student",
        total=len(wanted),
        initial=len(wanted) - len(missing),
    ) as bar:
        for found in bar:
            line = finite(found)
            journal.append(line)
            bar.write(
                f"{line['name']}  gap {100 * line['gap']:5.1f}  {line['verdict']:12}  {line['n_images']:3} images  "
                f"{sum(line['seconds'].values()):4.0f} s"
            )
    order = {student.name: place for place, student in enumerate(wanted)}
    return sorted((line for line in journal.records if line["name"] in order), key=lambda line: order[line["name"]])


def main(argv: list[str] | None = None) -> int:
    """Trains and audits all students of a world and writes error rates, images used and the plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__.split("\n")[0])
    parser.add_argument("--world", choices=list(WORLDS), default="portraits")
    parser.add_argument("--students", type=int, metavar="N", help="the first N only (default: all)")
    parser.add_argument("--workers", type=int, default=1, metavar="W", help="processes that share the threads")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="where the ROC plot goes (default: benchmarks/results)")
    parser.add_argument("--out", type=Path, default=Path("out/gate"), help="students, surrogates and audits")
    arguments = parser.parse_args(argv)
    world = WORLDS[arguments.world]
    bench = Bench.open(world, arguments.out)
    lines = run(bench, students()[: arguments.students], max(1, arguments.workers))
    found = {
        "world": world.name,
        **summarise(lines, bench.policy),
        "settings": {
            **bench.identity,
            "student": asdict(bench.student),
            "levels": LEVELS,
            "guide": bench.guide.model_dump(mode="json"),
            "evaluator": bench.evaluator.model_dump(mode="json"),
            "threads": torch.get_num_threads(),
            "workers": arguments.workers,
        },
    }
    for key in ("students", "false_alarm_rate", "miss_rate", "sequential_over_fixed", "honest_passed", "biased_passed"):
        print(f"{key:24} {found[key]}")
    for key in ("inconclusive", "auc", "images_median", "seconds_per_student"):
        print(f"{key:24} {found[key]}")
    if arguments.json:
        write_numbers(arguments.json, found)
    picture = arguments.plot or RESULTS / f"gate-{world.name}.svg"
    write_text(picture, plot(lines, bench.policy, f"The gate on {len(lines)} students of {world.name}"))
    print(f"picture: {picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
