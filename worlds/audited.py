"""An embedded world as the data set of an audit: pictures, a teacher that knows the truth, and words for findings."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from audit.dataset import Dataset, dataset_of_images
from audit.report import Names
from audit.teacher_choice import attribute_teacher
from audit.teachers import OracleTeacher, Teacher
from engine.prior import Prior
from worlds.store import open_classifier
from worlds.world import Sample, World

N_TAUGHT = 600
N_TESTED = 500


def audited(world: World, prior: Prior, n: int, seed: int) -> tuple[Dataset, Teacher, Names]:
    """n unpoisoned pictures of a world, its oracle as teacher, and its factors and parts as names."""
    data = world.sample(n, seed)
    taught, tested = world.sample(N_TAUGHT, seed + 1), world.sample(N_TESTED, seed + 2)
    oracle = open_classifier(world, "oracle")
    teacher = OracleTeacher.tested(oracle.probabilities, tested.images, tested.labels, content_hash=oracle.content_hash)
    columns = {world.confounder_name: taught.confounders}
    attributes = attribute_teacher(prior, taught.images, taught.labels, columns)
    groups = {"confounder": [world.confounders[value] for value in data.confounders.tolist()]}
    dataset = dataset_of_images(data.images, [world.labels[label] for label in data.labels.tolist()], groups)
    return dataset, teacher, Names(attributes, {name: _region(data, name) for name in data.parts})


def _region(data: Sample, name: str) -> Callable[[Sequence[int]], Tensor]:
    def masks(rows: Sequence[int]) -> Tensor:
        return data.parts[name][torch.tensor(list(rows))]

    return masks
