"""Rebuilds the embedded models from nothing: `python -m worlds.train portraits|histology|classifiers|all`.

Each stage is deterministic on one machine, shows its progress, goes on from its last checkpoint after an interruption,
and ends with a model card of freshly measured figures.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch

from worlds import WORLDS
from worlds.card import write_card
from worlds.classifiers import RECIPES, preprocessing, train_classifier
from worlds.generators import (
    diffusion_scheduler,
    encode_all,
    flow_scheduler,
    train_autoencoder,
    train_diffusion,
    train_flow,
    training_images,
)
from worlds.measure import measure
from worlds.store import CHECKPOINTS, ROLES, WEIGHTS, write_classifier, write_prior
from worlds.world import World


def train_prior(world: World, checkpoints: Path) -> None:
    """Trains a world's autoencoder and generative network and saves them as a diffusers folder."""
    print(f"{world.name}: drawing the training pictures", file=sys.stderr)
    images = training_images(world)
    vae = train_autoencoder(world, images, checkpoints / f"{world.name}-autoencoder.safetensors")
    latents = encode_all(vae, images)
    checkpoint = checkpoints / f"{world.name}-network.safetensors"
    if world.name == "portraits":
        write_prior(world, {"vae": vae, "transformer": train_flow(world, latents, checkpoint)}, flow_scheduler())
    else:
        write_prior(world, {"vae": vae, "unet": train_diffusion(world, latents, checkpoint)}, diffusion_scheduler())


def train_classifiers(world: World, checkpoints: Path) -> None:
    """Trains a world's student, twin and oracle and saves them as Hugging Face folders."""
    for role, recipe in RECIPES[world.name].items():
        title = f"{world.name} {role}"
        model = train_classifier(world, recipe, checkpoints / f"{world.name}-{role}.safetensors", title)
        write_classifier(world, role, model, preprocessing(world))


def main(argv: list[str] | None = None) -> int:
    """Trains what was asked for, then writes the card of each world whose models are all there."""
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
        if arguments.what in ("classifiers", "all"):
            train_classifiers(world, arguments.checkpoints)
    for name, world in WORLDS.items():
        whole = all((WEIGHTS / name / part).is_dir() for part in ("prior", *ROLES))
        if whole and arguments.what in (name, "classifiers", "all"):
            print(f"{name}: measuring for the model card", file=sys.stderr)
            write_card(world, measure(world))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
