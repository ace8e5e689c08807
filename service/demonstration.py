"""The demonstration: a classifier that cheats is found out, its honest twin passes, and the cheat is cured.

The same functions as `pfungst audit` and `pfungst cfkd --finetune`, on the embedded portraits, with three settings for
speed: one counterfactual per picture, quick surrogates (audit.quick_surrogates), and a shorter repair.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.writing import write_text
from service.progress import auditing, counting, distilling

if TYPE_CHECKING:
    from torch import Tensor

    from audit.classifier import HuggingFaceClassifier
    from audit.dataset import Dataset
    from audit.pages import Chapter
    from audit.policy import Policy
    from audit.report import Names
    from audit.teachers import Teacher
    from engine.prior import Prior
    from engine.recipe import Recipe
    from worlds import World

WORLD = "portraits"
N_AUDITED, AUDITED_SEED = 300, 600_001
N_DISTIL, DISTIL_SEED = 2_000, 700_001
N_TEST, TEST_SEED, ORDINARY_SEED = 1_000, 900_001, 900_051
N_ORIGINALS = 3_000
MIN_IMAGES = 40
"""More than the policy's 20, so that there is something to learn from."""
BATCH = 10
REPAIR_STEPS = 200
SHOWN = 6

OPENING = (
    "Clever Hans, the horse, answered every question right and could not count: it read the questioner's face. Here a "
    "classifier has to tell dark hair from blond. In its lessons every blond was a woman and every dark-haired person "
    "a man. Does it look at the hair?"
)


@dataclass
class Stage:
    """What all audits of the demonstration share."""

    world: World
    prior: Prior
    recipe: Recipe
    dataset: Dataset
    teacher: Teacher
    names: Names
    pictures: Tensor
    """To distil surrogates on."""
    policy: Policy
    cache: Path

    @classmethod
    def open(cls, cache: Path) -> Stage:
        """The embedded portraits, their prior and their oracle."""
        from audit.policy import Policy
        from worlds import WORLDS
        from worlds.audited import audited
        from worlds.store import open_audit_recipe, open_prior

        world = WORLDS[WORLD]
        prior = open_prior(world)
        dataset, teacher, names = audited(world, prior, N_AUDITED, AUDITED_SEED)
        return cls(
            world=world,
            prior=prior,
            recipe=open_audit_recipe(world).changed(k=1),
            dataset=dataset,
            teacher=teacher,
            names=names,
            pictures=world.sample(N_DISTIL, DISTIL_SEED).images,
            policy=Policy(min_images=MIN_IMAGES),
            cache=cache,
        )

    def audit(self, classifier: HuggingFaceClassifier, out: Path) -> dict[str, Any]:
        """Audits a classifier, writes its report into `out` and returns what report.json holds."""
        from audit.explain import Explainer, distil_pair
        from audit.quick_surrogates import QUICK_EVALUATOR, QUICK_GUIDE
        from audit.report import build, write
        from audit.run import audit

        with distilling() as report:
            surrogates = distil_pair(
                classifier, self.pictures, self.cache, guide=QUICK_GUIDE, evaluator=QUICK_EVALUATOR, progress=report
            )
        explainer = Explainer(self.prior, classifier, surrogates, self.recipe)
        with auditing() as watch:
            found = audit(explainer, self.dataset, self.teacher, self.policy, out, batch=BATCH, progress=watch)
        record = build(found, explainer, self.dataset, self.teacher, self.policy, self.names)
        write(record, found)
        return record.content

    def repair(self, audited: Path, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """(cfkd.json, report.json of the audit after it) of the student that was audited into a folder."""
        from audit.cfkd import TestData, repair
        from audit.finetune import Labelled
        from audit.finetune_settings import FinetuneSettings
        from worlds.classifiers import RECIPES
        from worlds.store import WEIGHTS, open_classifier

        recipe, world = RECIPES[WORLD]["student"], self.world
        learned = world.poisoned(N_ORIGINALS, recipe.seed, recipe.rho)
        ordinary, test = world.poisoned(N_TEST, ORDINARY_SEED, recipe.rho), world.sample(N_TEST, TEST_SEED)
        after: list[dict[str, Any]] = []
        content = repair(
            open_classifier(world, "student"),
            WEIGHTS / world.name / "student",
            audited,
            Labelled.of(learned.images, learned.labels),
            Labelled.of(ordinary.images, ordinary.labels),
            TestData(Labelled.of(test.images, test.labels), test.confounders, world.confounders),
            out,
            settings=FinetuneSettings(steps=REPAIR_STEPS),
            audit_again=lambda classifier, folder: after.append(self.audit(classifier, folder)),
            watch=lambda title: counting(title, "step"),
        )
        return content, after[0]


@dataclass
class Clock:
    """How long each part took."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures what happens inside."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def main(out: Path) -> Path:
    """Runs all parts, says what came of each as soon as it is known, and returns the page that tells the story."""
    from audit.pages import Chapter, story
    from worlds.demo import main as show_worlds
    from worlds.store import open_classifier

    clock = Clock()
    out.mkdir(parents=True, exist_ok=True)
    with clock.part("worlds"):
        show_worlds(out / "worlds")
        stage = Stage.open(out / "cache")
    chapters = [
        Chapter(
            "Two worlds",
            "What the pictures look like, and what the small generators can draw.",
            link="worlds/index.html",
        )
    ]
    _say(1, "The worlds are drawn", clock.seconds["worlds"], [])

    with clock.part("student"):
        student = stage.audit(open_classifier(stage.world, "student"), out / "student")
    chapters.append(_chapter("The student, taught with a shortcut", student, "student"))
    _say(2, "The student, taught with a shortcut", clock.seconds["student"], _lines(student))

    with clock.part("twin"):
        twin = stage.audit(open_classifier(stage.world, "twin"), out / "twin")
    chapters.append(_chapter("Its twin, taught without one", twin, "twin"))
    _say(3, "Its twin, taught without one", clock.seconds["twin"], _lines(twin))

    with clock.part("repair"):
        repaired, after = stage.repair(out / "student", out / "repair")
    cure = _cure(repaired)
    chapters.append(
        Chapter(
            "The student, shown its own mistakes", "The pictures that fooled it, with their real class.", facts=cure
        )
    )
    chapters.append(_chapter("The student, audited again", after, "repair/rounds/1/audit"))
    _say(4, "The student, shown its own mistakes and audited again", clock.seconds["repair"], [*cure, *_lines(after)])

    total = sum(clock.seconds.values())
    print(f"{total // 60:.0f} minutes {total % 60:.0f} seconds in all.")
    page = out / "report.html"
    write_text(page, story("Pfungst and the clever student", OPENING, chapters))
    return page


def _chapter(title: str, report: dict[str, Any], folder: str) -> Chapter:
    """An audit as a chapter, with the first counterfactuals that show why."""
    from audit.pages import Chapter

    wanted = "false" if report["verdict"] == "FAIL" else "true"
    firsts = [(image["original"], image["counterfactuals"][0]) for image in report["images"]]
    chosen = [(original, one["file"]) for original, one in firsts if one["judgement"] == wanted][:SHOWN]
    return Chapter(
        title,
        report["headline"],
        report["verdict"],
        tuple(report["reasons"]),
        f"{folder}/report.html",
        tuple((f"{folder}/{original}", f"{folder}/{changed}") for original, changed in chosen),
    )


def _lines(report: dict[str, Any]) -> list[str]:
    """An audit in two lines."""
    found = "nothing could be measured"
    if report["reliance"] is not None:
        found = (
            f"a spurious feature alone flips it in {_percent(report['reliance'])} of them (between "
            f"{_percent(report['lower'])} and {_percent(report['upper'])}; allowed are {_percent(report['limit'])})"
        )
    return [f"{report['verdict']} after {report['n_images']} pictures: {found}", report["headline"]]


def _cure(repaired: dict[str, Any]) -> tuple[str, ...]:
    """What the repair did, in sentences."""
    gained = repaired["gain"]
    return (
        f"Worst group: {_percent(repaired['worst_group_before'])} → {_percent(repaired['worst_group_after'])} right.",
        f"All groups: {_percent(repaired['aga_before'])} → {_percent(repaired['aga_after'])} right"
        + ("." if gained is None else f"; {_percent(gained)} of the error is gone."),
        f"Pictures like its lessons: {_percent(repaired['poisoned_before'])} → {_percent(repaired['poisoned_after'])}.",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _say(number: int, title: str, seconds: float, lines: list[str] | tuple[str, ...]) -> None:
    print(f"{number}. {title} ({seconds:.0f} s)", flush=True)
    for line in lines:
        print(f"   {line}", flush=True)
