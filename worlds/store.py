"""Where the embedded models lie, and how they are written, checked and opened.

worlds/weights/<world>/prior/                   a diffusers folder (half precision on disk, float32 in use)
worlds/weights/<world>/{student,twin,oracle}/   Hugging Face image-classification folders
worlds/weights/<world>/checksums.json           SHA-256 of every file above
worlds/recipes/<world>.json                     counterfactual settings to start from
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from audit.classifier import HuggingFaceClassifier, load_classifier
from engine.errors import WeightsError
from engine.prior import Prior, load_prior
from engine.recipe import Recipe
from worlds.world import World

ROOT = Path(__file__).parent
WEIGHTS = ROOT / "weights"
RECIPES = ROOT / "recipes"
CHECKPOINTS = ROOT / ".training"
ROLES = ("student", "twin", "oracle")
CHECKSUMS = "checksums.json"


def open_prior(world: World, weights: Path = WEIGHTS) -> Prior:
    """The embedded generative model of a world, after its files were checked."""
    _check(weights / world.name, "prior", f"python -m worlds.train {world.name}")
    return load_prior(weights / world.name / "prior")


def open_classifier(world: World, role: str, weights: Path = WEIGHTS) -> HuggingFaceClassifier:
    """The embedded student, twin or oracle of a world, after its files were checked."""
    if role not in ROLES:
        raise ValueError(f"{role!r} is not one of {', '.join(ROLES)}")
    _check(weights / world.name, role, "python -m worlds.train classifiers")
    return load_classifier(weights / world.name / role)


def open_recipe(world: World) -> Recipe:
    """The counterfactual settings to start from with a world's prior."""
    return Recipe.load(RECIPES / f"{world.name}.json")


def write_prior(world: World, parts: dict[str, Any], scheduler: Any, weights: Path = WEIGHTS) -> None:
    """Saves networks and scheduler as a plain diffusers folder; an older one stays until the new one is whole."""
    partial = _partial(weights / world.name / "prior")
    index: dict[str, object] = {"_class_name": "DiffusionPipeline"}
    for name, network in {**parts, "scheduler": scheduler}.items():
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


def weights_megabytes(weights: Path = WEIGHTS) -> float:
    """Size of all shipped weight files in MB (10⁶ bytes)."""
    return sum(file.stat().st_size for file in weights.rglob("*.safetensors")) / 1e6


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
