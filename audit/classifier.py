"""The classifiers that are audited. Labels, input size and normalisation belong to the classifier.

Shapes: images [B, 3, H, W] in [0, 1] of any size, logits [B, classes].
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForImageClassification
from transformers.utils import logging as transformers_logging

from engine.errors import ClassifierError, WeightsError
from engine.prior import content_hash

RESAMPLING = {2: "bilinear", 3: "bicubic"}


class HuggingFaceClassifier(nn.Module):
    """An image-classification model of a Hugging Face folder with its own preprocessing, frozen and in eval mode."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, labels: tuple[str, ...], preprocessing: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.labels = labels
        self.size = _input_size(preprocessing)
        self.resampling = RESAMPLING.get(int(preprocessing.get("resample", 2)), "bilinear")
        normalise = preprocessing.get("do_normalize", True)
        mean = preprocessing.get("image_mean", [0.5] * 3) if normalise else [0.0] * 3
        std = preprocessing.get("image_std", [0.5] * 3) if normalise else [1.0] * 3
        if not preprocessing.get("do_rescale", True):
            # Such a model takes bytes as they are: [0, 255] instead of [0, 1].
            mean, std = [m / 255 for m in mean], [s / 255 for s in std]
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))
        self.eval().requires_grad_(False)

    @property
    def content_hash(self) -> str:
        """SHA-256 over the weights, the labels and the preprocessing."""
        return content_hash(self, {"labels": self.labels, "size": self.size, "resampling": self.resampling})

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images in [0, 1], resized to the classifier's own size."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ClassifierError(f"The classifier takes images [B, 3, H, W]; these are {list(images.shape)}.")
        if self.size is not None and tuple(images.shape[2:]) != self.size:
            images = F.interpolate(images, size=self.size, mode=self.resampling, antialias=True).clamp(0, 1)
        logits: Tensor = self.model(pixel_values=(images - self.mean) / self.std).logits
        if logits.shape != (len(images), len(self.labels)):
            raise ClassifierError(
                f"The classifier answered {list(logits.shape)} for {len(images)} images and {len(self.labels)} labels."
            )
        return logits

    @torch.no_grad()
    def probabilities(self, images: Tensor, batch: int = 256) -> Tensor:
        """Softmax probabilities [N, classes], a batch at a time."""
        return torch.cat([self(part).softmax(1) for part in images.split(batch)])

    def features(self, images: Tensor) -> Tensor:
        """What the last layer before the logits sees, [B, D]; a stated encoder e(·) for distances between images."""
        seen: list[Tensor] = []
        last = [module for module in self.model.modules() if isinstance(module, nn.Linear)][-1]
        hook = last.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        try:
            with torch.no_grad():
                self(images)
        finally:
            hook.remove()
        return seen[0].flatten(1)


def load_classifier(folder: Path | str) -> HuggingFaceClassifier:
    """The classifier in a Hugging Face image-classification folder; only safetensors weights are opened."""
    folder = Path(folder)
    config = _json(folder, "config.json")
    preprocessing = _json(folder, "preprocessor_config.json")
    if not (folder / "model.safetensors").is_file() and not (folder / "model.safetensors.index.json").is_file():
        raise WeightsError(
            f"{folder / 'model.safetensors'} is missing. Only safetensors weights are opened; save the model with "
            "save_pretrained(..., safe_serialization=True)."
        )
    labels = config.get("id2label")
    if not isinstance(labels, dict) or len(labels) < 2:
        raise ClassifierError(f"{folder / 'config.json'} names fewer than two classes in id2label.")
    verbosity = transformers_logging.get_verbosity()
    # The missing keys that transformers would only warn about are an error here.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model, info = AutoModelForImageClassification.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except (SafetensorError, EOFError) as error:
        raise WeightsError(f"{folder / 'model.safetensors'} is cut short or altered: {error}") from None
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ClassifierError(f"{folder} is not an image-classification folder that can be opened: {error}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    wrong = sorted([*info["missing_keys"], *info["mismatched_keys"]])
    if wrong:
        raise WeightsError(f"{folder / 'model.safetensors'} does not fit its config.json: {wrong[0]} is missing.")
    names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    return HuggingFaceClassifier(model, names, preprocessing)


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ClassifierError(f"{folder} is not a classifier folder: it lacks {name}.") from None
    except (OSError, ValueError) as error:
        raise ClassifierError(f"{folder / name} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ClassifierError(f"{folder / name} has to hold one JSON object.")
    return content


def _input_size(preprocessing: dict[str, Any]) -> tuple[int, int] | None:
    """(height, width) that the classifier wants, or None if it takes any size."""
    if preprocessing.get("do_center_crop"):
        size = preprocessing.get("crop_size")
    elif preprocessing.get("do_resize", True):
        size = preprocessing.get("size")
    else:
        return None
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and "height" in size and "width" in size:
        return int(size["height"]), int(size["width"])
    if isinstance(size, dict) and "shortest_edge" in size:
        return int(size["shortest_edge"]), int(size["shortest_edge"])
    raise ClassifierError(f"The preprocessing names no input size that can be read: {size!r}.")
