"""What is proven and timed: a prior with its recipe, a classifier, a guide distilled from it, and pictures.

The embedded models are found by their folders (worlds/weights/NAME/prior and student): this room knows only the engine.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForImageClassification
from transformers.utils import logging as transformers_logging

from engine.errors import InputError
from engine.prior import Prior, load_prior
from engine.recipe import Recipe
from engine.sampling import generate
from engine.surrogate import GUIDE, Agreement, distil
from engine.surrogate_net import SurrogateNetwork

ROOT = Path(__file__).parent.parent
N_PICTURES = 256
PICTURE_SEED = 700_002
BATCH = 8


class Student(nn.Module):
    """The audited classifier: a Hugging Face model with the normalisation of its own folder."""

    mean: Tensor
    std: Tensor

    def __init__(self, folder: Path) -> None:
        super().__init__()
        transformers_logging.disable_progress_bar()
        self.model: nn.Module = AutoModelForImageClassification.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
        settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        self.register_buffer("mean", torch.tensor(settings["image_mean"]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(settings["image_std"]).view(1, 3, 1, 1))
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images in [0, 1]."""
        logits: Tensor = self.model(pixel_values=(images - self.mean) / self.std).logits
        return logits


def find(name: str) -> tuple[Path, Path, Path | None]:
    """(prior, classifier, recipe) of an embedded world's name or of a prior's folder with a `student` beside it."""
    folder = ROOT / "worlds" / "weights" / name / "prior"
    recipe: Path | None = ROOT / "worlds" / "recipes" / f"{name}.json"
    if not folder.is_dir():
        folder, recipe = Path(name), None
    classifier = folder.parent / "student"
    if not folder.is_dir() or not classifier.is_dir():
        raise InputError(
            f"--prior {name} is no embedded prior, nor a prior's folder with a folder `student` beside it."
        )
    return folder, classifier, recipe


@dataclass(frozen=True)
class Subject:
    """What is exported and timed: a prior with its recipe, a classifier, its guide, and pictures [B, 3, H, W]."""

    prior: Prior
    f: nn.Module
    guide: nn.Module
    agreement: Agreement | None
    recipe: Recipe
    x0: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """(H, W)."""
        return self.x0.shape[2], self.x0.shape[3]

    def save(self, folder: Path) -> None:
        """Writes what is not in the folders of prior and classifier, for another process."""
        save_file({k: v.contiguous() for k, v in self.guide.state_dict().items()}, folder / "guide.safetensors")
        save_file({"x0": self.x0.contiguous()}, folder / "pictures.safetensors")
        self.recipe.save(folder / "recipe.json")


def reopen(prior: Path, classifier: Path, folder: Path) -> Subject:
    """The subject that was saved in a folder."""
    weights = load_file(folder / "guide.safetensors")
    guide = SurrogateNetwork(len(weights["head.bias"]), GUIDE.network)
    guide.load_state_dict(weights)
    x0 = load_file(folder / "pictures.safetensors")["x0"]
    models = load_prior(prior), Student(classifier), guide.eval().requires_grad_(False)
    return Subject(*models, None, Recipe.load(folder / "recipe.json"), x0)


def open_subject(name: str, progress: Callable[[str], None] = lambda what: None) -> Subject:
    """Loads the models of a name; pictures are samples of the prior, and the guide is distilled on some of them."""
    folder, classifier, settings = find(name)
    prior, f = load_prior(folder), Student(classifier)
    recipe = Recipe() if settings is None else Recipe.load(settings)
    progress("drawing pictures")
    pictures = generate(prior, N_PICTURES + BATCH, prior.image_size or 64, seed=PICTURE_SEED)
    progress("distilling the guide")
    guide = distil(lambda images: f(images).softmax(dim=1), pictures[BATCH:], GUIDE)
    return Subject(prior, f, guide.network, guide.agreement, recipe, pictures[:BATCH])
