"""What a run hands out: the counterfactuals of one image with their cost, and its progress on the way there.

Shapes: H W image size, K counterfactuals per image.
"""

from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor

from engine.settings import Settings


class CancelToken(Protocol):
    """What can be asked whether to stop; threading.Event is one."""

    def is_set(self) -> bool:
        """Whether the caller wants to stop."""
        ...


@dataclass(frozen=True)
class Progress:
    """Where a run is: counterfactual k of `count`, the attempt, the step, and how many samples are in this pass."""

    k: int
    count: int
    attempt: int
    step: int
    steps: int
    samples: int


@dataclass(frozen=True)
class Cost:
    """What one sample used, every try counted; seconds are the sample's share of the time its batches took."""

    tries: int = 0
    network_calls: int = 0
    decoder_forwards: int = 0
    decoder_backwards: int = 0
    classifier_queries: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class CounterfactualSet:
    """The K counterfactuals of one image, with all that is needed to make them again."""

    x0: Tensor  # [3, H, W]
    source: int  # the class that f gives x0
    target: int
    images: Tensor  # [K, 3, H, W]; outside the edit bit-identical to x0
    soft_masks: Tensor  # [K, 1, H, W] the weights of the composite, in [0, 1]
    edit_masks: Tensor  # [K, 1, H, W] bool, where the weight is not 0
    flipped: tuple[bool, ...]  # whether f gives the target
    logits: Tensor  # [K, classes] of f
    source_logits: Tensor  # [classes] of f at x0
    seed: int
    recipe: Settings  # a Recipe, or the settings of another method
    factors: tuple[float, ...]  # the escalation factor that each counterfactual was kept from
    hashes: dict[str, str]  # of the prior, the classifier, the guide, the recipe and the image
    costs: tuple[Cost, ...]  # one per counterfactual
    setup: Cost  # encoding, reconstruction and the first query

    @property
    def cost(self) -> Cost:
        """The whole cost of the set."""
        return sum(self.costs, self.setup)
