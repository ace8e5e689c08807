"""Counterfactual knowledge distillation: from an audit's false counterfactuals to a repaired classifier.

A false counterfactual is a picture whose class the classifier changed while the real class stayed. With its real class
as the label it is the very picture that the classifier has to learn. `build_set` makes a data set of them, `repair`
fine-tunes with it, tests, audits again and repeats.

A debiasing set, written to a temporary folder and renamed when it is whole:

    set.json           format, counts and hashes
    manifest.parquet   one row a counterfactual: image, label, original, what was asked and what came out
    images/            the counterfactuals and their originals as PNG
    by_label/LABEL/    the same counterfactuals as an image folder
    README.md          the data card

What `repair` leaves in its folder:

    set/               the debiasing set of all rounds
    rounds/N/          classifier/ after round N, and audit/, the audit of it
    classifier/        the best round's classifier, by validation
    cfkd.json          numbers before and after; written last
"""

import hashlib
import json
import math
import os
import platform
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from audit.classifier import HuggingFaceClassifier
from audit.dataset import Dataset, read_parquet
from audit.finetune import (
    Finetuned,
    Labelled,
    Validation,
    at_temperature,
    expected_calibration_error,
    finetune,
    fit_temperature,
    predict,
    save_classifier,
    validate,
)
from audit.finetune_settings import FinetuneSettings
from audit.images import read_image
from audit.journal import Journal
from audit.metrics import GroupAccuracies, Rate, gain, group_accuracies
from audit.report import FORMAT as REPORT_FORMAT
from audit.run import AuditedImage, Counterfactual
from audit.teachers import Judgement
from audit.verdict import Outcome
from engine.errors import InputError
from engine.writing import write_text

SET_FORMAT = "pfungst-cfkd-set/1"
RESULT_FORMAT = "pfungst-cfkd/1"
PICTURE = re.compile(r"counterfactuals/[0-9A-Za-z_-]{1,100}\.png")
MAX_FOLDER_NAME = 120
MAX_ROUNDS = 20
PACKAGES = ("torch", "transformers", "numpy")

Watch = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Opens a progress bar with a title; the bar is told (done, total)."""


# An audit that has ended -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinishedAudit:
    """What an audit's folder says."""

    folder: Path
    outcome: Outcome
    images: tuple[AuditedImage, ...]
    report: dict[str, Any]

    @property
    def hashes(self) -> dict[str, Any]:
        """What was audited, with what."""
        hashes: dict[str, Any] = self.report["hashes"]
        return hashes

    @classmethod
    def read(cls, folder: Path) -> "FinishedAudit":
        """Reads report.json, and the journal that it must agree with."""
        journal, report = folder / "journal.jsonl", folder / "report.json"
        if not journal.is_file():
            raise InputError(f"{folder} is not the folder of an audit: it lacks journal.jsonl. Name an audit's --out.")
        unfinished = "Run the same `pfungst audit` again; it goes on where it stopped."
        if not report.is_file():
            raise InputError(f"The audit in {folder} is unfinished: it lacks report.json. {unfinished}")
        damaged = f"{report} is not the report of an audit that can be read here; run the audit again."
        try:
            content = json.loads(report.read_text(encoding="utf-8"))
            if content["format"] != REPORT_FORMAT:
                raise InputError(f"{report} has the format {content['format']!r:.80}; this reads {REPORT_FORMAT}.")
            images = tuple(AuditedImage.of(record) for record in content["images"])
            outcome, hashes = Outcome(content["verdict"]), dict(content["hashes"])
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(damaged) from None
        try:
            records = Journal(journal, hashes).records
        except InputError:
            raise InputError(f"{journal} and {report} are not of the same audit; run the audit again.") from None
        if records != content["images"]:
            raise InputError(f"The audit in {folder} went on after its report was written. {unfinished}")
        return cls(folder, outcome, images, content)

    def lessons(self, include_true: bool = False) -> Iterator["Lesson"]:
        """What can be learned from it, in the order of the audit."""
        for image in self.images:
            for one in image.counterfactuals:
                label = real_class(image, one, include_true)
                if label is not None:
                    yield Lesson(self, image, one, label)

    def picture(self, name: str) -> Path:
        """A picture of this audit; a report may come from strangers, so its paths are not trusted."""
        if not PICTURE.fullmatch(name):
            raise InputError(f"{self.folder / 'report.json'} names {name!r:.80}, which is no picture of this audit.")
        return self.folder / name


@dataclass(frozen=True)
class Lesson:
    """One counterfactual with the class that it really has."""

    audit: FinishedAudit
    image: AuditedImage
    counterfactual: Counterfactual
    label: str


def real_class(image: AuditedImage, one: Counterfactual, include_true: bool = False) -> str | None:
    """The class that a counterfactual is learned with; None where it is not learned from.

    A valid one that was judged false still has the class of its original: the data's label, or where the data has none,
    what the classifier said. A true one has the target's, if the classifier was right about the original.
    """
    if not one.valid:
        return None
    if one.judgement is Judgement.FALSE:
        return image.source if image.label is None else image.label
    if one.judgement is Judgement.TRUE and include_true and image.label in (None, image.source):
        return image.target
    return None


# The debiasing set -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DebiasingSet:
    """A debiasing set on the disk."""

    folder: Path
    table: pd.DataFrame
    digest: str
    """SHA-256 over every picture's hash and label."""

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def read(cls, folder: Path) -> "DebiasingSet":
        """Opens the set in a folder."""
        try:
            content = json.loads((folder / "set.json").read_text(encoding="utf-8"))
            if content["format"] != SET_FORMAT:
                raise InputError(f"{folder} holds the format {content['format']!r:.80}; this reads {SET_FORMAT}.")
            digest = str(content["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{folder} is not a debiasing set; make one with `pfungst cfkd`.") from None
        return cls(folder, read_parquet(folder / "manifest.parquet"), digest)

    def labelled(self, labels: tuple[str, ...]) -> Labelled:
        """The counterfactuals in memory, each with its label as an index into the classifier's labels."""
        unknown = sorted(set(self.table["label"]) - set(labels))
        if unknown:
            raise InputError(f"The classifier does not know {unknown[0]!r:.80}, a label of {self.folder}.")
        images = [read_image(self.folder / name) for name in self.table["image"]]
        if len({image.shape for image in images}) != 1:
            raise InputError(f"The pictures of {self.folder} differ in size; they have to come from one prior.")
        indices = torch.tensor([labels.index(label) for label in self.table["label"]])
        return Labelled.of(torch.stack(images), indices, self.table["row"].tolist())


def build_set(audits: Path | Sequence[Path], out: Path, *, include_true: bool = False) -> DebiasingSet:
    """The debiasing set of one audit, or of an audit and those of the classifiers repaired after it.

    All audits have to be of the same data; counterfactuals of the n-th later one are named roundN-*. True
    counterfactuals are left out unless `include_true` is set: they teach nothing that the classifier does not know.
    """
    folders = [audits] if isinstance(audits, Path) else list(audits)
    finished = [FinishedAudit.read(folder) for folder in folders]
    if len({audit.hashes["data"] for audit in finished}) != 1:
        raise InputError("A debiasing set is made of audits of the same data; these are of different data sets.")
    lessons = [(n, lesson) for n, audit in enumerate(finished) for lesson in audit.lessons(include_true)]
    if not lessons:
        raise InputError(
            f"The audit in {folders[0]} has no valid counterfactual that was judged false: there is nothing to learn."
        )
    if out.exists() and not (out / "set.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not a debiasing set; name another folder.")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "images").mkdir(parents=True)
    table = pd.DataFrame([_store(n, lesson, partial) for n, lesson in lessons])
    digest = hashlib.sha256(json.dumps(table[["image", "label", "sha256"]].to_numpy().tolist()).encode()).hexdigest()
    table.to_parquet(partial / "manifest.parquet", engine="pyarrow", index=False)
    content = {
        "format": SET_FORMAT,
        "counterfactuals": len(table),
        "originals": int(table["original"].nunique()),
        "labels": _counts(table["label"]),
        "directions": _counts(table["direction"]),
        "judgements": _counts(table["judgement"]),
        "digest": digest,
        "audits": [
            {"verdict": audit.outcome, "teacher": audit.hashes.get("teacher", "unknown"), "hashes": audit.hashes}
            for audit in finished
        ],
        "versions": {"pfungst": version("pfungst")},
    }
    (partial / "README.md").write_text(_card(content), encoding="utf-8")
    (partial / "set.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    partial.replace(out)
    return DebiasingSet(out, table, digest)


def _store(n: int, lesson: Lesson, folder: Path) -> dict[str, Any]:
    """Copies a counterfactual and its original into a set, and returns its row of the manifest."""
    audit, image, one = lesson.audit, lesson.image, lesson.counterfactual
    prefix = f"round{n}-" if n else ""
    picture, original = (f"images/{prefix}{Path(name).name}" for name in (one.file, image.original))
    for source, target in ((one.file, picture), (image.original, original)):
        if not (folder / target).exists():
            read_image(audit.picture(source))  # whatever is not a whole picture is said now, not while learning
            shutil.copyfile(audit.picture(source), folder / target)
    by_label = folder / "by_label" / folder_name(lesson.label) / Path(picture).name
    by_label.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(folder / picture, by_label)
    except OSError:  # a file system without hard links
        shutil.copyfile(folder / picture, by_label)
    return {
        "image": picture,
        "label": lesson.label,
        "original": original,
        "counterfactual": f"{prefix}{one.name}",
        "direction": image.direction,
        "source": image.source,
        "target": image.target,
        "judgement": str(one.judgement),
        "target_probability": one.target_probability,
        "edited_area": one.area,
        "audit": n,
        "row": image.row,
        "name": image.name,
        # The groups are those of the original: in a counterfactual they may be what moved.
        **{f"original_{group}": value for group, value in image.groups.items()},
        "sha256": _digest(folder / picture),
    }


def folder_name(label: str) -> str:
    """A label as the name of one folder: no separators, no hidden folders, no names too long to be made."""
    name = quote(label, safe=" ").replace("%", "=")
    name = re.sub(r"^\.", "=2E", name).strip()
    if 0 < len(name) <= MAX_FOLDER_NAME:
        return name
    return "label-" + hashlib.sha256(label.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _counts(column: pd.Series) -> dict[str, int]:
    return dict(sorted(Counter(map(str, column)).items()))


def _card(content: dict[str, Any]) -> str:
    """The data card."""

    def table(title: str, counts: dict[str, int]) -> list[str]:
        rows = [f"| {_cell(name)} | {n} |" for name, n in counts.items()]
        return [f"| {title} | counterfactuals |", "|---|---|", *rows, ""]

    lines = [
        "# Debiasing set",
        "",
        f"{content['counterfactuals']} counterfactual pictures made from {content['originals']} originals, to be "
        "learned beside ordinary training data, half and half. In each of them the audited classifier changed its "
        "decision although the real class did not; the label is the real class.",
        "",
        *table("label", content["labels"]),
        *table("direction of the classifier's decision", content["directions"]),
        *table("judgement", content["judgements"]),
        "## How it was made",
        "",
        "An audit asked for the smallest change of a picture that turns the classifier's decision. A counterfactual "
        "counts as valid if the classifier and an evaluator, which had no part in the search, both give the target "
        "class. A teacher judged every valid one: true if the real class changed, false if it did not.",
        "",
        "| audit | verdict | teacher | classifier | data | prior | seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for n, audit in enumerate(content["audits"]):
        short = [str(audit["hashes"].get(key, ""))[:12] for key in ("classifier", "data", "prior", "seed")]
        cells = [str(n), audit["verdict"], audit["teacher"], *short]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    lines += [
        "",
        "Hashes are the first digits of SHA-256; set.json has them whole, and manifest.parquet one for each picture.",
        "",
        f"Hash of the set: {content['digest']}",
        "",
        "## What it is not",
        "",
        "* Not new data: every picture is an edit of one that the audited data set holds, and shares its flaws.",
        "* Not a test set: it holds what one classifier gets wrong, in shares that no real data has.",
        "* Not better than its teacher: what the teacher takes for the same class is labelled so.",
        "",
        "## Licence",
        "",
        "The originals are copies, and the counterfactuals are adaptations, of pictures in the audited data set: its "
        "licence, its terms of use and the consent of the people shown hold for them too. The licence of the "
        "generative prior may add conditions of its own. Look both up before passing this set on.",
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text of strangers inside a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Data to learn from and to test on --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TestData:
    """Unpoisoned pictures with label and confounder, for the gain."""

    __test__ = False  # the name is no invitation to pytest

    data: Labelled
    confounders: Tensor
    """[N] values of the confounder, as indices into `names`."""
    names: tuple[str, ...]
    content_hash: str | None = None
    """Of the data set they come from, where they come from one."""

    def __post_init__(self) -> None:
        if len(self.data) != len(self.confounders) or not len(self.data):
            raise InputError(f"{len(self.data)} test pictures do not go with {len(self.confounders)} group values.")

    @classmethod
    def of(cls, dataset: Dataset, labels: tuple[str, ...], group: str, most: int, seed: int = 0) -> "TestData":
        """Up to `most` readable pictures of a data set; the column `group` is the confounder."""
        if group not in dataset.group_columns:
            known = ", ".join(dataset.group_columns) or "none"
            raise InputError(f"The test data has no group column {group!r:.80}; it has: {known}.")
        data = learnable(dataset, labels, most, seed)
        names, codes = np.unique(dataset.table[group].astype(str).to_numpy(), return_inverse=True)
        return cls(
            data, torch.from_numpy(codes)[data.origins], tuple(str(name) for name in names), dataset.content_hash
        )


def learnable(
    dataset: Dataset, labels: tuple[str, ...], most: int, seed: int = 0, rows: Sequence[int] | None = None
) -> Labelled:
    """Up to `most` readable pictures of a data set in memory, in random order or that of `rows`, with their labels."""
    indices = dataset.label_indices(labels)
    order = list(dataset.order(seed) if rows is None else rows)[:most]
    found = [(row, x.mul(255).round().byte()) for row, x in dataset.readable(order)]
    if not found:
        raise InputError("None of the pictures to learn from could be read.")
    chosen = torch.tensor([row for row, _ in found])
    return Labelled(torch.stack([x for _, x in found]), torch.from_numpy(indices)[chosen], chosen)


def ordinary_split(dataset: Dataset, labels: tuple[str, ...], most: int, seed: int = 0) -> tuple[Labelled, Labelled]:
    """(to learn from, to test on): four fifths and one fifth of a data set like the classifier's training data."""
    order = dataset.order(seed)[:most]
    cut = len(order) - max(1, len(order) // 5)
    if cut < 2:
        raise InputError(f"The data to learn from holds {len(order)} pictures; that is too few.")
    return tuple(learnable(dataset, labels, most, rows=rows) for rows in (order[:cut], order[cut:]))  # type: ignore[return-value]


# Repair ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """A classifier measured on data that took no part in its repair."""

    groups: GroupAccuracies
    accuracy: Rate
    poisoned: Rate
    ece: float

    @classmethod
    def of(cls, classifier: HuggingFaceClassifier, test: TestData, ordinary: Labelled) -> "Score":
        """Accuracy by group and calibration on unpoisoned data, accuracy on ordinary data."""
        p, labels = predict(classifier, test.data), test.data.labels
        right = int((predict(classifier, ordinary).argmax(1) == ordinary.labels).sum())
        return cls(
            groups=group_accuracies(p.argmax(1), labels, test.confounders),
            accuracy=Rate.of(int((p.argmax(1) == labels).sum()), len(labels)),
            poisoned=Rate.of(right, len(ordinary)),
            ece=expected_calibration_error(p, labels),
        )

    def as_dict(self, labels: tuple[str, ...], confounders: tuple[str, ...]) -> dict[str, Any]:
        """With the names of the groups, for JSON."""
        return {
            "aga": asdict(self.groups.aga),
            "worst_group": {"name": _group_name(self.groups.worst_group, labels, confounders)}
            | asdict(self.groups.worst),
            "groups": {_group_name(key, labels, confounders): asdict(r) for key, r in self.groups.groups.items()},
            "missing_groups": [_group_name(key, labels, confounders) for key in self.groups.missing],
            "accuracy": asdict(self.accuracy),
            "poisoned": asdict(self.poisoned),
            "ece": self.ece,
        }


@dataclass(frozen=True)
class Round:
    """One round of repair."""

    number: int
    found: Finetuned
    score: Score
    counterfactuals: int
    set_digest: str
    audit: FinishedAudit | None
    """The audit of the repaired classifier, if there was one."""


def repair(
    classifier: HuggingFaceClassifier,
    source: Path,
    audit: Path,
    originals: Labelled,
    ordinary: Labelled,
    test: TestData,
    out: Path,
    *,
    rounds: int = 1,
    seed: int = 0,
    include_true: bool = False,
    settings: FinetuneSettings | None = None,
    audit_again: Callable[[HuggingFaceClassifier, Path], None] | None = None,
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Repairs the classifier of the folder `source` from its audit; returns what it wrote to cfkd.json.

    A round fine-tunes on all false counterfactuals so far, tests, and lets `audit_again` audit the repaired classifier
    into a folder; what is false there joins the next round. It ends early when an audit passes or finds nothing false.
    The best round is chosen on what was held out of all rounds' counterfactuals and of the originals, never on the test
    data. `originals` are like the classifier's own training data, `ordinary` more of the same that is not learned from.

    The same seed gives the same weights, so a repair that was killed resumes the audit that it was in.
    """
    start, settings = time.perf_counter(), settings or FinetuneSettings()
    if not 1 <= rounds <= MAX_ROUNDS:
        raise InputError(f"There can be 1 to {MAX_ROUNDS} rounds, not {rounds}.")
    if rounds > 1 and audit_again is None:
        raise InputError("Further rounds need an audit of the repaired classifier; allow it, or ask for one round.")
    first = FinishedAudit.read(audit)
    if first.hashes["classifier"] != classifier.content_hash:
        raise InputError(f"The audit in {audit} is of another classifier than {source}; name the one that was audited.")
    (out / "cfkd.json").unlink(missing_ok=True)  # numbers of an earlier repair would not be those of the files beside
    labels, audits = classifier.labels, [audit]
    before, current, done = Score.of(classifier, test, ordinary), classifier, list[Round]()
    for number in range(1, rounds + 1):
        lessons = build_set(audits, out / "set", include_true=include_true)
        with watch(f"round {number}: fine-tuning") if watch else nullcontext() as progress:
            found = finetune(
                current,
                lessons.labelled(labels),
                originals,
                settings,
                seed=seed,
                augment=augment,
                progress=progress,
            )
        current, folder = found.classifier, out / "rounds" / str(number)
        save_classifier(current, source, folder / "classifier")
        again = None
        if audit_again is not None:
            audit_again(current, folder / "audit")
            again = FinishedAudit.read(folder / "audit")
        score = Score.of(current, test, ordinary)
        done.append(Round(number, found, score, len(lessons), lessons.digest, again))
        if again is None or again.outcome is Outcome.PASS or not any(again.lessons(include_true)):
            break
        audits.append(again.folder)
    held_cf = DebiasingSet.read(out / "set").labelled(labels).split(settings.held_out, seed)[1]
    held = originals.split(settings.held_out, seed)[1]
    validations = [validate(one.found.classifier, held_cf, held) for one in done]
    best = _best(done, validations)
    save_classifier(best.found.classifier, source, out / "classifier")
    temperature, scaled = _calibrated(best.found.classifier, held_cf, held, test)
    content = {
        "format": RESULT_FORMAT,
        "gain": _number(gain(before.groups.aga.value, best.score.groups.aga.value)),
        "worst_group_before": before.groups.worst.value,
        "worst_group_after": best.score.groups.worst.value,
        "accuracy_before": before.accuracy.value,
        "accuracy_after": best.score.accuracy.value,
        "aga_before": before.groups.aga.value,
        "aga_after": best.score.groups.aga.value,
        "poisoned_before": before.poisoned.value,
        "poisoned_after": best.score.poisoned.value,
        "ece_before": before.ece,
        "ece_after": best.score.ece,
        "temperature": temperature,
        "ece_after_at_temperature": scaled,
        "verdict_before": first.outcome,
        "verdict_after": None if best.audit is None else best.audit.outcome,
        "best_round": best.number,
        "seed": seed,
        "before": before.as_dict(labels, test.names),
        "after": best.score.as_dict(labels, test.names),
        "rounds": [_round(one, v, before) for one, v in zip(done, validations, strict=True)],
        "settings": asdict(settings) | {"rounds": rounds, "include_true": include_true},
        "notes": _notes(first, test, best),
        "n": {"test": len(test.data), "poisoned": len(ordinary), "originals": len(originals)},
        "hashes": {
            "classifier_before": classifier.content_hash,
            "classifier_after": best.found.classifier.content_hash,
            "audited_data": first.hashes["data"],
            "set": done[-1].set_digest,
        },
        "versions": {"pfungst": version("pfungst"), "python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
        "seconds": round(time.perf_counter() - start, 3),
    }
    write_text(out / "cfkd.json", json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    return content


def _best(done: list[Round], validations: list[Validation]) -> Round:
    """The round that did best on what was held out of all of them; the earlier where they are equal."""
    best = 0
    for i, validation in enumerate(validations):
        if validation.better_than(validations[best]):
            best = i
    return done[best]


def _calibrated(
    classifier: HuggingFaceClassifier, held_cf: Labelled, held: Labelled, test: TestData
) -> tuple[float, float]:
    """The temperature that fits what was held out, and the calibration error on the test data with it."""
    p = torch.cat([predict(classifier, held_cf), predict(classifier, held)])
    temperature = fit_temperature(p, torch.cat([held_cf.labels, held.labels]))
    scaled = at_temperature(predict(classifier, test.data), temperature)
    return temperature, expected_calibration_error(scaled, test.data.labels)


def _round(one: Round, validation: Validation, before: Score) -> dict[str, Any]:
    """A round as JSON."""
    groups = one.score.groups
    return {
        "round": one.number,
        "counterfactuals": one.counterfactuals,
        "step": one.found.step,
        "validation_before": asdict(one.found.before),
        "validation_after": asdict(one.found.after),
        "validation_of_all_rounds": asdict(validation) | {"score": validation.score},
        "gain": _number(gain(before.groups.aga.value, groups.aga.value)),
        "aga": groups.aga.value,
        "worst_group": groups.worst.value,
        "accuracy": one.score.accuracy.value,
        "poisoned": one.score.poisoned.value,
        "ece": one.score.ece,
        "verdict": None if one.audit is None else one.audit.outcome,
        "reliance": None if one.audit is None else one.audit.report.get("reliance"),
        "classifier": one.found.classifier.content_hash,
        "set": one.set_digest,
    }


def _notes(first: FinishedAudit, test: TestData, best: Round) -> list[str]:
    """What a reader has to know before the numbers are believed."""
    notes = []
    if test.content_hash == first.hashes["data"]:
        notes.append(
            "The test data is the data that was audited: the repaired classifier has learned from edits of some of "
            "these pictures, so its numbers are too good. Test on other data."
        )
    if best.score.groups.missing:
        notes.append("The test data lacks some label × confounder groups; the average group accuracy is without them.")
    if best.found.step == 0 and best.number == 1:
        notes.append("No fine-tuning step was better on what was held out: the classifier is unchanged.")
    return notes


def _group_name(group: tuple[int, int], labels: tuple[str, ...], confounders: tuple[str, ...]) -> str:
    return f"{labels[group[0]]}, {confounders[group[1]]}"


def _number(value: float) -> float | None:
    """JSON knows no NaN."""
    return value if math.isfinite(value) else None
