"""A pixel-space diffusion per world, for methods that were made for one: 64 px images as latents, ε-prediction.

It is stored beside the world's other models as worlds/weights/<world>/pixel/, a diffusers folder without autoencoder.
"""

from pathlib import Path

import torch
from diffusers import DDIMScheduler, UNet2DModel
from torch import Tensor, nn

from engine.errors import WeightsError
from engine.prior import Prior, load_prior
from worlds.generators import diffusion_scheduler
from worlds.store import WEIGHTS
from worlds.training import fit, generator
from worlds.world import World

PIXEL = "pixel"
BATCH = 8
CYCLES = {"portraits": (4_000, 4_000), "histology": (4_000, 4_000)}
USED = 500
"""Noise levels above this timestep are hardly used: no baseline starts higher than 300 by its authors' settings."""


def pixel_network() -> UNet2DModel:
    """An ε-prediction UNet over 64 px, thin where the picture is large: most of its weights work at 16 and 8 px."""
    return UNet2DModel(
        sample_size=64,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 48, 96, 128),
        down_block_types=("DownBlock2D", "DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def pixel_scheduler() -> DDIMScheduler:
    """The linear schedule of the other embedded diffusion."""
    return diffusion_scheduler()


def train_pixel(world: World, images: Tensor, checkpoint: Path, seed: int = 14) -> UNet2DModel:
    """Noise prediction on byte pictures [N, 3, 64, 64]: at uniform times, then three in four up to `USED`.

    Counterfactual methods noise a picture part of the way and walk it back, so the second cycle spends its steps where
    they walk; the rest keeps the model whole.
    """
    torch.manual_seed(seed)
    alphas = pixel_scheduler().alphas_cumprod
    cycles = CYCLES[world.name]

    def loss(model: nn.Module, step: int) -> Tensor:
        g = generator(seed, step)
        x = images[torch.randint(len(images), (BATCH,), generator=g)].float() / 127.5 - 1
        eps = torch.randn(x.shape, generator=g)
        t = torch.randint(1000, (BATCH,), generator=g)
        if step >= cycles[0]:
            t = torch.where(torch.rand(BATCH, generator=g) < 0.75, t * USED // 1000, t)
        alpha = alphas[t][:, None, None, None]
        noisy = (alpha.sqrt() * x + (1 - alpha).sqrt() * eps).contiguous(memory_format=torch.channels_last)
        predicted: Tensor = model(noisy, t, return_dict=False)[0]
        return (predicted - eps).square().mean()

    trained = fit(
        pixel_network().to(memory_format=torch.channels_last),
        loss,
        cycles=cycles,
        peak_rate=1e-3,
        checkpoint=checkpoint,
        title=f"{world.name} pixel diffusion",
    )
    assert isinstance(trained, UNet2DModel)
    contiguous: UNet2DModel = trained.to(memory_format=torch.contiguous_format)
    return contiguous


def open_pixel(world: World, weights: Path = WEIGHTS) -> Prior:
    """The pixel-space prior of a world."""
    folder = weights / world.name / PIXEL
    if not folder.is_dir():
        raise WeightsError(
            f"The embedded weights lack {folder}. Restore it from the repository or rebuild it with "
            f"`python -m worlds.train pixel`."
        )
    return load_prior(folder)
