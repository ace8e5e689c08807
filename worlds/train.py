"""Rebuilds the embedded models from nothing: `python -m worlds.train portraits|histology|classifiers|all`.

Each stage is deterministic, shows its progress, and goes on from its last checkpoint after an interruption.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
from diffusers import ModelMixin

from worlds import WORLDS
from worlds.generators import (
    diffusion_scheduler,
    encode_all,
    flow_scheduler,
    train_autoencoder,
    train_diffusion,
    train_flow,
    training_images,
)
from worlds.store import CHECKPOINTS, prior_folder, write_prior
from worlds.world import World


def train_prior(world: World, checkpoints: Path) -> None:
    """Trains a world's autoencoder and generative network and saves them as a diffusers folder."""
    print(f"{world.name}: drawing the training pictures", file=sys.stderr)
    images = training_images(world)
    vae = train_autoencoder(world, images, checkpoints / f"{world.name}-autoencoder.safetensors")
    latents = encode_all(vae, images)
    checkpoint = checkpoints / f"{world.name}-network.safetensors"
    parts: dict[str, ModelMixin]
    if world.name == "portraits":
        parts = {"vae": vae, "transformer": train_flow(world, latents, checkpoint)}
        write_prior(prior_folder(world), parts, flow_scheduler())
    else:
        parts = {"vae": vae, "unet": train_diffusion(world, latents, checkpoint)}
        write_prior(prior_folder(world), parts, diffusion_scheduler())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m worlds.train", description=__doc__)
    parser.add_argument("what", choices=[*WORLDS, "classifiers", "all"])
    parser.add_argument("--fresh", action="store_true", help="forget earlier checkpoints and start from nothing")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="where unfinished training is kept")
    arguments = parser.parse_args(argv)
    torch.use_deterministic_algorithms(True)
    if arguments.fresh:
        shutil.rmtree(arguments.checkpoints, ignore_errors=True)
    for name, world in WORLDS.items():
        if arguments.what in (name, "all"):
            train_prior(world, arguments.checkpoints)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
