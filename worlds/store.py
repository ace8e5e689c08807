"""Where the embedded models lie, and how they are written, checked and opened.

worlds/weights/<world>/prior/                   a diffusers folder (half precision on disk, float32 in use)
worlds/weights/<world>/pixel/                   the same for the world's pixel-space diffusion
worlds/weights/<world>/{student,twin,oracle}/   Hugging Face image-classification folders
worlds/weights/<world>/attributes/              the same form; tells every factor of a picture instead of its class
worlds/weights/<world>/checksums.json           SHA-256 of every file above
worlds/recipes/<world>.json                     counterfactual settings to start from; <world>-pixel.json likewise
worlds/recipes/<world>.audit.json               what an audit sets otherwise

A prior is named by its world, `portraits`, and the pixel-space one `portraits-pixel`.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from audit.classifier import HuggingFaceClassifier, load_classifier
from engine.errors import WeightsError
from engine.prior import Prior, load_prior
from engine.recipe import Recipe
from worlds import WORLDS
from worlds.world import World

ROOT = Path(__file__).parent
WEIGHTS = ROOT / "weights"
RECIPES = ROOT / "recipes"
CHECKPOINTS = ROOT / ".training"
ROLES = ("student", "twin", "oracle")
LATENT, PIXEL = "prior", "pixel"
"""Parts of a world's folder that are priors: the one that everything runs on, and the one over pixels."""
READER = "attributes"
"""Part of a world's folder that tells the factors of a picture."""
CHECKSUMS = "checksums.json"


def prior_name(world: World, part: str = LATENT) -> str:
    """What a prior is called on the command line."""
    return world.name if part == LATENT else f"{world.name}-{part}"


def embedded_prior(name: str) -> tuple[World, str] | None:
    """(world, part) of an embedded prior by its name; None where no embedded prior has that name."""
    known = {prior_name(world, part): (world, part) for world in WORLDS.values() for part in (LATENT, PIXEL)}
    return known.get(name)


def open_prior(world: World, weights: Path = WEIGHTS, part: str = LATENT) -> Prior:
    """An embedded generative model of a world, after its files were checked."""
    _check_part(part)
    rebuild = world.name if part == LATENT else part
    _check(weights / world.name, part, f"python -m worlds.train {rebuild}")
    return load_prior(weights / world.name / part)


def open_classifier(world: World, role: str, weights: Path = WEIGHTS) -> HuggingFaceClassifier:
    """The embedded student, twin or oracle of a world, after its files were checked."""
    if role not in ROLES:
        raise ValueError(f"{role!r} is not one of {', '.join(ROLES)}")
    _check(weights / world.name, role, "python -m worlds.train classifiers")
    return load_classifier(weights / world.name / role)


def open_reader(world: World, weights: Path = WEIGHTS) -> HuggingFaceClassifier:
    """The network that tells a picture's attributes, after its files were checked; its labels are their names."""
    _check(weights / world.name, READER, f"python -m worlds.train {READER}")
    return load_classifier(weights / world.name / READER)


def open_recipe(world: World, part: str = LATENT) -> Recipe:
    """The counterfactual settings to start from with a world's prior; the defaults where none were found for it."""
    _check_part(part)
    file = RECIPES / f"{prior_name(world, part)}.json"
    return Recipe.load(file) if part == LATENT or file.is_file() else Recipe()


def open_audit_recipe(world: World, part: str = LATENT) -> Recipe:
    """The same for audits, with the settings changed that <world>.audit.json names, where it exists.

    An explanation shows the smallest edit that convinces. An audit asks whether the real class changed with it, and
    smallest edits leave that open: they may take more room, and have to convince more.
    """
    recipe, file = open_recipe(world, part), RECIPES / f"{prior_name(world, part)}.audit.json"
    return recipe.changed(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else recipe


def write_prior(
    world: World, networks: dict[str, Any], scheduler: Any, weights: Path = WEIGHTS, part: str = LATENT
) -> None:
    """Saves networks and scheduler as a plain diffusers folder; an older one stays until the new one is whole."""
    _check_part(part)
    partial = _partial(weights / world.name / part)
    index: dict[str, object] = {"_class_name": "DiffusionPipeline"}
    for name, network in {**networks, "scheduler": scheduler}.items():
        index[name] = ["diffusers", type(network).__name__]
        if isinstance(network, torch.nn.Module):
            torch.nn.Module.to(network, torch.float16)  # diffusers' own `to` warns that it knows nothing to exempt
        network.save_pretrained(partial / name)
    (partial / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    _finish(partial)


def write_classifier(
    world: World, role: str, model: Any, preprocessing: dict[str, object], weights: Path = WEIGHTS
) -> None:
    """Saves a classifier as a Hugging Face folder; an older one stays until the new one is whole."""
    partial = _partial(weights / world.name / role)
    model.save_pretrained(partial)
    (partial / "preprocessor_config.json").write_text(json.dumps(preprocessing, indent=2) + "\n")
    _finish(partial)


def weights_megabytes(weights: Path = WEIGHTS, parts: Sequence[str] = (LATENT, *ROLES)) -> float:
    """Size of the shipped weight files of some parts in MB (10⁶ bytes); by default all but the pixel-space priors."""
    files = (file for part in parts for file in weights.glob(f"*/{part}/**/*.safetensors"))
    return sum(file.stat().st_size for file in files) / 1e6


def _check_part(part: str) -> None:
    if part not in (LATENT, PIXEL):
        raise ValueError(f"{part!r} is neither {LATENT!r} nor {PIXEL!r}")


def _partial(folder: Path) -> Path:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _finish(partial: Path) -> None:
    """Renames a whole folder into place and notes its checksums."""
    folder = partial.with_name(partial.name.removesuffix(".partial"))
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
    home = folder.parent
    known = json.loads((home / CHECKSUMS).read_text()) if (home / CHECKSUMS).is_file() else {}
    kept = {name: digest for name, digest in known.items() if not name.startswith(f"{folder.name}/")}
    new = {f.relative_to(home).as_posix(): _digest(f) for f in sorted(folder.rglob("*")) if f.is_file()}
    (home / CHECKSUMS).write_text(json.dumps(dict(sorted({**kept, **new}.items())), indent=2) + "\n")


def _check(home: Path, part: str, rebuild: str) -> None:
    """Every file of an embedded model is there and is what was shipped, or a WeightsError says how to get it back."""
    advice = f"Restore it from the repository or rebuild it with `{rebuild}`."
    if not (home / CHECKSUMS).is_file():
        raise WeightsError(f"The embedded weights lack {home / CHECKSUMS}. {advice}")
    try:
        known = json.loads((home / CHECKSUMS).read_text())
    except ValueError:
        raise WeightsError(f"The list {home / CHECKSUMS} is altered. {advice}") from None
    files = {name: digest for name, digest in known.items() if name.startswith(f"{part}/")}
    if not files:
        raise WeightsError(f"The embedded weights lack {home / part}. {advice}")
    for name, digest in files.items():
        if not (home / name).is_file():
            raise WeightsError(f"The weight file {home / name} is missing. {advice}")
        if _digest(home / name) != digest:
            raise WeightsError(f"The weight file {home / name} is cut short or altered. {advice}")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
