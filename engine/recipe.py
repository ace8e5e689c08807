"""The settings of SCE-LITE-HQ as one frozen record; it holds no run state."""

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from engine.settings import Settings

GradientName = Literal[
    "surrogate",
    "vanilla",
    "smoothgrad",
    "smoothdiff",
    "ig",
    "smoothgrad_ig",
    "smoothdiff_ig",
    "path_gradient",
]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Recipe(Settings):
    """Every setting of a counterfactual run; the defaults are the readings this project has chosen."""

    # The walk through the generator.
    steps: int = Field(15, ge=1, le=1000, description="length of the full schedule")
    strength: float = Field(0.6, gt=0, le=1, description="share of the schedule that is executed")
    estimate: Literal["pre", "paper"] = Field("pre", description="z_hat before the step, or after it as printed")
    # From much noise a walk ends at another picture, guided or not; only what guidance adds is wanted.
    drift: Literal["kept", "cancelled"] = Field(
        "kept", description="whether the walk goes where it would without guidance, or stays at z0 there; paper: kept"
    )

    # The guidance z <- z - eta·(beta·g_smooth + proximity).
    eta: float = Field(1.0, ge=0, description="step size of the guidance")
    beta: float = Field(1.0, ge=0, description="weight of the classifier gradient")
    guidance_schedule: Literal["sigma", "constant"] = Field("sigma", description="eta times sigma_t, or eta")
    guide_last_step: bool = Field(False, description="push in the last step too, as printed")
    guide_above: float = Field(0.0, ge=0, lt=1, description="noise level up to which nothing is pushed; paper: 0")
    normalise: bool = Field(False, description="bring each sample's classifier gradient to root mean square 1")
    gradient_blur: float = Field(0.0, ge=0, description="standard deviation that smooths the gradient, in latent cells")
    clip: Positive | None = Field(None, description="largest L2 norm of one sample's classifier gradient")
    loss: Literal["cross_entropy", "target_logit"] = "cross_entropy"
    temperature: float = Field(1.0, gt=0, description="logits are divided by it inside the loss")
    gradient: GradientName = Field("surrogate", description="where the classifier gradient comes from")
    gradient_samples: int = Field(8, ge=1, le=256, description="noisy copies of the smoothed gradient sources")
    gradient_noise: float = Field(0.1, ge=0, description="standard deviation of that noise, in image units")
    gradient_points: int = Field(8, ge=1, le=256, description="points on the line of the integrated sources")

    # Proximity to z0.
    lambda1: float = Field(0.0, ge=0, description="weight of the L1 term")
    lambda2: float = Field(0.0, ge=0, description="weight of the per-position L2 norms")
    proximity: Literal["latent", "estimate"] = Field("latent", description="acts on z_t as printed, or on z_hat")

    # Masks.
    tau: float = Field(0.15, ge=0, le=2, description="relative threshold; 0 freezes nothing, above 1 everything")
    blur: float = Field(4.0, ge=0, description="standard deviation of Psi's Gaussian, in pixels")
    # From the first step on, as printed, the mask sees estimates that guidance has not reached yet and pastes its first
    # pushes away; FastDiME masks the second half only.
    mask_start: float = Field(0.5, ge=0, le=1, description="share of the executed steps before Phase I; paper: 0")
    mask_reference: Literal["image", "reconstruction"] = Field("image", description="Psi compares with x0 or D(E(x0))")
    downsampling: Literal["all", "nearest"] = Field("all", description="a cell is frozen if all its pixels are")
    paste: Literal["renoised", "clean"] = Field("renoised", description="what is put into frozen cells")
    feather: float = Field(1.0, ge=0, description="standard deviation of the composite's soft rim, in pixels")
    outline: float = Field(
        0.0, ge=0, description="standard deviation that smooths the border of a pruned or harmonised edit, in pixels"
    )
    composite: Literal["decoded", "difference"] = Field(
        "decoded", description="blend D(z) into x0, or add D(z) - D(E(x0)) to x0"
    )
    prune: bool = Field(False, description="give back what the flip does not need; the paper does not")
    second_pass: bool = Field(False, description="walk again inside the edit alone and keep that if it flips too")
    redraw: int = Field(0, ge=0, le=64, description="random walks that draw a flipped edit anew, per region; 0: none")
    redraw_eta: float = Field(1.0, ge=0, description="push of such a walk on z_hat, relative to the gradient's RMS")
    redraw_blur: float = Field(3.0, ge=0, description="standard deviation that rounds the edit's region, in pixels")
    redraw_regions: tuple[Share, ...] = Field(
        (0.5, 0.25), min_length=1, max_length=16, description="thresholds of the rounded edit, smallest region first"
    )
    redraw_fade: float = Field(1.0, ge=0, description="standard deviation of the rim inside the region, in pixels")
    surprise_limit: Positive | None = Field(
        None, description="a later counterfactual that surprises the prior more, relative to x0, is not handed out"
    )
    harmonise: tuple[Share, ...] = Field(
        (), max_length=16, description="noise levels, the largest first, from which a flipped edit is walked unguided"
    )

    # Tries and diversity.
    escalation: tuple[Positive, ...] = Field((1.0, 1.5, 2.25), min_length=1, max_length=16)
    margin: float | None = Field(0.5, ge=0, lt=1, description="lead of the target's probability for early stop")
    k: int = Field(1, ge=1, le=64, description="counterfactuals per image")
    seed: int = Field(0, ge=0, lt=2**63)

    # Memory.
    micro_batch: int | None = Field(None, ge=1, description="samples per network or decoder call; none = all")
    checkpoint: bool = Field(False, description="recompute the decoder's activations in its backward pass")

    def __init__(self, **settings: Any) -> None:
        # Type checkers do not see defaults that Field takes by position, and would ask for every setting.
        super().__init__(**settings)

    @field_validator("escalation")
    @classmethod
    def _climbs(cls, escalation: tuple[float, ...]) -> tuple[float, ...]:
        if any(late <= early for early, late in pairwise(escalation)):
            raise ValueError("should grow from try to try")
        return escalation

    @field_validator("harmonise", "redraw_regions")
    @classmethod
    def _falls(cls, strengths: tuple[float, ...]) -> tuple[float, ...]:
        if any(late >= early for early, late in pairwise(strengths)):
            raise ValueError("should fall from try to try")
        return strengths

    @property
    def needs_reconstruction(self) -> bool:
        """Whether D(E(x0)) has to be decoded once per image."""
        return self.mask_reference == "reconstruction" or self.composite == "difference"
