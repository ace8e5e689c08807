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
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.counterfactual import CancelToken, CounterfactualSet, Progress
from engine.errors import RecipeError
from engine.guidance import Model
from engine.loop import counterfactuals
from engine.methods.ace import AceSettings, ace
from engine.methods.diffeocf import DiffeoSettings, diffeocf
from engine.methods.dime import DimeSettings, dime
from engine.methods.dive import DiveSettings, dive
from engine.methods.fastdime import FastDimeSettings, fastdime
from engine.methods.sce import SceSettings, sce
from engine.methods.search import MethodSettings, Perceptual
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime import Runtime

__all__ = ["DEFAULT", "METHODS", "AnySettings", "Method", "MethodSettings", "method_named"]

DEFAULT = "sce-lite-hq"
AnySettings = Recipe | MethodSettings
"""The settings of any method. All have k, seed, steps, strength, gradient, micro_batch and checkpoint."""
WHICH = ("method", "variant")
"""Settings that say which method they belong to."""


@dataclass(frozen=True)
class Method:
    """A way to make counterfactuals, with the settings of its authors."""

    name: str
    title: str
    defaults: AnySettings
    function: Callable[..., list[CounterfactualSet]]
    runs_graphs: bool = False
    """Whether its networks may run elsewhere than in eager torch, and inside a memory budget."""

    def __call__(
        self,
        prior: Prior,
        f: Model,
        f_hat: Model | None,
        x0: Tensor,
        targets: Sequence[int] | Tensor,
        settings: AnySettings | None = None,
        seeds: Sequence[int] | None = None,
        *,
        runtime: Runtime | None = None,
        perceptual: Perceptual | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancel: CancelToken | None = None,
    ) -> list[CounterfactualSet]:
        """Counterfactuals of a batch of images, as `engine.loop.counterfactuals` gives them.

        `perceptual` is a distance between images that methods with a perceptual loss use; without it they go without.
        """
        settings = self.defaults if settings is None else settings
        self.check(settings)
        if runtime is not None:
            self.check_runtime(type(runtime).__name__)
        options: dict[str, Any] = {} if runtime is None else {"runtime": runtime}
        options |= {"perceptual": perceptual, "progress": progress, "cancel": cancel}
        return self.function(prior, f, f_hat, x0, targets, settings, seeds, **options)

    def check(self, settings: object) -> None:
        """A RecipeError unless these are settings of this method."""
        if type(settings) is not type(self.defaults):
            raise RecipeError(
                f"The method {self.name} takes {type(self.defaults).__name__}, not {type(settings).__name__}; "
                "start from its own defaults."
            )
        for name in WHICH:
            own, given = (getattr(of, name, None) for of in (self.defaults, settings))
            if own != given:
                raise RecipeError(
                    f"These settings have the {name} {given!r}; that of the method {self.name} is {own!r}."
                )

    def check_runtime(self, name: str) -> None:
        """A RecipeError unless the method can run on the runtime of this name."""
        if not self.runs_graphs and name not in ("auto", "torch"):
            raise RecipeError(f"The method {self.name} runs in eager torch alone, not on {name}; only {DEFAULT} does.")

    def load(self, file: Path | str) -> AnySettings:
        """The settings of this method in a JSON file; what the file leaves out is as its authors have it."""
        found = type(self.defaults).load(file)
        given = {name: getattr(found, name) for name in found.model_fields_set}
        which = {name: getattr(self.defaults, name) for name in WHICH if hasattr(self.defaults, name)}
        found = self.defaults.changed(**{**which, **given})
        self.check(found)
        return found


def _sce_lite_hq(*arguments: Any, perceptual: Perceptual | None = None, **options: Any) -> list[CounterfactualSet]:
    return counterfactuals(*arguments, **options)  # it has no perceptual loss


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(DEFAULT, "SCE-LITE-HQ", Recipe(), _sce_lite_hq, runs_graphs=True),
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
