"""The model card of a world: what its models are, how they were made, how good they are, and a picture of both."""

import torch
from PIL import Image

from audit.pictures import save_png, sheet
from engine.sampling import generate, reconstruct
from worlds.classifiers import RECIPES
from worlds.generators import AUTOENCODER_STEPS, DECODER_STEPS, NETWORK_CYCLES, TRAINING_IMAGES
from worlds.measure import TEST_SEED, Measurement
from worlds.store import WEIGHTS, open_prior
from worlds.world import World

COLUMNS = 12


def overview(originals: torch.Tensor, rebuilt: torch.Tensor, samples: torch.Tensor) -> Image.Image:
    """Two rows each of pictures of the world, their reconstructions, and samples of the prior."""
    rows = []
    for block in (originals, rebuilt, samples):
        rows += [block[:COLUMNS], block[COLUMNS : 2 * COLUMNS]]
    return sheet(rows)


def write_card(world: World, found: Measurement) -> None:
    """Writes README.md with the measured figures, and overview.png, beside a world's models."""
    prior = open_prior(world)
    originals = world.sample(2 * COLUMNS, TEST_SEED).images
    samples = generate(prior, 2 * COLUMNS, world.size, seed=TEST_SEED)
    save_png(overview(originals, reconstruct(prior, originals), samples), WEIGHTS / world.name / "overview.png")
    count = {name: sum(p.numel() for p in part.parameters()) for name, part in prior.named_children()}
    kind = "rectified flow (SD3-type transformer)" if prior.is_flow else "diffusion (ε-prediction UNet, DDIM)"
    figures = "\n".join(f"| {key} | {value} |" for key, value in found.as_dict().items())
    roles = "\n".join(
        f"| {role} | {r.rho} | {r.images} | {r.steps} | {'yes' if r.jitter else 'no'} |"
        for role, r in RECIPES[world.name].items()
    )
    text = f"""# Models of the world «{world.name}»

Label: {world.labels[0]} or {world.labels[1]} ({world.label_region}). Confounder: {world.confounder_name}
({world.confounders[0]} or {world.confounders[1]}). All pictures are procedural; no person and no patient is shown.

![pictures, reconstructions, samples](overview.png)

Rows 1–2: pictures of the world. Rows 3–4: the same through the autoencoder. Rows 5–6: samples of the prior (40
random second-order steps, null conditioning).

## Prior

A {kind}: {count["network"]:,} parameters over an autoencoder of {count["autoencoder"]:,}, {world.size} px to 4×16×16
latents. Trained by this project on {TRAINING_IMAGES[world.name]:,} unpoisoned pictures, without labels: autoencoder
{AUTOENCODER_STEPS[world.name]:,} steps, then a lighter decoder for the same latents {DECODER_STEPS:,} steps, network
{sum(NETWORK_CYCLES[world.name]):,} steps.
Weights are stored in half precision.

## Classifiers

ResNet-18-type networks (widths 16, 32, 64, 96). ρ is the probability that label and confounder agree in training.

| role | ρ | pictures | steps | colour jitter and occlusion |
|---|---|---|---|---|
{roles}

## Figures

Measured by `python -m worlds.report --cards`, which also wrote this page.

| figure | value |
|---|---|
{figures}

The student is biased on purpose. Do not use any of these models on real pictures.
"""
    (WEIGHTS / world.name / "README.md").write_text(text, encoding="utf-8")
