"""How a classifier is fine-tuned: numbers alone, so that whoever only names them loads no torch."""

from dataclasses import dataclass

from engine.errors import InputError


@dataclass(frozen=True)
class FinetuneSettings:
    """How a classifier is fine-tuned."""

    steps: int = 300
    batch: int = 64
    rate: float = 3e-4
    """Peak of the learning rate, after a short warm-up and before a cosine to zero."""
    weight_decay: float = 1e-2
    held_out: float = 0.2
    every: int = 25
    """Steps between validations."""

    def __post_init__(self) -> None:
        if min(self.steps, self.every) < 1 or self.batch < 2 or self.batch % 2:
            raise InputError("Fine-tuning needs at least one step, and an even batch: half of it are counterfactuals.")
        if not 0 < self.held_out < 1 or not self.rate > 0 or self.weight_decay < 0:
            raise InputError("Fine-tuning holds out a share between 0 and 1 and needs a learning rate above 0.")
