"""Procedural image worlds with known truth, their small priors and classifiers."""

from worlds.histology import Histology
from worlds.portraits import Portraits
from worlds.world import Sample, World

WORLDS: dict[str, World] = {world.name: world for world in (Portraits(), Histology())}
"""The embedded worlds by name."""

__all__ = ["WORLDS", "Histology", "Portraits", "Sample", "World"]
