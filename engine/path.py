"""Paths between data and noise, z_t = a_t·z_0 + b_t·eps, for rectified flow and for diffusion.

Shapes: B batch, C latent channels, h w latent size, N executed steps.
    z, z0, eps, out   [B, C, h, w]
    a, b              [N + 1]   entry i is the level before step i; entry N is the clean end
    timesteps         [N]       what the network is told at step i

Tables are tensors on the device of the latents and are indexed by the step number, so a loop over a path moves nothing
between host and device and can be captured as one CUDA graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import signature
from typing import Any, Self

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from engine.errors import PriorError, RecipeError

PREDICTIONS = ("epsilon", "v_prediction", "sample")


class Path(ABC):
    """A table of a_t, b_t and timesteps, from the chosen noise level down to data."""

    def __init__(self, a: Tensor, b: Tensor, timesteps: Tensor) -> None:
        if a.shape != b.shape or a.shape[0] != timesteps.shape[0] + 1:
            raise ValueError("a path of N steps has N + 1 levels and N timesteps")
        self.a, self.b, self.timesteps = a, b, timesteps

    @property
    def length(self) -> int:
        """The number of steps that are executed."""
        return int(self.timesteps.shape[0])

    def to(self, device: torch.device | str) -> Self:
        """The tables live on `device`."""
        self.a, self.b, self.timesteps = (t.to(device) for t in (self.a, self.b, self.timesteps))
        return self

    def sigma(self, i: int) -> Tensor:
        """The share of noise b_t at level i: sigma for rectified flow, sqrt(1 - alpha_bar) for diffusion."""
        return self.b[i]

    def noise(self, z0: Tensor, eps: Tensor, i: int) -> Tensor:
        """z_t = a_t·z_0 + b_t·eps at level i."""
        return self.a[i] * z0 + self.b[i] * eps

    @abstractmethod
    def estimate(self, z: Tensor, out: Tensor, i: int) -> Tensor:
        """The one-step estimate of z_0 from the state z and the network's output at step i."""

    @abstractmethod
    def step(self, z: Tensor, out: Tensor, i: int) -> Tensor:
        """The state at level i + 1 from the state z and the network's output at step i."""


class RectifiedFlow(Path):
    """A straight path, a_t = 1 - sigma and b_t = sigma, walked by Euler steps along the predicted velocity."""

    def __init__(self, sigmas: Tensor, timesteps: Tensor) -> None:
        super().__init__(1.0 - sigmas, sigmas, timesteps)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], steps: int, strength: float, tokens: int | None = None
    ) -> "RectifiedFlow":
        """The levels of the model's own Euler scheduler; a dynamic shift needs the number of image tokens."""
        if config.get("invert_sigmas"):
            raise PriorError("The scheduler inverts its sigmas; only schedules that end at sigma = 0 can be run.")
        scheduler: Any = FlowMatchEulerDiscreteScheduler.from_config(dict(config))
        first = first_step(steps, strength)
        if config.get("use_dynamic_shifting"):
            if tokens is None:
                raise PriorError("The scheduler shifts by resolution; the number of image tokens has to be given.")
            scheduler.set_timesteps(steps, mu=dynamic_shift(config, tokens))
        else:
            scheduler.set_timesteps(steps)
        return cls(scheduler.sigmas[first:].float(), scheduler.timesteps[first:].float())

    def estimate(self, z: Tensor, out: Tensor, i: int) -> Tensor:
        """z_hat = z_t - sigma_t·v."""
        return z - self.b[i] * out

    def step(self, z: Tensor, out: Tensor, i: int) -> Tensor:
        """z + (sigma_next - sigma)·v; the difference is negative because data lies at sigma = 0."""
        return z + (self.b[i + 1] - self.b[i]) * out


class Diffusion(Path):
    """A variance-preserving path, a_t = sqrt(alpha_bar) and b_t = sqrt(1 - alpha_bar), walked by DDIM with eta = 0."""

    def __init__(
        self, alphas_bar: Tensor, timesteps: Tensor, prediction: str = "epsilon", clip_range: float | None = None
    ) -> None:
        super().__init__(alphas_bar.sqrt(), (1.0 - alphas_bar).sqrt(), timesteps)
        if prediction not in PREDICTIONS:
            raise PriorError(f"Prediction type {prediction!r} is not one of {', '.join(PREDICTIONS)}.")
        if prediction == "epsilon" and bool(alphas_bar[0] <= 0):
            raise PriorError("A network that predicts noise cannot start at zero signal; choose a strength below 1.")
        self.prediction, self.clip_range = prediction, clip_range

    @classmethod
    def from_config(cls, config: Mapping[str, Any], steps: int, strength: float) -> "Diffusion":
        """The levels of a DDIM, DDPM or PNDM scheduler config, walked deterministically.

        The next level of a step is that of the next timestep in the table, which is what the network is told then; for
        "leading" spacing this is exactly what DDIMScheduler does.
        """
        if config.get("thresholding"):
            raise PriorError("Dynamic thresholding in the scheduler is not supported.")
        known = signature(DDIMScheduler.__init__).parameters
        settings = {name: value for name, value in config.items() if name in known}
        # Samplers made for latents (PNDM) have no such setting and never clip; DDIM's own default would.
        settings.setdefault("clip_sample", config.get("_class_name") in ("DDIMScheduler", "DDPMScheduler"))
        scheduler: Any = DDIMScheduler(**settings)
        if steps > scheduler.config.num_train_timesteps:
            raise RecipeError(f"steps is {steps}, but the prior knows only {scheduler.config.num_train_timesteps}.")
        scheduler.set_timesteps(steps)
        timesteps = scheduler.timesteps[first_step(steps, strength) :]
        alphas_bar = torch.cat([scheduler.alphas_cumprod[timesteps], scheduler.final_alpha_cumprod.reshape(1)])
        clip_range = float(scheduler.config.clip_sample_range) if scheduler.config.clip_sample else None
        return cls(alphas_bar.float(), timesteps, scheduler.config.prediction_type, clip_range)

    def estimate(self, z: Tensor, out: Tensor, i: int) -> Tensor:
        """z_hat = (z_t - b_t·eps) / a_t, the same quantity for other predictions; clipped as the config says."""
        if self.prediction == "epsilon":
            z_hat = (z - self.b[i] * out) / self.a[i]
        elif self.prediction == "v_prediction":
            z_hat = self.a[i] * z - self.b[i] * out
        else:
            z_hat = out
        return z_hat if self.clip_range is None else z_hat.clamp(-self.clip_range, self.clip_range)

    def step(self, z: Tensor, out: Tensor, i: int) -> Tensor:
        """a_next·z_hat + b_next·eps."""
        if self.prediction == "epsilon":
            eps = out
        elif self.prediction == "v_prediction":
            eps = self.a[i] * out + self.b[i] * z
        else:
            eps = (z - self.a[i] * out) / self.b[i]
        return self.a[i + 1] * self.estimate(z, out, i) + self.b[i + 1] * eps


def first_step(steps: int, strength: float) -> int:
    """The index at which a schedule of `steps` steps is entered so that the last `strength` share of it is executed.

    This is the rule of image-to-image pipelines: 15 steps at strength 0.6 execute 9 network calls.
    """
    if steps < 1:
        raise RecipeError(f"steps is {steps}; it has to be at least 1.")
    if not 0.0 < strength <= 1.0:
        raise RecipeError(f"strength is {strength}; it has to lie in (0, 1].")
    return int(max(steps - min(steps * strength, steps), 0))


def dynamic_shift(config: Mapping[str, Any], tokens: int) -> float:
    """The shift mu of a resolution-dependent schedule: linear in the number of image tokens."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (top - base) / (high - low)
    return float(base + slope * (tokens - low))
