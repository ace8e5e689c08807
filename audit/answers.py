"""Questions about single images, answered several at a time and as plain values: what a service sends over a wire.

Shapes: an image is [3, H, W] in [0, 1].
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from audit.classifier import Classifier
from audit.explain import Explainer, choose_target, summary
from audit.pictures import data_uri, to_pil
from engine.counterfactual import CancelToken, CounterfactualSet, Progress
from engine.errors import ClassifierError, TargetError


def target_index(explainer: Explainer, image: Tensor, target: int | str | None) -> int:
    """The class to reach: by its index, by its name, or the most probable besides the predicted one."""
    labels = explainer.classifier.labels
    if isinstance(target, int):
        if not 0 <= target < len(labels):
            raise TargetError(f"The target {target} is out of range; the classifier has {len(labels)} classes.")
        target = labels[target]
    return choose_target(explainer.classifier, image, target)


def explain_together(
    explainer: Explainer,
    images: Sequence[Tensor],
    targets: Sequence[int],
    seeds: Sequence[int],
    *,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """Counterfactual sets of images of one size, made in one batch; each is what its image alone would have given."""
    return explainer(torch.stack(list(images)), list(targets), list(seeds), progress=progress, cancel=cancel)


def answer(explainer: Explainer, found: CounterfactualSet) -> dict[str, Any]:
    """A counterfactual set as JSON: what `summary` says, and its pictures and masks as PNG in base64."""
    told = summary(explainer, found)
    told["original"] = _png(found.x0)
    for k, one in enumerate(told["counterfactuals"]):
        one["image"] = _png(found.images[k])
        one["mask"] = _png(found.soft_masks[k].expand(3, -1, -1))
    return told


def device_memory() -> dict[str, int]:
    """Bytes that tensors hold on each accelerator of this process; empty where there is none."""
    return {f"cuda:{i}": int(torch.cuda.memory_allocated(i)) for i in range(torch.cuda.device_count())}


def check_answers(classifier: Classifier) -> None:
    """Asks once about two made-up images; a ClassifierError says what is wrong with the answer."""
    height, width = classifier.size or (64, 64)
    images = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = classifier(images)
    if not bool(torch.isfinite(logits).all()):
        raise ClassifierError("The classifier answered with NaN or infinity.")


def _png(image: Tensor) -> str:
    return data_uri(to_pil(image)).partition(",")[2]
