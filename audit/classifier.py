"""The classifiers that are audited. Labels, input size and normalisation belong to the classifier.

    Classifier             what an audit needs: labels, input size, a hash, logits and probabilities
    ModuleClassifier       a torch module in this process
    HuggingFaceClassifier  an image-classification folder of transformers
    QueriedClassifier      one that is asked and never differentiated: ONNX files, remote endpoints

Shapes: images [B, 3, H, W] in [0, 1] of any size, logits [B, classes].
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForImageClassification
from transformers.utils import logging as transformers_logging

from engine.errors import ClassifierError, PfungstError, WeightsError
from engine.guidance import frozen_model
from engine.prior import content_hash

RESAMPLING = {2: "bilinear", 3: "bicubic"}
FLOOR = 1e-7
"""Least probability that enters a logarithm, where a classifier answers with probabilities."""
ROUNDING = 1e-3
"""How far probabilities may miss the sum 1: half precision and rounding in JSON need that much."""
MAX_SIDE = 4096
MAX_CLASSES = 100_000

Output = Literal["logits", "probabilities"]
Resampling = Literal["bilinear", "bicubic"]
Label = Annotated[str, Field(min_length=1, max_length=200)]
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Triple = tuple[float, float, float]


class Classifier(Protocol):
    """What is audited: a callable from images [B, 3, H, W] in [0, 1] of any size to logits [B, classes]."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        ...

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) that images are brought to, or None if they are taken as they are."""
        ...

    @property
    def content_hash(self) -> str:
        """SHA-256 of all that decides an answer."""
        ...

    @property
    def differentiable(self) -> bool:
        """Whether autograd reaches the images; where it does not, guidance comes from a surrogate."""
        ...

    def __call__(self, images: Tensor, /) -> Tensor:
        """Logits [B, classes]."""
        ...

    def probabilities(self, images: Tensor, batch: int = 256) -> Tensor:
        """Softmax probabilities [N, classes], a batch at a time."""
        ...


class ClassifierSettings(BaseModel):
    """What belongs to a classifier besides its weights, checked; a ClassifierError says what is wrong with it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    labels: tuple[Label, ...] = Field(min_length=2, max_length=MAX_CLASSES)
    size: tuple[Side, Side] | None = None
    """(height, width); one number means a square."""
    mean: Triple | None = None
    std: Triple | None = None
    """Images in [0, 1] are normalised to (x - mean) / std per channel; without both they are sent as they are."""
    resample: Resampling = "bilinear"
    output: Output = "logits"

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ClassifierError(_sentence(error, type(self))) from None

    @field_validator("size", mode="before")
    @classmethod
    def _square(cls, size: Any) -> Any:
        return (size, size) if isinstance(size, int) and not isinstance(size, bool) else size

    @model_validator(mode="after")
    def _normalisation_is_whole(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together; give both or neither")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError("std has to be above 0 in every channel")
        return self

    def prepare(self, images: Tensor) -> Tensor:
        """Images as the network takes them: at its size, normalised."""
        x = resized(images, self.size, self.resample)
        if self.mean is None or self.std is None:
            return x
        mean, std = (torch.tensor(values, device=x.device).view(1, 3, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std


def _sentence(error: ValidationError, settings: type[ClassifierSettings]) -> str:
    """One sentence for the first thing that is wrong; what was given is left out, for it may be a secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"The classifier has no setting {name!r:.80}; it knows {', '.join(settings.model_fields)}."
    if first["type"] == "missing":
        return f"The classifier's setting {name!r} is missing."
    problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ").rstrip(".")
    return f"The classifier's setting {name!r} is wrong: {problem}." if name else f"The classifier's {problem}."


class ModuleClassifier(nn.Module):
    """A torch module in this process that takes normalised images and gives logits.

    The module is run in eval mode without parameter gradients and given back as it was. It is trusted code: what it
    raises becomes a ClassifierError, but nothing can stop it from hanging.
    """

    mean: Tensor
    std: Tensor
    differentiable = True

    def __init__(
        self,
        module: nn.Module,
        labels: Sequence[str],
        size: int | tuple[int, int] | None,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        resample: str = "bilinear",
    ) -> None:
        super().__init__()
        settings = ClassifierSettings(labels=labels, size=size, mean=mean, std=std, resample=resample)
        self.model = module
        self.labels = settings.labels
        self.size = settings.size
        self.resampling = settings.resample
        like = next(iter([*module.parameters(), *module.buffers()]), torch.zeros(0))
        self.register_buffer("mean", torch.tensor(settings.mean, device=like.device).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(settings.std, device=like.device).view(1, 3, 1, 1))

    @property
    def content_hash(self) -> str:
        """SHA-256 over the module's type, the weights, the labels and the preprocessing; code is not looked at."""
        kind = f"{type(self.model).__module__}.{type(self.model).__qualname__}"
        return content_hash(self, {**self._settings(), "module": kind})

    def _settings(self) -> dict[str, Any]:
        return {"labels": self.labels, "size": self.size, "resampling": self.resampling}

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images in [0, 1], resized to the classifier's own size."""
        check_rgb(images)
        try:
            logits = self._ask((resized(images, self.size, self.resampling) - self.mean) / self.std)
        except (PfungstError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ClassifierError(f"The classifier raised {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(logits, Tensor):
            raise ClassifierError(f"The classifier answered a {type(logits).__name__} where logits are expected.")
        check_shape(logits, len(images), self.labels)
        return logits

    def _ask(self, x: Tensor) -> Any:
        with frozen_model(self.model):
            return self.model(x)

    @torch.no_grad()
    def probabilities(self, images: Tensor, batch: int = 256) -> Tensor:
        """Softmax probabilities [N, classes], a batch at a time."""
        return torch.cat([self(part).softmax(1) for part in images.split(batch)])


class HuggingFaceClassifier(ModuleClassifier):
    """An image-classification model of a Hugging Face folder with its own preprocessing, frozen and in eval mode."""

    def __init__(self, model: nn.Module, labels: tuple[str, ...], preprocessing: dict[str, Any]) -> None:
        normalise = preprocessing.get("do_normalize", True)
        mean = preprocessing.get("image_mean", [0.5] * 3) if normalise else [0.0] * 3
        std = preprocessing.get("image_std", [0.5] * 3) if normalise else [1.0] * 3
        if not preprocessing.get("do_rescale", True):
            # Such a model takes bytes as they are: [0, 255] instead of [0, 1].
            mean, std = [m / 255 for m in mean], [s / 255 for s in std]
        resample = RESAMPLING.get(int(preprocessing.get("resample", 2)), "bilinear")
        super().__init__(model, labels, _input_size(preprocessing), mean, std, resample=resample)
        self.eval().requires_grad_(False)

    @property
    def content_hash(self) -> str:
        """SHA-256 over the weights, the labels and the preprocessing."""
        return content_hash(self, self._settings())

    def _ask(self, x: Tensor) -> Any:
        return self.model(pixel_values=x).logits

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


class QueriedClassifier(ABC):
    """A classifier that is asked for answers and has no gradient: guidance needs a surrogate.

    Images are sent in parts of at most `batch`; where the other side takes no other number, the last part is filled up.
    """

    differentiable = False

    def __init__(self, settings: ClassifierSettings, batch: int, *, fixed_batch: bool = False) -> None:
        self.settings = settings
        self.batch = batch
        self.fixed_batch = fixed_batch

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.settings.labels

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) that images are brought to, or None if they are sent as they are."""
        return self.settings.size

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """SHA-256 of all that decides an answer, as far as it can be known."""

    @abstractmethod
    def _ask(self, images: Tensor) -> tuple[Tensor, Output]:
        """The raw answer to images in [0, 1] on the CPU at their own size, and what it is."""

    def __call__(self, images: Tensor, /) -> Tensor:
        """Logits [B, classes], without gradient, where the images are."""
        check_rgb(images)
        if torch.is_grad_enabled() and images.requires_grad:
            raise ClassifierError(
                "This classifier is asked by queries alone and has no gradient. Use the gradient source 'surrogate'."
            )
        if not len(images):
            return torch.zeros(0, len(self.labels), device=images.device)
        logits = [self._logits(part) for part in images.detach().to("cpu", torch.float32).split(self.batch)]
        return torch.cat(logits).to(images.device)

    def probabilities(self, images: Tensor, batch: int = 256) -> Tensor:
        """Softmax probabilities [N, classes], a batch at a time."""
        with torch.no_grad():
            return torch.cat([self(part).softmax(1) for part in images.split(batch)])

    def _logits(self, images: Tensor) -> Tensor:
        n = len(images)
        if self.fixed_batch and n < self.batch:
            images = torch.cat([images, images[-1:].expand(self.batch - n, -1, -1, -1)])
        answer, output = self._ask(images)
        check_shape(answer, len(images), self.labels)
        return to_logits(answer, output)[:n]

    def _probe(self) -> None:
        """Asks once about two made-up images: what is wrong with every answer is said when the classifier is opened."""
        height, width = self.size or (64, 64)
        images = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))
        logits = self(images)
        if self.settings.output == "logits" and _are_probabilities(logits):
            raise ClassifierError("The classifier's answers are probabilities, not logits; say output: probabilities.")


def check_rgb(images: Tensor) -> None:
    """Images are [B, 3, H, W]."""
    if images.ndim != 4 or images.shape[1] != 3:
        raise ClassifierError(f"The classifier takes images [B, 3, H, W]; these are {list(images.shape)}.")


def check_shape(answer: Tensor, n: int, labels: tuple[str, ...]) -> None:
    """An answer is [B, classes] with at least two classes."""
    if tuple(answer.shape) == (n, len(labels)):
        return
    hint = " A single logit has to be given as two, for both classes." if answer.shape == (n, 1) else ""
    raise ClassifierError(
        f"The classifier answered {list(answer.shape)} for {n} images and {len(labels)} labels.{hint}"
    )


def resized(images: Tensor, size: tuple[int, int] | None, resampling: str) -> Tensor:
    """Images in [0, 1] at another size, smoothed where they shrink."""
    if size is None or tuple(images.shape[2:]) == size:
        return images
    return F.interpolate(images, size=size, mode=resampling, antialias=True).clamp(0, 1)


def to_logits(answer: Tensor, output: Output) -> Tensor:
    """Finite logits; of probabilities they are the logarithm, with a floor."""
    answer = answer.float()
    if not bool(torch.isfinite(answer).all()):
        raise ClassifierError("The classifier answered with NaN or infinity.")
    if output == "logits":
        return answer
    if not _are_probabilities(answer):
        total = answer.sum(1)
        raise ClassifierError(
            f"The classifier's answers are no probabilities: least {answer.min():.4g}, rows sum to between "
            f"{total.min():.4g} and {total.max():.4g}."
        )
    return (answer.clamp_min(0) / answer.clamp_min(0).sum(1, keepdim=True)).clamp_min(FLOOR).log()


def _are_probabilities(answer: Tensor) -> bool:
    return bool(answer.min() >= -1e-6) and bool(((answer.sum(1) - 1).abs() <= ROUNDING).all())


def first_line(error: BaseException, length: int = 200) -> str:
    """The first line of an error's text, shortened, as the end of a sentence."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text[:length].rstrip(". ") + "."


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
    _check_shards(folder)
    labels = config.get("id2label")
    if not isinstance(labels, dict) or len(labels) < 2:
        raise ClassifierError(f"{folder / 'config.json'} names fewer than two classes in id2label.")
    verbosity = transformers_logging.get_verbosity()
    # The missing keys that transformers would only warn about are an error here.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model, info = AutoModelForImageClassification.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,  # without it, transformers asks on the terminal whether to run a folder's code
            dtype=torch.float32,
            output_loading_info=True,
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


def _check_shards(folder: Path) -> None:
    """An index may name only safetensors files in its own folder; transformers would unpickle any other."""
    if not (folder / "model.safetensors.index.json").is_file():
        return
    shards = _json(folder, "model.safetensors.index.json").get("weight_map")
    if not isinstance(shards, dict):
        raise WeightsError(f"{folder / 'model.safetensors.index.json'} holds no weight_map.")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise WeightsError(
                f"{folder / 'model.safetensors.index.json'} names {shard!r:.80}; only safetensors files beside it "
                "are opened."
            )


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
