"""The two small foundation models: their networks from config, and how each is trained.

Portraits get a rectified flow (SD3-type transformer, Euler steps); histology gets a diffusion (ε-prediction UNet,
DDIM). Both work on 4×16×16 latents of a small autoencoder, are unconditional, and see unpoisoned data only.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderTiny,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    UNet2DModel,
)
from torch import Tensor, nn

from worlds.training import fit, generator
from worlds.world import World

LATENT_CHANNELS = 4
LATENT_SIZE = 16
LATENT_NOISE = 0.05
NULL_TOKENS = 1
PROMPT_WIDTH = 32
TRAINING_IMAGES = {"portraits": 40_000, "histology": 20_000}
AUTOENCODER_STEPS = {"portraits": 3_500, "histology": 2_500}
DECODER_STEPS = 4_000
NETWORK_CYCLES = {"portraits": (5_500, 3_500), "histology": (3_000, 3_200, 4_000, 2_500)}
MAXIMUM_WEIGHT = 100.0
LIGHT_BLOCKS = (4, 2, 0)
"""Residual blocks of the shipped decoder at 16, 32 and 64 px."""


def training_images(world: World) -> Tensor:
    """Unpoisoned pictures as bytes, [N, 3, H, W]."""
    step = 2_000
    seeds = range(TRAINING_IMAGES[world.name] // step)
    return torch.cat([world.sample(step, seed).images.mul(255).round().byte() for seed in seeds])


def autoencoder(decoder_blocks: tuple[int, int, int] = (2, 2, 1)) -> AutoencoderTiny:
    """A fully convolutional autoencoder, 64 px to 4×16×16."""
    width = (32, 32, 32)
    return AutoencoderTiny(
        encoder_block_out_channels=width,
        decoder_block_out_channels=width,
        num_encoder_blocks=(1, 2, 2),
        num_decoder_blocks=decoder_blocks,
        latent_channels=LATENT_CHANNELS,
        upsampling_scaling_factor=2,
    )


def flow_network() -> SD3Transformer2DModel:
    """A multimodal diffusion transformer whose text stream is one null token."""
    return SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=6,
        attention_head_dim=32,
        num_attention_heads=4,
        caption_projection_dim=128,
        joint_attention_dim=PROMPT_WIDTH,
        pooled_projection_dim=PROMPT_WIDTH,
        pos_embed_max_size=LATENT_SIZE,
    )


def diffusion_network() -> UNet2DModel:
    """An ε-prediction UNet with attention at the two lower levels."""
    return UNet2DModel(
        sample_size=LATENT_SIZE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        layers_per_block=1,
        block_out_channels=(64, 96, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=16,
    )


def flow_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)


def diffusion_scheduler() -> DDIMScheduler:
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=1e-4,
        beta_end=0.02,
        beta_schedule="linear",
        clip_sample=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
        prediction_type="epsilon",
    )


def train_autoencoder(world: World, images: Tensor, checkpoint: Path, seed: int = 11) -> AutoencoderTiny:
    """Mean squared error through a slightly noisy latent of unit scale, so that the decoder is smooth around codes."""
    torch.manual_seed(seed)

    def loss(model: Any, step: int) -> Tensor:
        g = generator(seed, step)
        x = images[torch.randint(len(images), (8,), generator=g)].float() / 127.5 - 1
        x = x.contiguous(memory_format=torch.channels_last)
        z = model.encode(x, return_dict=False)[0]
        noisy = z + LATENT_NOISE * torch.randn(z.shape, generator=g)
        error = model.decode(noisy, return_dict=False)[0] - x
        channels = z.transpose(0, 1).flatten(1)
        scale = channels.mean(1).square().mean() + (channels.std(1) - 1).square().mean()
        return error.square().mean() + 0.05 * error.abs().mean() + 0.01 * scale

    model = autoencoder().to(memory_format=torch.channels_last)
    cycles = (AUTOENCODER_STEPS[world.name],)
    trained = fit(
        model, loss, cycles=cycles, peak_rate=1.5e-3, checkpoint=checkpoint, title=f"{world.name} autoencoder"
    )
    assert isinstance(trained, AutoencoderTiny)
    latents = torch.cat([trained.encode(x.float() / 127.5 - 1, return_dict=False)[0] for x in images[:2048].split(64)])
    trained.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    return trained.to(memory_format=torch.contiguous_format)


@torch.no_grad()
def encode_all(vae: AutoencoderTiny, images: Tensor) -> Tensor:
    """Scaled latents of byte pictures."""
    z = torch.cat([vae.encode(x.float() / 127.5 - 1, return_dict=False)[0] for x in images.split(64)])
    return (z - vae.config["shift_factor"]) * vae.config["scaling_factor"]


def train_light_decoder(
    vae: AutoencoderTiny, images: Tensor, latents: Tensor, checkpoint: Path, title: str, seed: int = 14
) -> AutoencoderTiny:
    """The same encoder with a decoder of its own that works where pixels are few; `latents` are the scaled codes.

    A guided step decodes once forward and once backward, and of the first decoder's arithmetic two thirds lay at full
    resolution. This one is trained after it, on codes that no longer move.
    """
    torch.manual_seed(seed)
    light = autoencoder(LIGHT_BLOCKS)
    scale, shift = vae.config["scaling_factor"], vae.config["shift_factor"]

    def loss(decoder: Any, step: int) -> Tensor:
        g = generator(seed, step)
        rows = torch.randint(len(images), (16,), generator=g)
        x = images[rows].float() / 127.5 - 1
        z = latents[rows] / scale + shift
        noisy = z + LATENT_NOISE * torch.randn(z.shape, generator=g)
        error = decoder(noisy.contiguous(memory_format=torch.channels_last)) - x
        return error.square().mean() + 0.05 * error.abs().mean()

    decoder = light.decoder.to(memory_format=torch.channels_last)
    trained = fit(decoder, loss, cycles=(DECODER_STEPS,), peak_rate=1.5e-3, checkpoint=checkpoint, title=title)
    light.decoder.load_state_dict(trained.state_dict())
    light.encoder.load_state_dict(vae.encoder.state_dict())
    light.register_to_config(scaling_factor=scale, shift_factor=shift)
    return light.eval().requires_grad_(False).to(memory_format=torch.contiguous_format)


def null_prompt(batch: int) -> tuple[Tensor, Tensor]:
    """The null conditioning of an unconditional SD3-type network: one token of zeros and a zero pooled vector."""
    return torch.zeros(batch, NULL_TOKENS, PROMPT_WIDTH), torch.zeros(batch, PROMPT_WIDTH)


def train_flow(world: World, latents: Tensor, checkpoint: Path, seed: int = 12) -> SD3Transformer2DModel:
    """Conditional flow matching with logit-normal times."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, step: int) -> Tensor:
        g = generator(seed, step)
        z0 = latents[torch.randint(len(latents), (32,), generator=g)]
        eps = torch.randn(z0.shape, generator=g)
        sigma = torch.sigmoid(torch.randn(len(z0), generator=g))
        s = sigma[:, None, None, None]
        prompt, pooled = null_prompt(len(z0))
        velocity = model(
            hidden_states=(1 - s) * z0 + s * eps,
            timestep=sigma * 1000,
            encoder_hidden_states=prompt,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return (velocity - (eps - z0)).square().mean()

    cycles = NETWORK_CYCLES[world.name]
    trained = fit(
        flow_network(), loss, cycles=cycles, peak_rate=1.5e-3, checkpoint=checkpoint, title=f"{world.name} flow"
    )
    assert isinstance(trained, SD3Transformer2DModel)
    return trained


def train_diffusion(world: World, latents: Tensor, checkpoint: Path, seed: int = 13) -> UNet2DModel:
    """Noise prediction in three cycles that differ in the noise levels they care about.

    The first is uniform in time. The second is weighted by 1/ᾱ up to a maximum, which makes it the error of the
    velocity: unweighted, the high noise levels, where a picture's overall colour is decided, hardly count, and samples
    came out with 1.5 times the spread of colour that the pictures have. From the third on the noise-to-signal ratio is
    log-normal around 1.6, where nuclei get their shapes: pictures noised that far and walked back were the first to
    leave the distribution of real ones.
    """
    torch.manual_seed(seed)
    alphas = diffusion_scheduler().alphas_cumprod
    ratios = (1 / alphas - 1).sqrt()
    cycles = NETWORK_CYCLES[world.name]

    def loss(model: nn.Module, step: int) -> Tensor:
        g = generator(seed, step)
        z0 = latents[torch.randint(len(latents), (32,), generator=g)]
        eps = torch.randn(z0.shape, generator=g)
        if step < cycles[0] + cycles[1]:
            t = torch.randint(1000, (len(z0),), generator=g)
        else:
            drawn = (0.5 + torch.randn(len(z0), generator=g)).exp()
            t = torch.searchsorted(ratios, drawn).clamp(max=999)
        alpha = alphas[t][:, None, None, None]
        predicted = model(alpha.sqrt() * z0 + (1 - alpha).sqrt() * eps, t, return_dict=False)[0]
        weight = alpha.reciprocal().clamp(max=MAXIMUM_WEIGHT) if step >= cycles[0] else torch.ones(())
        return (weight * (predicted - eps).square()).mean()

    trained = fit(
        diffusion_network(), loss, cycles=cycles, peak_rate=1e-3, checkpoint=checkpoint, title=f"{world.name} diffusion"
    )
    assert isinstance(trained, UNet2DModel)
    return trained
