"""Rebuilds the embedded models from nothing: `python -m worlds.train WHAT`.

WHAT is a world's name for its prior, or classifiers, pixel, attributes, all. Each stage is deterministic on one
machine, shows its progress, goes on from its last checkpoint after an interruption, and ends with a model card of
freshly measured figures. `pixel` trains a pixel-space diffusion for each world, or with --world for one; `attributes`
the network that tells the factors of a picture.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch

from worlds import WORLDS
from worlds.attributes import ReaderRecipe, train_reader, write_reader_card
from worlds.card import write_card
from worlds.classifiers import RECIPES, preprocessing, train_classifier
from worlds.generators import (
    diffusion_scheduler,
    encode_all,
    flow_scheduler,
    train_autoencoder,
    train_diffusion,
    train_flow,
    train_light_decoder,
    training_images,
)
from worlds.measure import measure
from worlds.pixel import pixel_scheduler, train_pixel, write_pixel_card
from worlds.store import CHECKPOINTS, LATENT, PIXEL, READER, ROLES, WEIGHTS, write_classifier, write_prior
from worlds.world import World


def train_prior(world: World, checkpoints: Path) -> None:
    """Trains a world's autoencoder and generative network and saves them as a diffusers folder."""
    print(f"{world.name}: drawing the training pictures", file=sys.stderr)
    images = training_images(world)
    vae = train_autoencoder(world, images, checkpoints / f"{world.name}-autoencoder.safetensors")
    latents = encode_all(vae, images)
    light = checkpoints / f"{world.name}-decoder.safetensors"
    vae = train_light_decoder(vae, images, latents, light, f"{world.name} decoder")
    checkpoint = checkpoints / f"{world.name}-network.safetensors"
    if world.name == "portraits":
        write_prior(world, {"vae": vae, "transformer": train_flow(world, latents, checkpoint)}, flow_scheduler())
    else:
        write_prior(world, {"vae": vae, "unet": train_diffusion(world, latents, checkpoint)}, diffusion_scheduler())


def train_pixel_prior(world: World, checkpoints: Path) -> None:
    """Trains a world's pixel-space diffusion, saves it as a diffusers folder and writes its card."""
    print(f"{world.name}: drawing the training pictures", file=sys.stderr)
    network = train_pixel(world, training_images(world), checkpoints / f"{world.name}-pixel.safetensors")
    write_prior(world, {"unet": network}, pixel_scheduler(), part=PIXEL)
    if (WEIGHTS / world.name / "oracle").is_dir():
        print(f"{world.name}: measuring for the card of the pixel-space prior", file=sys.stderr)
        write_pixel_card(world)


def train_classifiers(world: World, checkpoints: Path) -> None:
    """Trains a world's student, twin and oracle and saves them as Hugging Face folders."""
    for role, recipe in RECIPES[world.name].items():
        title = f"{world.name} {role}"
        model = train_classifier(world, recipe, checkpoints / f"{world.name}-{role}.safetensors", title)
        write_classifier(world, role, model, preprocessing(world))


def train_attributes(world: World, checkpoints: Path) -> None:
    """Trains a world's reader of attributes and saves it as a Hugging Face folder."""
    model = train_reader(world, ReaderRecipe(), checkpoints / f"{world.name}-{READER}.safetensors")
    write_classifier(world, READER, model, preprocessing(world))
    write_reader_card(world)


def main(argv: list[str] | None = None) -> int:
    """Trains what was asked for, then writes the card of each world whose models are all there."""
    parser = argparse.ArgumentParser(prog="python -m worlds.train", description=__doc__)
    parser.add_argument("what", choices=[*WORLDS, "classifiers", PIXEL, READER, "all"])
    parser.add_argument("--world", choices=list(WORLDS), help="train only what belongs to this world")
    parser.add_argument("--fresh", action="store_true", help="forget earlier checkpoints and start from nothing")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="where unfinished training is kept")
    arguments = parser.parse_args(argv)
    if arguments.what in WORLDS and arguments.world not in (None, arguments.what):
        parser.error(f"{arguments.what} is a world itself; leave out --world")
    torch.use_deterministic_algorithms(True)
    if arguments.fresh:
        shutil.rmtree(arguments.checkpoints, ignore_errors=True)
    worlds = {name: world for name, world in WORLDS.items() if arguments.world in (None, name)}
    for name, world in worlds.items():
        if arguments.what in (name, "all"):
            train_prior(world, arguments.checkpoints)
        if arguments.what in ("classifiers", "all"):
            train_classifiers(world, arguments.checkpoints)
        if arguments.what in (PIXEL, "all"):
            train_pixel_prior(world, arguments.checkpoints)
        if arguments.what in (READER, "all"):
            train_attributes(world, arguments.checkpoints)
    for name, world in worlds.items():
        whole = all((WEIGHTS / name / part).is_dir() for part in (LATENT, *ROLES))
        if whole and arguments.what in (name, "classifiers", "all"):
            print(f"{name}: measuring for the model card", file=sys.stderr)
            write_card(world, measure(world))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
