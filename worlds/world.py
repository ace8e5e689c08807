"""What every procedural world offers: factors, pictures, masks of what is where, and poisoned draws.

All randomness lies in the factor table. A row renders to the same picture whatever stands beside it, so a table is a
data set: changing one column and rendering again is an intervention, and the pixels that move are that factor's region.

Shapes: B pictures, H = W = size; images are [B, 3, H, W] in [0, 1], quantised to 8 bits as a PNG would be.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

CHUNK_PIXELS = 2**17
"""Pixels drawn at a time: a chunk's fields stay in the processor's cache."""
VISIBLE_CHANGE = 8 / 255


@dataclass(frozen=True)
class Sample:
    """Pictures of a world with their whole truth."""

    images: Tensor
    """[N, 3, H, W] in [0, 1]."""
    factors: pd.DataFrame
    """One row a picture; `label` and `confounder` are 0 or 1, the rest is nuisance."""
    parts: dict[str, Tensor]
    """Share of each pixel that shows a named part, [N, 1, H, W]."""

    @property
    def labels(self) -> Tensor:
        """[N] class indices."""
        return torch.tensor(self.factors["label"].to_numpy(), dtype=torch.int64)

    @property
    def confounders(self) -> Tensor:
        """[N] confounder values, 0 or 1."""
        return torch.tensor(self.factors["confounder"].to_numpy(), dtype=torch.int64)

    def pick(self, rows: slice | list[int]) -> "Sample":
        """Some of the pictures, with their truth."""
        parts = {name: part[rows] for name, part in self.parts.items()}
        return Sample(self.images[rows], self.factors.iloc[rows].reset_index(drop=True), parts)


class World(ABC):
    """A distribution over pictures whose causes are known."""

    name: str
    size: int = 64
    """Resolution at which the embedded models were trained; rendering works at any."""
    labels: tuple[str, str]
    """Names of the two classes."""
    confounders: tuple[str, str]
    """Names of the confounder's two values; value i goes with label i in poisoned data."""
    confounder_name: str
    label_region: str
    """What the label changes, in words."""

    @abstractmethod
    def nuisances(self, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Columns of the factor table besides label and confounder."""

    @abstractmethod
    def draw(self, column: dict[str, Tensor], size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Pictures [B, 3, H, W] and part masks [B, H, W] for factor columns of shape [B, 1, 1]."""

    def factors(self, n: int, seed: int, rho: float = 0.5) -> pd.DataFrame:
        """A factor table in which label and confounder agree with probability `rho` (0.5: independent)."""
        if not 0.0 <= rho <= 1.0:
            raise ValueError(f"rho is a probability: {rho} is not between 0 and 1")
        rng = np.random.default_rng([seed, 7919])
        label = rng.integers(0, 2, n)
        agree = rng.random(n) < rho
        confounder = np.where(agree, label, 1 - label)
        return pd.DataFrame({"label": label, "confounder": confounder, **self.nuisances(n, rng)})

    def render(self, factors: pd.DataFrame, size: int | None = None) -> Sample:
        """Draws every row of a factor table."""
        size = size or self.size
        images: list[Tensor] = []
        parts: dict[str, list[Tensor]] = {}
        chunk = max(1, CHUNK_PIXELS // size**2)
        for start in range(0, len(factors), chunk):
            rows = factors.iloc[start : start + chunk]
            picture, masks = self.draw({name: _column(rows[name]) for name in rows.columns}, size)
            images.append((picture * 255).round() / 255)
            for part, mask in masks.items():
                parts.setdefault(part, []).append(mask[:, None].expand(len(rows), 1, size, size))
        if not images:
            return Sample(torch.zeros(0, 3, size, size), factors, {})
        return Sample(
            images=torch.cat(images), factors=factors, parts={name: torch.cat(masks) for name, masks in parts.items()}
        )

    def sample(self, n: int, seed: int, size: int | None = None) -> Sample:
        """Unpoisoned pictures: label and confounder are independent."""
        return self.render(self.factors(n, seed), size)

    def poisoned(self, n: int, seed: int, rho: float, size: int | None = None) -> Sample:
        """Pictures in which label and confounder agree with probability `rho`."""
        return self.render(self.factors(n, seed, rho), size)

    def intervene(self, factors: pd.DataFrame, flip: str | None = None, **columns: float) -> pd.DataFrame:
        """The same table with columns set to other values; `flip` turns a 0/1 column over."""
        changed = factors.copy()
        if flip is not None:
            changed[flip] = 1 - changed[flip]
        for name, value in columns.items():
            if name not in changed:
                raise KeyError(f"{self.name} has no factor {name!r}; it has {', '.join(changed.columns)}")
            changed[name] = value
        return changed

    def change(self, factors: pd.DataFrame, factor: str, size: int | None = None) -> Tensor:
        """Signed pixel change [N, 3, H, W] that turning over one 0/1 factor would make."""
        before = self.render(factors, size).images
        after = self.render(self.intervene(factors, flip=factor), size).images
        return after - before

    def label_changes(self, factors: pd.DataFrame, size: int | None = None) -> list[Tensor]:
        """Signed pixel changes [N, 3, H, W] by which the label could show: here, the one of turning it over."""
        return [self.change(factors, "label", size)]

    def region(self, factors: pd.DataFrame, factor: str, size: int | None = None) -> Tensor:
        """Where a 0/1 factor shows: pixels that would visibly change were it turned over, [N, 1, H, W] of bool."""
        return self.change(factors, factor, size).abs().amax(dim=1, keepdim=True) > VISIBLE_CHANGE


def _column(values: pd.Series) -> Tensor:
    array = values.to_numpy()
    dtype = torch.int64 if np.issubdtype(array.dtype, np.integer) else torch.float32
    return torch.tensor(array, dtype=dtype)[:, None, None]
