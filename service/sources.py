"""What the words of the command line mean: embedded priors by name, folders, and pictures to distil on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.prior import Prior
    from engine.recipe import Recipe

N_PICTURES = 2000
PICTURE_SEED = 700_001
AUTO = "auto"


@dataclass(frozen=True)
class PriorSource:
    """A prior that was found, the recipe that goes with it, and the embedded world it belongs to, if any."""

    name: str
    prior: Prior
    recipe: Recipe
    size: int

    def pictures(self, data: Path | None, n: int = N_PICTURES) -> Tensor:
        """Pictures to distil surrogates on: those of a folder, of the embedded world, or samples of the prior."""
        from audit.images import read_folder
        from engine.sampling import generate
        from worlds.store import embedded_prior

        if data is not None:
            return read_folder(data, self.size, limit=n)
        if found := embedded_prior(self.name):
            return found[0].sample(n, PICTURE_SEED, self.size).images
        return generate(self.prior, n, self.size, seed=PICTURE_SEED)

    def pictures_to_try(self, data: Path | None, n: int) -> tuple[Tensor, Tensor]:
        """(n pictures to try settings on, others to distil on)."""
        from worlds.store import embedded_prior

        if data is None and (embedded := embedded_prior(self.name)):
            return embedded[0].sample(n, PICTURE_SEED + 1, self.size).images, self.pictures(None)
        found = self.pictures(data, N_PICTURES + n)
        if len(found) < 4 * n:
            raise InputError(f"{len(found)} images are too few: --n {n} needs at least {4 * n}.")
        return found[:n], found[n:]


def open_source(
    name: str, *, recipe: Path | None = None, revision: str | None = None, for_audit: bool = False
) -> PriorSource:
    """An embedded prior by its name, such as portraits or portraits-pixel, or any other by its folder or hub id.

    Embedded priors bring a recipe, and some another one for audits.
    """
    from engine.prior import load_prior
    from engine.recipe import Recipe
    from worlds.store import embedded_prior, open_audit_recipe, open_prior, open_recipe

    if found := embedded_prior(name):
        world, part = found
        own = open_audit_recipe if for_audit else open_recipe
        settings = Recipe.load(recipe) if recipe else own(world, part)
        return PriorSource(name, open_prior(world, part=part), settings, world.size)
    prior = load_prior(name, revision=revision)
    if prior.image_size is None:
        raise InputError(f"The prior {name} does not say its image size.")
    return PriorSource(name, prior, Recipe.load(recipe) if recipe else Recipe(), prior.image_size)


def closest_embedded(image: Tensor) -> str:
    """The embedded world whose autoencoder rebuilds an image best; an InputError if none knows such pictures."""
    from audit.images import to_square
    from engine.sampling import reconstruct
    from worlds import WORLDS
    from worlds.store import open_prior

    errors = {}
    for name, world in WORLDS.items():
        x = to_square(image, world.size)[None]
        errors[name] = float((reconstruct(open_prior(world), x) - x).square().mean())
    best = min(errors, key=lambda name: errors[name])
    if errors[best] > 0.003:  # a peak signal-to-noise ratio of 25 dB
        raise InputError("No embedded prior knows such pictures; name one with --prior.")
    return best
