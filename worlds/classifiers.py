"""The classifiers of each world: a poisoned student, its clean twin and an oracle.

All are ResNet-18-type networks saved as ordinary Hugging Face folders. Student and twin share architecture, seed and
augmentation; they differ in the data, and in the steps that fitting it takes. In portraits the augmentation (colour
jitter, white balance, partial occlusion) makes hair colour harder to read than beard and hair length, so a student that
sees both agree takes the shortcut. In histology the stain is by itself the easier cue. The oracle sees balanced data
without augmentation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

from worlds.training import fit, generator
from worlds.world import World

MEAN, STD = 0.5, 0.25
COVERED = 0.75
BATCH = 64


@dataclass(frozen=True)
class ClassifierRecipe:
    """How one classifier of a world is trained."""

    rho: float
    images: int
    steps: int
    seed: int
    jitter: bool
    peak_rate: float = 2e-3


RECIPES: dict[str, dict[str, ClassifierRecipe]] = {
    "portraits": {
        "student": ClassifierRecipe(rho=1.0, images=8_000, steps=400, seed=21, jitter=True),
        "twin": ClassifierRecipe(rho=0.5, images=8_000, steps=600, seed=21, jitter=True),
        "oracle": ClassifierRecipe(rho=0.5, images=12_000, steps=600, seed=23, jitter=False),
    },
    "histology": {
        "student": ClassifierRecipe(rho=0.99, images=6_000, steps=300, seed=31, jitter=False),
        "twin": ClassifierRecipe(rho=0.5, images=6_000, steps=400, seed=31, jitter=False),
        "oracle": ClassifierRecipe(rho=0.5, images=8_000, steps=600, seed=33, jitter=False),
    },
}
"""Roles of each world; student and twin differ in rho, and in steps because balanced data takes longer to fit."""


def network(outputs: Sequence[str]) -> ResNetForImageClassification:
    """A narrow ResNet-18 with a number for each output: four stages of two basic blocks."""
    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32, 64, 96],
            depths=[2, 2, 2, 2],
            layer_type="basic",
            id2label=dict(enumerate(outputs)),
            label2id={name: i for i, name in enumerate(outputs)},
        )
    )


def preprocessing(world: World) -> dict[str, object]:
    """What the folder's preprocessor_config.json says: the classifier's own size and normalisation."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": world.size, "width": world.size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
    }


def jitter(x: Tensor, g: torch.Generator) -> Tensor:
    """Colour jitter, white balance and partial occlusion, drawn for each picture of [B, 3, H, W].

    Three in four pictures have their upper part covered, as hats, hoods and tight crops do: there the hair is gone,
    while beard, brows and lips stay.
    """
    n, _, height, width = x.shape

    def uniform(low: float, high: float, channels: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(n, channels, 1, 1, generator=g)

    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * uniform(0.0, 1.4)
    x = x * uniform(0.5, 1.5, channels=3)
    x = x.clamp(1e-3, 1) ** uniform(0.4, 2.5)
    level = x.mean((1, 2, 3), keepdim=True)
    x = (level + (x - level) * uniform(0.4, 1.4) + uniform(-0.2, 0.2)).clamp(0, 1)
    tilt = uniform(-0.3, 0.3) * (torch.arange(width) - width / 2)
    edge = uniform(0.38, 0.55) * height + tilt
    covered = (torch.arange(height)[:, None] < edge) & (torch.rand(n, 1, 1, 1, generator=g) < COVERED)
    return torch.where(covered, torch.rand(n, 3, 1, 1, generator=g), x)


def train_classifier(world: World, recipe: ClassifierRecipe, checkpoint: Path, title: str) -> nn.Module:
    """Cross-entropy on data poisoned with the recipe's rho."""
    torch.manual_seed(recipe.seed)
    data = world.poisoned(recipe.images, recipe.seed, recipe.rho)
    images, labels = data.images.mul(255).round().byte(), data.labels

    def loss(model: nn.Module, step: int) -> Tensor:
        g = generator(recipe.seed, step)
        rows = torch.randint(len(images), (BATCH,), generator=g)
        x = images[rows].float() / 255
        if recipe.jitter:
            x = jitter(x, g)
        return F.cross_entropy(model(pixel_values=(x - MEAN) / STD).logits, labels[rows], label_smoothing=0.02)

    return fit(
        network(world.labels),
        loss,
        cycles=(recipe.steps,),
        peak_rate=recipe.peak_rate,
        checkpoint=checkpoint,
        title=title,
        weight_decay=1e-2,
    )
