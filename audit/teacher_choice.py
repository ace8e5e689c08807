"""Who judges an audit's counterfactuals, and with which words, given what the user has."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from audit.dataset import Dataset
from audit.report import Names
from audit.sources import open_classifier
from audit.teachers import AttributeTeacher, MajorityTeacher, OracleTeacher, Probe, StoredTeacher, Teacher, fit_probe
from engine.errors import InputError
from engine.prior import Prior

N_TAUGHT = 600
N_TESTED = 300
SEED = 11


def choose_teacher(
    prior: Prior,
    dataset: Dataset,
    labels: tuple[str, ...],
    *,
    oracle: Path | str | None = None,
    verdicts: Path | None = None,
) -> tuple[Teacher, Names]:
    """The teacher, and what is known for findings.

    A trusted classifier and stored verdicts are used where they are given, as a majority where both are. Without them
    the data set's own columns have to do: probes on the prior's latents learn the label and every two-valued group.
    """
    chosen: list[Teacher] = []
    if verdicts is not None:
        chosen.append(StoredTeacher.load(verdicts))
    if oracle is not None:
        chosen.append(_oracle(oracle, dataset, labels))
    attributes = None
    if dataset.labels and len(labels) == 2:
        try:
            attributes = _attributes(prior, dataset, labels)
        except InputError:
            if not chosen:
                raise
            # Too few pictures to learn the label from: others judge, and findings do without words.
    if not chosen and attributes is not None:
        chosen.append(attributes)
    if not chosen:
        raise InputError(
            "Nobody here knows the real class: give a trusted classifier (--teacher), stored verdicts (--verdicts), or "
            "a data set with two labels."
        )
    return (chosen[0] if len(chosen) == 1 else MajorityTeacher(tuple(chosen))), Names(attributes)


def _oracle(source: Path | str, dataset: Dataset, labels: tuple[str, ...]) -> OracleTeacher:
    classifier = open_classifier(source)
    if classifier.labels != labels:
        raise InputError(
            f"The teacher knows {', '.join(classifier.labels)}, but the classifier {', '.join(labels)}: the same "
            "labels in the same order are needed."
        )
    rows, x = _some(dataset, N_TESTED)
    truth = torch.from_numpy(dataset.label_indices(labels)[rows])
    return OracleTeacher.tested(classifier.probabilities, x, truth, content_hash=classifier.content_hash)


def _attributes(prior: Prior, dataset: Dataset, labels: tuple[str, ...]) -> AttributeTeacher:
    rows, x = _some(dataset, N_TAUGHT)
    label = torch.from_numpy(dataset.label_indices(labels)[rows])
    columns = {}
    for name in dataset.group_columns:
        values, codes = np.unique(dataset.table[name].astype(str).to_numpy()[rows], return_inverse=True)
        if len(values) == 2:
            columns[name] = torch.from_numpy(codes)
    return attribute_teacher(prior, x, label, columns)


def attribute_teacher(prior: Prior, x: Tensor, label: Tensor, columns: dict[str, Tensor]) -> AttributeTeacher:
    """Probes for the label and for each two-valued column that has enough images of both values."""
    encode = _encoder(prior)
    latents = encode(x).flatten(1)
    probes: list[Probe] = []
    for name, values in columns.items():
        try:
            probes.append(fit_probe(name, latents, values))
        except InputError:
            continue  # too rare a value: findings do without this column
    digest = hashlib.sha256(f"{prior.content_hash} {sorted(columns)}".encode())
    for learned in (x, label, *(columns[name] for name in sorted(columns))):
        digest.update(learned.contiguous().numpy().tobytes())
    return AttributeTeacher(encode, fit_probe("label", latents, label), tuple(probes), content_hash=digest.hexdigest())


def _encoder(prior: Prior) -> Callable[[Tensor], Tensor]:
    @torch.no_grad()
    def encode(images: Tensor) -> Tensor:
        return torch.cat([prior.encode(part) for part in images.split(32)])

    return encode


def _some(dataset: Dataset, n: int) -> tuple[list[int], Tensor]:
    """Up to n readable images in a random order that is not the audit's."""
    found: list[tuple[int, Tensor]] = []
    for row, x in dataset.readable(dataset.order(SEED)):
        found.append((row, x))
        if len(found) == n:
            break
    return [row for row, _ in found], torch.stack([x for _, x in found])
