"""What is compared with what: the rows of the tables, and the settings that each method is tuned over."""

from dataclasses import dataclass
from typing import Any

from engine.errors import InputError
from engine.methods import DEFAULT, METHODS, method_named
from worlds.store import LATENT, PIXEL

K = 2
TRIALS = 6
CALIBRATION_IMAGES = 12
SPACES = {"latent": LATENT, "pixel": PIXEL}
"""What a row's prior is called, and which part of the world's weights it is."""

IN_PIXELS = ("dime", "fastdime", "fastdime-2", "fastdime-2+", "ace", "sce")
"""Methods whose authors ran them on a diffusion over pixels."""
SOURCES: dict[str, str] = {
    "vanilla": "Vanilla gradient",
    "smoothgrad": "SmoothGrad",
    "smoothdiff": "SmoothDiff",
    "ig": "Integrated gradients (IG)",
    "smoothgrad_ig": "SmoothGrad × IG",
    "smoothdiff_ig": "SmoothDiff × IG",
    "path_gradient": "IG without its factor: path gradient",
    "surrogate": "Smoothed classifier",
}
MEMORY: dict[str, dict[str, Any]] = {"ace": {"micro_batch": 4}, "sce": {"micro_batch": 4}}
"""Back-propagation through whole chains holds all of their activations."""
SHORT: dict[str, dict[str, Any]] = {
    **{name: {"steps": 50} for name in ("dime", "fastdime", "fastdime-2", "fastdime-2+")},
    "ace": {"iterations": (25,), "step_size": 2 / 255},
    "sce": {"steps": 33, "iterations": (25,)},
}
"""Schedules of --short: a quarter of DiME's steps, half of ACE's and SCE's iterations. The tables say so. ACE's steps
are twice as long then: 25 of 1/255 end before the portraits student is flipped, 50 of them or 25 of 2/255 do not."""

SURE: dict[str, Any] = {
    "steps": 20,
    "normalise": True,
    "lambda1": 0.5,
    "proximity": "estimate",
    "blur": 2.0,
    "mask_reference": "reconstruction",
    "prune": True,
    "escalation": (1.0, 1.5, 2.25, 3.4, 5.0),
}
"""SCE-LITE-HQ with a normalised gradient and an edit pruned to what a sure flip needs.

A second counterfactual may use only what the first left alone, and needs more force: five tries in place of three."""
THINGS: dict[str, Any] = {
    **SURE,
    "guidance_schedule": "constant",
    "eta": 0.3,
    "gradient_blur": 1.0,
    "outline": 3.0,
    "feather": 1.5,
    "redraw": 1,
    "redraw_regions": (0.25,),
    "redraw_fade": 1.5,
}
"""The same for features that are things, as hair is: few and even pushes say where, and the prior draws what, pushed
little."""
STAINS: dict[str, Any] = {**SURE, "strength": 0.2, "gradient_blur": 8.0, "tau": 0.1, "outline": 8.0, "feather": 2.0}
"""The same for features that lie all over a picture, as a stain does: small pushes along a smoothed gradient, and a
border so soft that no second stain stands beside the first."""
STRONG, FIERCE = (20.0, 40.0, 80.0), (100.0, 300.0, 900.0)
"""Guidance beyond the authors': a rectified flow has far less posterior variance, by which it is multiplied."""
CANDIDATES: dict[str, tuple[dict[str, Any], ...]] = {
    DEFAULT: (
        {},
        {**THINGS, "strength": 0.5, "redraw_eta": 0.3},
        {**THINGS, "strength": 0.6, "redraw_eta": 0.3},
        {**THINGS, "strength": 0.5, "redraw_eta": 0.5},
        {**STAINS, "eta": 0.25},
        {**STAINS, "eta": 0.35},
    ),
    "dime": (
        {},
        {"guidance": STRONG},
        {"guidance": FIERCE},
        {"guidance": STRONG, "strength": 0.2},
        {"guidance": FIERCE, "strength": 0.2},
        {"guidance": STRONG, "strength": 0.4},
    ),
    **dict.fromkeys(
        ("fastdime", "fastdime-2", "fastdime-2+"),
        (
            {},
            {"guidance": STRONG},
            {"guidance": FIERCE},
            {"guidance": STRONG, "strength": 0.5},
            {"guidance": FIERCE, "strength": 0.5},
            {"guidance": FIERCE, "strength": 0.5, "threshold": 0.3},
        ),
    ),
    "ace": (
        {},
        {"dilation": 5},
        {"step_size": 2 / 255, "threshold": 0.3},
        {"strength": 0.2},
        {"strength": 0.2, "step_size": 2 / 255, "dilation": 5},
        {"step_size": 2 / 255, "dilation": 5, "threshold": 0.3},
    ),
    "sce": (
        {},
        {"rate": 30.0},
        {"rate": 10.0},
        {"rate": 3.0},
        {"rate": 10.0, "dilation": 7},
        {"rate": 30.0, "dilation": 7, "strength": 0.15},
    ),
    "diffeocf": (
        {},
        {"rate": 0.02},
        {"rate": 0.05},
        {"confidence": 0.9},
        {"rate": 0.02, "confidence": 0.9},
        {"composite": "decoded"},
    ),
    "dive": (
        {},
        {"rate": 0.02},
        {"rate": 0.1},
        {"lasso": 1e-2},
        {"rate": 0.1, "lasso": 1e-2},
        {"diversity": 0.1},
    ),
}
"""The settings each method is tried with, as changes of its defaults: those themselves first, then as many others for
all. SCE-LITE-HQ starts from Recipe(), not from the recipe that is shipped with a world."""


@dataclass(frozen=True)
class Row:
    """One line of a table: a method on a prior."""

    method: str
    space: str  # "latent" or "pixel"

    @classmethod
    def of(cls, text: str) -> "Row":
        """`dime` is DiME where its authors ran it, `dime@latent` is DiME on the world's latent prior."""
        name, at, space = text.partition("@")
        own = "pixel" if method_named(name).name in IN_PIXELS else "latent"
        if at and space not in ("latent", "pixel"):
            raise InputError(f"{text!r:.80}: a method runs @latent or @pixel.")
        return cls(name, space if at else own)

    @property
    def name(self) -> str:
        """The key in JSON."""
        return self.method if Row.of(self.method) == self else f"{self.method}@{self.space}"

    @property
    def title(self) -> str:
        """In tables."""
        return METHODS[self.method].title + ("" if Row.of(self.method) == self else f" ({self.space})")


ROWS = (*METHODS, *(f"{name}@latent" for name in IN_PIXELS))
