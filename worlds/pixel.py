"""A diffusion over the pixels of each world, for methods that were made for one: 64 px images are the latents.

It is stored beside the world's other models as worlds/weights/<world>/pixel/, a diffusers folder without autoencoder,
and named `portraits-pixel` and `histology-pixel`.

What it costs: tiles of 2×2 pixels are the network's channels, so that no convolution works on 64×64 places, where a
processor is slow: a picture takes 12 ms of one thread of the machine it was planned on, and 36 ms in training, less
than half of a network that starts at 64 px with 16 channels. Most of the work is done at 16 and 8 px, where shapes are
decided, and a last level of 4 px sees the whole picture.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, UNet2DModel
from PIL import Image
from torch import Tensor, nn

from audit.metrics import frechet_distance
from audit.pictures import save_png, sheet
from engine.prior import Prior
from engine.sampling import generate, image_to_image
from engine.writing import write_text
from worlds.generators import TRAINING_IMAGES, diffusion_scheduler
from worlds.measure import TEST_SEED, features, predictions
from worlds.store import PIXEL, WEIGHTS, open_classifier, open_prior, prior_name
from worlds.training import fit, generator
from worlds.world import World

TILE = 2
"""Side of the tile of pixels that the network sees as channels."""
BATCH = 8
CYCLES = {"portraits": (8_000,), "histology": (8_000, 6_000)}
PEAK_RATE = 1e-3
CENTRE, SPREAD = 0.7, 1.3
"""Mean and standard deviation of the logarithm of the noise-to-signal ratio in training. Nine in ten draws lie between
0.24 and 17. Latents were learned best around e^0.5; a pixel averages over nothing, so the same shapes drown later."""
BUDGET_MB = 20.0
"""What the pixel-space weights of all worlds together may take on the disk."""
N_MEASURED = 200
WALKED = 0.3
"""Pictures are noised to t = 300 of 1000, where DiME begins by its authors' settings, and walked back unguided."""
COLUMNS = 12


def pixel_network() -> UNet2DModel:
    """A UNet over 64 px, read as 32×32 tiles, with 3.6 million weights, most of which work at 16, 8 and 4 px."""
    return UNet2DModel(
        sample_size=64 // TILE,
        in_channels=3 * TILE**2,
        out_channels=3 * TILE**2,
        layers_per_block=1,
        block_out_channels=(32, 64, 96, 128),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def pixel_scheduler() -> DDIMScheduler:
    """The linear schedule of the other embedded diffusion, for a network that predicts v.

    v = a·eps - b·x0 has the same size at every noise level. A network that predicts eps says nothing of the picture
    where there is almost only noise, and its errors there are multiplied by b/a, up to 158: samples get false colours.
    """
    return DDIMScheduler.from_config({**diffusion_scheduler().config, "prediction_type": "v_prediction"})


def noise_levels(generator: torch.Generator, ratios: Tensor, batch: int = BATCH) -> Tensor:
    """Timesteps [batch] whose noise-to-signal ratio is log-normal, one from each of `batch` equally likely intervals.

    Eight independent draws would leave some kinds of noise out of most steps; the gradient is steadier this way.
    """
    share = (torch.arange(batch) + torch.rand(batch, generator=generator)) / batch
    drawn = (CENTRE + SPREAD * torch.special.ndtri(share.clamp(1e-6, 1 - 1e-6))).exp()
    return torch.searchsorted(ratios, drawn).clamp(max=len(ratios) - 1)


def train_pixel(world: World, images: Tensor, checkpoint: Path, seed: int = 14) -> UNet2DModel:
    """The error of v on byte pictures [N, 3, 64, 64], at log-normal noise-to-signal ratios."""
    torch.manual_seed(seed)
    alphas = pixel_scheduler().alphas_cumprod
    ratios = (1 / alphas - 1).sqrt()

    def loss(model: nn.Module, step: int) -> Tensor:
        g = generator(seed, step)
        x = images[torch.randint(len(images), (BATCH,), generator=g)].float() / 127.5 - 1
        eps = torch.randn(x.shape, generator=g)
        t = noise_levels(g, ratios)
        a, b = (share.sqrt()[:, None, None, None] for share in (alphas[t], 1 - alphas[t]))
        noisy, v = (F.pixel_unshuffle(pictures, TILE) for pictures in (a * x + b * eps, a * eps - b * x))
        predicted: Tensor = model(noisy.contiguous(memory_format=torch.channels_last), t, return_dict=False)[0]
        return (predicted - v).square().mean()

    trained = fit(
        pixel_network().to(memory_format=torch.channels_last),
        loss,
        cycles=CYCLES[world.name],
        peak_rate=PEAK_RATE,
        checkpoint=checkpoint,
        title=f"{world.name} pixel diffusion",
    )
    assert isinstance(trained, UNet2DModel)
    contiguous: UNet2DModel = trained.to(memory_format=torch.contiguous_format)
    return contiguous


def measure_pixel(world: World, prior: Prior, n: int = N_MEASURED) -> dict[str, float | int]:
    """How good the prior is: samples, and pictures that were noised part of the way and walked back.

    Fréchet distances are in the oracle's last features, each beside that of as many real pictures to real ones.
    """
    oracle = open_classifier(world, "oracle")
    real, others = (world.sample(n, TEST_SEED + i) for i in range(2))
    walked = image_to_image(prior, real.images, steps=50, strength=WALKED, seed=TEST_SEED)
    made = generate(prior, n, world.size, seed=TEST_SEED)
    found, compared, again, drawn = (features(oracle, x) for x in (real.images, others.images, walked, made))
    floor = frechet_distance(found, compared)
    return {
        "frechet_samples": round(frechet_distance(found, drawn), 4),
        "frechet_walked": round(frechet_distance(compared, again), 4),
        "frechet_floor": round(floor, 4),
        "oracle_on_walked": round((predictions(oracle, walked) == real.labels).float().mean().item(), 4),
        "n": n,
    }


def overview(world: World, prior: Prior) -> Image.Image:
    """A row of pictures, the same noised part of the way and walked back, and two rows of samples."""
    originals = world.sample(COLUMNS, TEST_SEED).images
    walked = image_to_image(prior, originals, steps=50, strength=WALKED, seed=TEST_SEED)
    samples = generate(prior, 2 * COLUMNS, world.size, seed=TEST_SEED)
    return sheet([originals, walked, samples[:COLUMNS], samples[COLUMNS:]])


def write_pixel_card(world: World, weights: Path = WEIGHTS, n: int = N_MEASURED) -> None:
    """Writes pixel.md with freshly measured figures, and pixel.png, beside a world's models."""
    prior = open_prior(world, weights, part=PIXEL)
    save_png(overview(world, prior), weights / world.name / "pixel.png")
    figures = "\n".join(f"| {key} | {value} |" for key, value in measure_pixel(world, prior, n).items())
    count = sum(p.numel() for p in prior.parameters())
    text = f"""# The prior «{prior_name(world, PIXEL)}»

A diffusion over the {world.size} px pictures of the world «{world.name}» themselves, without autoencoder: a UNet of
{count:,} parameters that predicts v on 1000 linear betas. Trained by this project on {TRAINING_IMAGES[world.name]:,}
unpoisoned pictures, without labels, for {sum(CYCLES[world.name]):,} steps of {BATCH}. It is there for methods that
were made for pixel-space diffusion. Weights are stored in half precision.

![pictures, walked back, samples](pixel.png)

Row 1: pictures of the world. Row 2: the same noised to t = 300 of 1000 and walked back by 15 DDIM steps. Rows 3–4:
samples (40 random second-order steps).

Measured when it was trained, by `python -m worlds.train pixel`:

| figure | value |
|---|---|
{figures}

Do not use it on real pictures.
"""
    write_text(weights / world.name / "pixel.md", text)
