"""Paths against diffusers' schedulers and against the closed form for Gaussian data."""

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from engine.errors import PriorError, RecipeError
from engine.path import Diffusion, Path, RectifiedFlow, dynamic_shift, first_step

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
DIFFUSION = {
    "_class_name": "DDIMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.0015,
    "beta_end": 0.0195,
    "clip_sample": False,
}


def toy(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A network stand-in that depends on state and time."""
    return torch.sin(z) + t.float() / 1000


@pytest.mark.parametrize("config", [FLOW, {**FLOW, "shift": 1.0}, {**FLOW, "use_karras_sigmas": True}])
def test_rectified_flow_walks_like_the_euler_scheduler(config: dict) -> None:
    steps, strength = 10, 0.65
    path = RectifiedFlow.from_config(config, steps, strength)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    scheduler.set_timesteps(steps)
    begin = first_step(steps, strength)
    scheduler.set_begin_index(begin)
    z0, eps = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    theirs = scheduler.scale_noise(z0, scheduler.timesteps[begin : begin + 1], eps)
    ours = path.noise(z0, eps, 0)
    torch.testing.assert_close(ours, theirs)
    assert path.length == steps - begin
    for i, t in enumerate(scheduler.timesteps[begin:]):
        assert path.timesteps[i] == t
        ours = path.step(ours, toy(ours, path.timesteps[i]), i)
        theirs = scheduler.step(toy(theirs, t), t, theirs).prev_sample
    torch.testing.assert_close(ours, theirs)


def test_dynamic_shift_depends_on_the_number_of_tokens() -> None:
    config = {**FLOW, "use_dynamic_shifting": True, "shift": 1.0}
    assert dynamic_shift(config, 256) == pytest.approx(0.5)
    assert dynamic_shift(config, 4096) == pytest.approx(1.15)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    scheduler.set_timesteps(8, mu=dynamic_shift(config, 1024))
    torch.testing.assert_close(RectifiedFlow.from_config(config, 8, 1.0, tokens=1024).b, scheduler.sigmas)
    with pytest.raises(PriorError, match="tokens"):
        RectifiedFlow.from_config(config, 8, 1.0)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("extra", [{}, {"set_alpha_to_one": False, "steps_offset": 1}, {"clip_sample": True}])
def test_diffusion_walks_like_ddim(prediction: str, extra: dict) -> None:
    config = {**DIFFUSION, "prediction_type": prediction, **extra}
    steps, strength = 20, 0.5
    path = Diffusion.from_config(config, steps, strength)
    scheduler = DDIMScheduler.from_config(config)
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps[first_step(steps, strength) :]
    z0, eps = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    ours = path.noise(z0, eps, 0)
    theirs = scheduler.add_noise(z0, eps, timesteps[:1])
    torch.testing.assert_close(ours, theirs)
    for i, t in enumerate(timesteps):
        out = toy(theirs, t)
        step = scheduler.step(out, t, theirs, eta=0.0)
        torch.testing.assert_close(path.estimate(theirs, out, i), step.pred_original_sample)
        ours = path.step(ours, toy(ours, path.timesteps[i]), i)
        theirs = step.prev_sample
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "path",
    [
        RectifiedFlow.from_config(FLOW, 12, 0.8),
        Diffusion.from_config(DIFFUSION, 12, 0.8),
        Diffusion.from_config({**DIFFUSION, "prediction_type": "v_prediction"}, 12, 0.8),
    ],
)
def test_the_exact_network_of_gaussian_data_gives_the_posterior_mean(path: Path) -> None:
    mean, spread = 0.7, 0.4
    z = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    for i in range(path.length):
        a, b = path.a[i].double(), path.b[i].double()
        posterior = mean + spread**2 * a / (a**2 * spread**2 + b**2) * (z - a * mean)
        eps = (z - a * posterior) / b
        if isinstance(path, RectifiedFlow):
            out = eps - posterior
        else:
            assert isinstance(path, Diffusion)
            out = eps if path.prediction == "epsilon" else a * eps - b * posterior
        assert (path.estimate(z, out, i) - posterior).abs().max() < 1e-6


def test_the_end_of_a_flow_is_the_data_to_the_bit() -> None:
    path = RectifiedFlow.from_config(FLOW, 5, 1.0)
    z0 = torch.randn(1, 2, 3, 3)
    assert torch.equal(path.noise(z0, torch.randn(1, 2, 3, 3), path.length), z0)
    assert path.sigma(0) == path.b[0] == path.timesteps[0] / 1000


def test_a_ddpm_config_is_walked_without_noise() -> None:
    path = Diffusion.from_config({"_class_name": "DDPMScheduler", "num_train_timesteps": 100}, 10, 1.0)
    assert path.length == 10 and path.clip_range == 1.0 and path.b[-1] == 0
    latent = {"_class_name": "PNDMScheduler", "skip_prk_steps": True}
    assert Diffusion.from_config(latent, 10, 1.0).clip_range is None


def test_what_cannot_be_walked_is_refused() -> None:
    with pytest.raises(RecipeError, match="strength"):
        first_step(10, 0.0)
    with pytest.raises(RecipeError, match="steps"):
        first_step(0, 0.5)
    with pytest.raises(RecipeError, match="1000"):
        Diffusion.from_config(DIFFUSION, 2000, 0.5)
    with pytest.raises(PriorError, match="inverts"):
        RectifiedFlow.from_config({**FLOW, "invert_sigmas": True}, 4, 1.0)
    with pytest.raises(PriorError, match="thresholding"):
        Diffusion.from_config({**DIFFUSION, "thresholding": True}, 4, 1.0)
    with pytest.raises(PriorError, match="zero signal"):
        config = {**DIFFUSION, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        Diffusion.from_config(config, 4, 1.0)
