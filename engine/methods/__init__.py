"""Methods that make counterfactuals, under one call: SCE-LITE-HQ and the baselines it is compared with.

    sce-lite-hq   guided walk through a pretrained generator (engine.loop)
    dime          guided reverse diffusion, a full chain for every gradient
    fastdime      the same with the one-step estimate; fastdime-2 and fastdime-2+ walk twice
    ace           attack through a denoising filter, then RePaint
    sce           descent through a denoising filter by the smoothed surrogate, then RePaint
    diffeocf      gradient ascent in an autoencoder's latent space
    dive          several perturbations of a latent at once

All run on any `Prior`, latent or pixel-space, and return `CounterfactualSet`s with their cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.errors import RecipeError
from engine.guidance import Model
from engine.loop import CancelToken, CounterfactualSet, Progress, counterfactuals
from engine.methods.ace import AceSettings, ace
from engine.methods.diffeocf import DiffeoSettings, diffeocf
from engine.methods.dime import DimeSettings, dime
from engine.methods.dive import DiveSettings, dive
from engine.methods.fastdime import FastDimeSettings, fastdime
from engine.methods.sce import SceSettings, sce
from engine.methods.search import MethodSettings, Perceptual
from engine.prior import Prior
from engine.recipe import Recipe
from engine.settings import Settings

__all__ = ["DEFAULT", "METHODS", "Method", "MethodSettings", "method_named"]

DEFAULT = "sce-lite-hq"


@dataclass(frozen=True)
class Method:
    """A way to make counterfactuals, with the settings of its authors."""

    name: str
    title: str
    defaults: Settings
    function: Callable[..., list[CounterfactualSet]]

    def __call__(
        self,
        prior: Prior,
        f: Model,
        f_hat: Model | None,
        x0: Tensor,
        targets: Sequence[int] | Tensor,
        settings: Settings | None = None,
        seeds: Sequence[int] | None = None,
        *,
        perceptual: Perceptual | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancel: CancelToken | None = None,
    ) -> list[CounterfactualSet]:
        """Counterfactuals of a batch of images, as `engine.loop.counterfactuals` gives them.

        `perceptual` is a distance between images that methods with a perceptual loss use; without it they go without.
        """
        settings = self.defaults if settings is None else settings
        if type(settings) is not type(self.defaults):
            raise RecipeError(
                f"The method {self.name} takes {type(self.defaults).__name__}, not {type(settings).__name__}; "
                "start from its own defaults."
            )
        return self.function(
            prior, f, f_hat, x0, targets, settings, seeds, perceptual=perceptual, progress=progress, cancel=cancel
        )


def _sce_lite_hq(*arguments: Any, perceptual: Perceptual | None = None, **options: Any) -> list[CounterfactualSet]:
    return counterfactuals(*arguments, **options)  # it has no perceptual loss


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(DEFAULT, "SCE-LITE-HQ", Recipe(), _sce_lite_hq),
        Method("dime", "DiME", DimeSettings(), dime),
        Method("fastdime", "FastDiME", FastDimeSettings(), fastdime),
        Method("fastdime-2", "FastDiME-2", FastDimeSettings(variant="2"), fastdime),
        Method("fastdime-2+", "FastDiME-2+", FastDimeSettings(variant="2+"), fastdime),
        Method("ace", "ACE", AceSettings(), ace),
        Method("sce", "SCE", SceSettings(), sce),
        Method("diffeocf", "DiffeoCF", DiffeoSettings(), diffeocf),
        Method("dive", "DiVE", DiveSettings(), dive),
    )
}


def method_named(name: str) -> Method:
    """The method of a name, or a RecipeError that lists those there are."""
    if name not in METHODS:
        raise RecipeError(f"There is no method {name!r:.80}; there are {', '.join(METHODS)}.")
    return METHODS[name]
