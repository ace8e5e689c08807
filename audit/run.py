"""One audit: images in random order, counterfactuals, teacher, and a verdict as soon as the bounds allow one.

Every finished image is on the disk before the next batch begins: its pictures under counterfactuals/, the original
among them, then its line in journal.jsonl. The verdict is a function of those lines, read in order, so an audit that
was killed and started again says exactly what an undisturbed one says.

An image's first counterfactual alone speaks for the verdict: it is the way the classifier takes when every way is open.
A later one may not touch what an earlier one edited. Where the first was true, the label's own place is barred to the
second, and whatever still flips the classifier there is false by construction: of an honest portraits classifier 1 in
56 first counterfactuals was judged false, and 16 of 16 valid second ones. Later ones are pictures for people and for
the debiasing set.

Shapes: images [N, 3, H, W] in [0, 1], K counterfactuals per image.
"""

import datetime
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audit.dataset import Dataset
from audit.explain import Explainer, runners_up
from audit.images import read_image
from audit.journal import Journal
from audit.metrics import edited_area
from audit.pictures import save_png, to_pil
from audit.policy import Policy, direction_name
from audit.teachers import Judgement, Pairs, Teacher
from audit.verdict import Judge, Prerequisites, Verdict
from engine.counterfactual import CancelToken, CounterfactualSet
from engine.sampling import row_seed

BATCH = 8


@dataclass(frozen=True)
class Counterfactual:
    """One line's k-th counterfactual."""

    name: str
    flipped: bool
    confirmed: bool
    """Whether the evaluator gives the target too."""
    judgement: Judgement | None
    target_probability: float
    area: float
    file: str
    mask: str

    @property
    def valid(self) -> bool:
        """Flipped, and not only adversarially."""
        return self.flipped and self.confirmed


@dataclass(frozen=True)
class AuditedImage:
    """What an audit knows of one image."""

    row: int
    name: str
    source: str
    target: str
    source_probability: float
    label: str | None
    groups: dict[str, str]
    seconds: float
    original: str
    """The picture as the classifier was asked about it, stored beside its counterfactuals."""
    counterfactuals: tuple[Counterfactual, ...]

    @property
    def direction(self) -> str:
        """From which class to which."""
        return direction_name(self.source, self.target)

    @property
    def first(self) -> Counterfactual:
        """The counterfactual that speaks for the image."""
        return self.counterfactuals[0]

    @property
    def flipped(self) -> bool:
        """Whether the first counterfactual is valid."""
        return self.first.valid

    @property
    def reliance(self) -> float | None:
        """1 where the first counterfactual is valid and false, 0 where it is valid and true; None without either."""
        if not self.first.valid or self.first.judgement not in (Judgement.TRUE, Judgement.FALSE):
            return None
        return float(self.first.judgement is Judgement.FALSE)

    def as_dict(self) -> dict[str, Any]:
        """For the journal and the report."""
        record = {key: value for key, value in vars(self).items() if key != "counterfactuals"}
        return {**record, "counterfactuals": [vars(one) for one in self.counterfactuals]}

    @classmethod
    def of(cls, record: dict[str, Any]) -> "AuditedImage":
        """Read back from a journal's line."""
        found = tuple(
            Counterfactual(**{**one, "judgement": None if one["judgement"] is None else Judgement(one["judgement"])})
            for one in record["counterfactuals"]
        )
        return cls(**{**record, "counterfactuals": found})


@dataclass(frozen=True)
class Audit:
    """An audit that has ended: its verdict and everything it rests on."""

    verdict: Verdict
    images: tuple[AuditedImage, ...]
    prerequisites: Prerequisites
    identity: dict[str, Any]
    seconds: float
    resumed: int
    """How many images were finished by an earlier run."""
    bad_files: str
    out: Path = field(compare=False)

    def pictures(self, chosen: list[tuple[AuditedImage, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """(originals, counterfactuals, edits) of some counterfactuals, as the audit stored them."""
        x = torch.stack([read_image(self.out / image.original) for image, _ in chosen])
        x_cf = torch.stack([read_image(self.out / image.counterfactuals[k].file) for image, k in chosen])
        masks = torch.stack([read_image(self.out / image.counterfactuals[k].mask)[:1] for image, k in chosen])
        return x, x_cf, masks > 0


def directions(labels: tuple[str, ...]) -> list[str]:
    """Every way from one class to another, known before the first image is drawn."""
    return [direction_name(a, b) for a in labels for b in labels if a != b]


def audit(
    explainer: Explainer,
    dataset: Dataset,
    teacher: Teacher,
    policy: Policy,
    out: Path,
    *,
    seed: int = 0,
    batch: int = BATCH,
    today: datetime.date | None = None,
    progress: Callable[[int, int, Judge], None] | None = None,
    cancel: CancelToken | None = None,
) -> Audit:
    """Audits a classifier on a data set; stops as soon as the policy's question is answered.

    Images come in the order of `seed`, each with the noise seed of its own row, and only of directions that are still
    open. They are explained a batch at a time but judged one by one: where the audit stops does not depend on batches.
    """
    labels = explainer.classifier.labels
    dataset.check_labels(labels)
    identity = {
        "classifier": explainer.classifier.content_hash,
        "data": dataset.content_hash,
        "prior": explainer.prior.content_hash,
        "method": explainer.method,
        "recipe": explainer.recipe.digest,
        "guide": explainer.surrogates.guide.weights_hash,
        "evaluator": explainer.surrogates.evaluator.weights_hash,
        "teacher": teacher.name,
        "teacher_hash": teacher.content_hash,
        "policy": policy.digest,
        "seed": seed,
        "batch": batch,
    }
    journal = Journal(out / "journal.jsonl", identity)
    judge = Judge(policy, directions(labels), today or datetime.date.today())
    done = [AuditedImage.of(record) for record in journal.records]
    for image in done:
        judge.observe(image.direction, image.reliance, image.flipped)
    resumed, start = len(done), time.perf_counter()
    known = {image.row for image in done}
    total = min(policy.max_images, len(dataset))
    # A copy with the policy's patience; what turns out to be unreadable is noted in the caller's data set all the same.
    dataset = replace(dataset, max_bad_share=policy.max_bad_files_share)
    rows = (row for row in dataset.order(seed) if row not in known)
    for part in _batches(explainer, dataset, rows, judge, batch):
        for image in _explain(explainer, dataset, teacher, part, out, seed, cancel):
            if judge.finished:
                break
            journal.append(image.as_dict())
            judge.observe(image.direction, image.reliance, image.flipped)
            done.append(image)
            if progress is not None:
                progress(len(done), total, judge)
        if judge.finished:
            break
    prerequisites = Prerequisites(
        evaluator_agreement=explainer.surrogates.evaluator.agreement.rate.value,
        teacher_accuracy=None if teacher.accuracy is None else teacher.accuracy.value,
    )
    return Audit(
        verdict=judge.verdict(prerequisites),
        images=tuple(done),
        prerequisites=prerequisites,
        identity=identity,
        seconds=time.perf_counter() - start,
        resumed=resumed,
        bad_files=dataset.bad_summary,
        out=out,
    )


@dataclass(frozen=True)
class _Drawn:
    """An image that was drawn, and the class it is to be flipped to."""

    row: int
    x: Tensor
    source: int
    target: int


def _batches(
    explainer: Explainer, dataset: Dataset, rows: Iterable[int], judge: Judge, size: int
) -> Iterator[list[_Drawn]]:
    """Readable images of open directions, `size` at a time; bad files are counted by the data set."""
    labels = explainer.classifier.labels
    readable = dataset.readable(rows)
    waiting: list[_Drawn] = []
    while not judge.finished and (part := list(islice(readable, size))):
        sources, targets = runners_up(explainer.classifier.probabilities(torch.stack([x for _, x in part])))
        for (row, x), source, target in zip(part, sources.tolist(), targets.tolist(), strict=True):
            if direction_name(labels[source], labels[target]) in judge.open_directions:
                waiting.append(_Drawn(row, x, source, target))
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
    if waiting and not judge.finished:
        yield waiting


def _explain(
    explainer: Explainer,
    dataset: Dataset,
    teacher: Teacher,
    drawn: list[_Drawn],
    out: Path,
    seed: int,
    cancel: CancelToken | None,
) -> Iterator[AuditedImage]:
    """Counterfactuals of one batch, judged; each image's pictures are on the disk before it is yielded."""
    start = time.perf_counter()
    x, targets = torch.stack([one.x for one in drawn]), [one.target for one in drawn]
    sets = explainer(x, targets, [row_seed(seed, one.row) for one in drawn], cancel=cancel)
    confirmed = [explainer.evaluator_flipped(found) for found in sets]
    names = [[f"{one.row:06d}-{k + 1}" for k in range(explainer.recipe.k)] for one in drawn]
    judgements = _judge(teacher, drawn, sets, confirmed, names)
    seconds = (time.perf_counter() - start) / len(drawn)
    labels, table = explainer.classifier.labels, dataset.table
    for i, (one, found) in enumerate(zip(drawn, sets, strict=True)):
        yield AuditedImage(
            row=one.row,
            name=dataset.name(one.row),
            source=labels[one.source],
            target=labels[one.target],
            source_probability=float(found.source_logits.softmax(0)[one.source]),
            label=str(table["label"].iloc[one.row]) if dataset.labels else None,
            groups={name: str(table[name].iloc[one.row]) for name in dataset.group_columns},
            seconds=seconds,
            original=_store_original(found, one.row, out),
            counterfactuals=tuple(
                _store(found, k, names[i][k], confirmed[i][k], judgements.get((i, k)), out)
                for k in range(len(found.images))
            ),
        )


def _judge(
    teacher: Teacher,
    drawn: list[_Drawn],
    sets: list[CounterfactualSet],
    confirmed: list[list[bool]],
    names: list[list[str]],
) -> dict[tuple[int, int], Judgement | None]:
    """The teacher's judgement of every valid counterfactual, by (image, k)."""
    valid = [
        (i, k) for i, found in enumerate(sets) for k in range(len(found.images)) if found.flipped[k] and confirmed[i][k]
    ]
    if not valid:
        return {}
    pairs = Pairs(
        x=torch.stack([sets[i].x0 for i, _ in valid]),
        x_cf=torch.stack([sets[i].images[k] for i, k in valid]),
        edits=torch.stack([sets[i].edit_masks[k] for i, k in valid]),
        names=tuple(names[i][k] for i, k in valid),
        rows=tuple(drawn[i].row for i, _ in valid),
        targets=tuple(sets[i].target for i, _ in valid),
    )
    return dict(zip(valid, teacher(pairs), strict=True))


def _store_original(found: CounterfactualSet, row: int, out: Path) -> str:
    """Data sets move and change: with its originals, an audit's folder can be looked at and learned from alone."""
    picture = f"counterfactuals/{row:06d}-original.png"
    save_png(to_pil(found.x0), out / picture)
    return picture


def _store(
    found: CounterfactualSet, k: int, name: str, confirmed: bool, judgement: Judgement | None, out: Path
) -> Counterfactual:
    picture, mask = f"counterfactuals/{name}.png", f"counterfactuals/{name}-mask.png"
    save_png(to_pil(found.images[k]), out / picture)
    save_png(to_pil(found.edit_masks[k].float().expand(3, -1, -1)), out / mask)
    return Counterfactual(
        name=name,
        flipped=found.flipped[k],
        confirmed=confirmed,
        judgement=judgement,
        target_probability=float(found.logits[k].softmax(0)[found.target]),
        area=float(edited_area(found.edit_masks[k : k + 1, 0])[0]),
        file=picture,
        mask=mask,
    )
