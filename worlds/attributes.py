"""A reader for each world: a network that tells from a picture every factor that it was rendered from.

What an edit changed can then be said in the world's own words: the presentation, the background's hue, the smile. The
reader has seen no counterfactual, no student and no surrogate.

Shapes: images [B, 3, H, W] in [0, 1]; A attributes, [B, A], each with mean 0 and variance 1 over unpoisoned pictures;
F factors, [B, F]: an attribute each, but for those that come in circles, which are two.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from audit.classifier import HuggingFaceClassifier
from audit.metrics import Array, Floats
from engine.masks import gaussian_blur
from engine.writing import write_text
from worlds.classifiers import MEAN, STD, network
from worlds.store import READER, WEIGHTS, open_reader
from worlds.training import fit, generator
from worlds.world import World

PERIODS = {
    "background_hue": 1.0,
    "clothes_hue": 1.0,
    "background_tilt": 2 * math.pi,
    "light_angle": 2 * math.pi,
    "fibre_angle": math.pi,
}
"""Factors that come back to where they began; each is read as a cosine and a sine."""
COSINE, SINE = "_cos", "_sin"
HELD_OUT, N_HELD_OUT = 890_001, 2_000
"""Pictures that say how well each factor is read; no other part of the project uses this seed."""
SURE = 0.95
"""Share of the held-out pictures in which a factor's reading errs by less than its stated error."""
BATCH = 64
NOISE = 0.05
BLURRED = 0.3
"""Share of the training pictures that are blurred: a reader should not take a softer picture for another person."""


@dataclass(frozen=True)
class ReaderRecipe:
    """How a world's reader is trained."""

    images: int = 24_000
    steps: int = 4_000
    seed: int = 41
    peak_rate: float = 3e-3


def attributes(factors: pd.DataFrame) -> pd.DataFrame:
    """Factors as numbers that can be read off a picture: seeds of texture are left out, circles are unrolled."""
    columns: dict[str, np.ndarray] = {}
    for name in factors.columns:
        values = factors[name].to_numpy(dtype=np.float64)
        if name in PERIODS:
            turn = 2 * math.pi * values / PERIODS[name]
            columns[name + COSINE], columns[name + SINE] = np.cos(turn), np.sin(turn)
        elif not name.endswith("_seed"):
            columns[name] = values
    return pd.DataFrame(columns)


def factor_of(attribute: str) -> str:
    """The factor that an attribute belongs to."""
    return attribute.removesuffix(COSINE).removesuffix(SINE)


def standardised(world: World, factors: pd.DataFrame) -> Tensor:
    """[N, A] attributes with the mean and variance that they have in the world."""
    usual = attributes(world.factors(100_000, seed=0))
    return torch.tensor(((attributes(factors) - usual.mean()) / usual.std()).to_numpy(dtype=np.float32))


def roughened(x: Tensor, g: torch.Generator) -> Tensor:
    """Pictures with noise of a random strength, some of them blurred."""
    soft = torch.rand(len(x), 1, 1, 1, generator=g) < BLURRED
    x = torch.where(soft, gaussian_blur(x, 0.8), x)
    strength = NOISE * torch.rand(len(x), 1, 1, 1, generator=g)
    return (x + strength * torch.randn(x.shape, generator=g)).clamp(0, 1)


def train_reader(world: World, recipe: ReaderRecipe, checkpoint: Path) -> nn.Module:
    """Squared error of all standardised attributes, on unpoisoned pictures."""
    torch.manual_seed(recipe.seed)
    data = world.sample(recipe.images, recipe.seed)
    images, truth = data.images.mul(255).round().byte(), standardised(world, data.factors)

    def loss(model: nn.Module, step: int) -> Tensor:
        g = generator(recipe.seed, step)
        rows = torch.randint(len(images), (BATCH,), generator=g)
        x = roughened(images[rows].float() / 255, g)
        read: Tensor = model(pixel_values=(x - MEAN) / STD).logits
        return (read - truth[rows]).square().mean()

    return fit(
        network(tuple(attributes(data.factors.head(1)).columns)),
        loss,
        cycles=(recipe.steps,),
        peak_rate=recipe.peak_rate,
        checkpoint=checkpoint,
        title=f"{world.name} attributes",
        weight_decay=1e-2,
    )


def read(reader: HuggingFaceClassifier, images: Tensor) -> Floats:
    """[N, A] what the reader tells of pictures."""
    with torch.no_grad():
        told: Floats = torch.cat([reader(part) for part in images.split(256)]).numpy().astype(np.float64)
    return told


def factors_of(names: tuple[str, ...]) -> list[str]:
    """Factors that attributes belong to, each once."""
    return list(dict.fromkeys(factor_of(name) for name in names))


def by_factor(names: tuple[str, ...], values: Array) -> Floats:
    """[N, F] lengths of values [N, A], where the cosine and the sine of an angle are one vector."""
    factors, given = factors_of(names), np.asarray(values, dtype=np.float64)
    square = np.zeros((len(given), len(factors)))
    for column, name in enumerate(names):
        square[:, factors.index(factor_of(name))] += given[:, column] ** 2
    return np.asarray(np.sqrt(square))


def legibility(world: World, reader: HuggingFaceClassifier, n: int = N_HELD_OUT) -> tuple[Floats, Floats]:
    """([F] share of each factor's variance that is read rightly, [F] what its error stays below in `SURE` of cases)."""
    data = world.sample(n, HELD_OUT)
    truth = standardised(world, data.factors).numpy()
    whole, wrong = (by_factor(reader.labels, values) for values in (truth, read(reader, data.images) - truth))
    return 1 - (wrong**2).mean(0) / (whole**2).mean(0), np.quantile(wrong, SURE, axis=0)


def write_reader_card(world: World, weights: Path = WEIGHTS, n: int = N_HELD_OUT) -> None:
    """Writes attributes.md with freshly measured figures beside a world's models."""
    reader, recipe = open_reader(world, weights), ReaderRecipe()
    rows = zip(factors_of(reader.labels), *legibility(world, reader, n), strict=True)
    figures = "\n".join(f"| {name} | {share:.3f} | {error:.2f} |" for name, share, error in rows)
    count = sum(p.numel() for p in reader.parameters())
    text = f"""# The reader of attributes of «{world.name}»

A narrow ResNet-18 of {count:,} parameters that tells from a picture the factors it was rendered from. Trained by this
project on {recipe.images:,} unpoisoned pictures, some of them blurred or noisy, for {recipe.steps:,} steps of {BATCH}.
It is there to say what an edit changed. It has seen no counterfactual, no student and no surrogate.

Measured on {n:,} held-out pictures when it was trained, by `python -m worlds.train {READER}`: the share of a factor's
variance that is read rightly, and the error, in the factor's standard deviations, that {SURE:.0%} of the pictures stay
below.

| factor | share | error |
|---|---|---|
{figures}

Do not use it on real pictures.
"""
    write_text(weights / world.name / f"{READER}.md", text)
