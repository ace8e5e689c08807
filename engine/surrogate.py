"""Smoothed surrogates f̂ of a classifier f, distilled from queries only (paper, "Smoothed Surrogate Guidance").

    min over f̂ of  E[ KL(f ‖ f̂) + λ1·MixUp + λ2·label smoothing + λ3·adversarial ]

with f's own soft predictions as the only labels. Nothing of f is needed but images in, probabilities out, so a remote
black box can be distilled as well. There are always two surrogates: a guide, whose gradient moves counterfactuals, and
an evaluator, which says whether they are adversarial. `SurrogatePair` refuses to let one play both parts.

Shapes: B batch, N images, H W the images' size, S the network's input size, Y classes.
"""

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from engine.errors import Cancelled, ClassifierError, ImageError, InputError, RecipeError
from engine.rate import Rate
from engine.settings import wrong_setting
from engine.surrogate_net import NetworkConfig, SurrogateNetwork, check_images, resize

Query = Callable[[Tensor], Any]
"""Images [B, 3, H, W] in [0, 1] to probabilities [B, Y], as a tensor or an array."""
Progress = Callable[[int, int], None]
"""Told (steps done, steps in all) after every optimiser step."""
Cancel = Callable[[], bool]
"""Asked before every query and step; a true answer ends the work with `Cancelled`."""

REFERENCE_SIDE = 128
"""Side in pixels for which the paper's adversarial radius ε is stated."""
FEWEST_IMAGES = 16
FLOOR = 1e-7
"""Least probability that enters a logarithm."""


class Images(Protocol):
    """N images that can be sliced: a tensor [N, 3, H, W], or anything that reads a slice of them from disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Tensor: ...


class SurrogateRecipe(BaseModel):
    """How a surrogate is distilled. The defaults are the reference recipe of METHOD §2."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    role: Literal["guide", "evaluator"]
    seed: int = Field(ge=0)
    network: NetworkConfig = NetworkConfig()
    steps: int = Field(default=400, ge=1)
    """Optimiser steps, whatever the number of images, so that the time is known beforehand."""
    batch: int = Field(default=32, ge=2)
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    """The paper names no schedule; a short training needs one that ends at zero."""
    kl: Literal["f||f_hat", "f_hat||f"] = "f||f_hat"
    """f_hat||f is the paper's literal order; METHOD takes the first, which covers all of f's mass."""
    mixup_weight: float = Field(default=1.0, ge=0)
    """λ1."""
    mixup_beta: float = Field(default=10.0, gt=0)
    smoothing_weight: float = Field(default=1.0, ge=0)
    """λ2."""
    smoothing: float = Field(default=0.05, ge=0, lt=1)
    adversarial_weight: float = Field(default=1.0, ge=0)
    """λ3."""
    adversarial_epsilon: float = Field(default=1.0, ge=0)
    """L2 radius at 128×128 pixels; `epsilon_at` scales it."""
    adversarial_steps: int = Field(default=5, ge=1)
    adversarial_share: float = Field(default=1.0, gt=0, le=1)
    """Share of each batch that is attacked; the attack is most of the cost."""
    noise: float = Field(default=0.1, ge=0)
    """Standard deviation of the Gaussian noise on training inputs."""
    extra_queries: int = Field(default=0, ge=0)
    """Query budget beyond the images themselves: noisy, mixed and patched images that f labels too."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the images that is kept back to measure agreement."""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise RecipeError(wrong_setting(error, "surrogate recipe", SurrogateRecipe)) from None

    def changed(self, **settings: Any) -> "SurrogateRecipe":
        """The same recipe with some settings replaced, validated again."""
        return SurrogateRecipe(**{**self.model_dump(), **settings})

    def epsilon_at(self, height: int, width: int) -> float:
        """Radius for another resolution: ε·√(H·W)/128, the same root-mean-square change per pixel."""
        return self.adversarial_epsilon * math.sqrt(height * width) / REFERENCE_SIDE


GUIDE = SurrogateRecipe(role="guide", seed=1907, steps=300, adversarial_share=0.25, extra_queries=3000)
"""The reference recipe, shortened, with a quarter of each batch attacked."""
EVALUATOR = SurrogateRecipe(
    role="evaluator",
    seed=1874,
    steps=400,
    network=NetworkConfig(widths=(24, 48, 64, 96), blocks=1),
    adversarial_epsilon=0.5,
    adversarial_share=0.25,
    noise=0.05,
    mixup_beta=4.0,
    extra_queries=4000,
)
"""Another network, seed and smoothing than the guide's: what fools one need not fool the other."""


@dataclass(frozen=True)
class Agreement:
    """How well f̂ follows f on images it was not trained on."""

    rate: Rate
    """Share of held-out images on which both name the same class."""
    mean_kl: float
    """Mean KL(f ‖ f̂) in nats."""
    majority: float
    """Share of f's most frequent class among them: the agreement that a constant would reach."""


@dataclass(frozen=True)
class Surrogate:
    """A distilled f̂: a frozen network in eval mode, and where it came from."""

    network: nn.Module
    recipe: SurrogateRecipe
    n_classes: int
    agreement: Agreement
    queries: int
    """Images that f was asked about."""
    weights_hash: str

    def __call__(self, images: Tensor) -> Tensor:
        """Logits [B, Y] of images [B, 3, H, W] in [0, 1], with gradient."""
        logits: Tensor = self.network(images)
        return logits

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Class indices [B]."""
        return self(images).argmax(dim=1)


@dataclass(frozen=True)
class SurrogatePair:
    """A guide and an evaluator that are really two."""

    guide: Surrogate
    evaluator: Surrogate

    def __post_init__(self) -> None:
        check_recipes(self.guide.recipe, self.evaluator.recipe)
        if self.guide.weights_hash == self.evaluator.weights_hash:
            raise RecipeError("guide and evaluator have the same weights: scoring with the guide is circular")
        if self.guide.n_classes != self.evaluator.n_classes:
            raise RecipeError(
                f"the guide knows {self.guide.n_classes} classes and the evaluator {self.evaluator.n_classes}: "
                "they were distilled from different classifiers"
            )


def check_recipes(guide: SurrogateRecipe, evaluator: SurrogateRecipe) -> None:
    """Raises RecipeError unless roles fit and both seed and recipe differ."""
    if (guide.role, evaluator.role) != ("guide", "evaluator"):
        raise RecipeError(
            f"the guide's recipe has the role {guide.role!r} and the evaluator's {evaluator.role!r}; "
            "a surrogate cannot stand in for the other: scoring with the guide is circular"
        )
    if guide.seed == evaluator.seed:
        raise RecipeError(f"guide and evaluator share the seed {guide.seed}; give the evaluator another")
    if guide.model_copy(update={"role": evaluator.role, "seed": evaluator.seed}) == evaluator:
        raise RecipeError("guide and evaluator differ in their seed only; give the evaluator another recipe as well")


def distil(
    query: Query,
    images: Images,
    recipe: SurrogateRecipe,
    *,
    network: nn.Module | None = None,
    query_batch: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Surrogate:
    """A surrogate of the classifier behind `query`, trained on images [N, 3, H, W] in [0, 1].

    `network` is the starting point for white-box users (see `smoothed_copy`; it is copied, and sees the images at
    their own size); without it a new `SurrogateNetwork` is trained. Equal arguments give equal bits on one machine
    with one thread count. The global random state is left as it was.
    """
    n_held_out, n_train = _split_sizes(len(images), recipe)
    rng = np.random.default_rng(recipe.seed)
    order = rng.permutation(len(images))
    size = recipe.network.input_size if network is None else None
    ask = _Asker(query, size, cancel)

    pool, labels = ask.all(images, query_batch)
    held_out, train = order[:n_held_out], order[n_held_out:]
    extra = [ask(batch) for batch in _extra_points(images, train, recipe, query_batch, rng)]
    x = torch.cat([pool[train], *(images for images, _ in extra)])
    y = torch.cat([labels[train], *(answers for _, answers in extra)])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        student = SurrogateNetwork(ask.n_classes, recipe.network) if network is None else copy.deepcopy(network)
        student = student.to(device).requires_grad_(True)
        with torch.enable_grad():
            _train(student, x, y, recipe, rng, torch.device(device), progress, cancel)
        _settle_norms(student, x[:n_train], recipe.batch, torch.device(device))
    student.eval().requires_grad_(False)
    agreement = measure_agreement(student, pool[held_out], labels[held_out])
    return Surrogate(student, recipe, ask.n_classes, agreement, ask.count, hash_weights(student))


@torch.no_grad()
def measure_agreement(network: nn.Module, images: Tensor, probabilities: Tensor, batch: int = 128) -> Agreement:
    """Agreement of a network with f's probabilities [N, Y] on images [N, 3, H, W]."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    logits = torch.cat([network(images[i : i + batch].to(device)).cpu() for i in range(0, len(images), batch)])
    f_class = probabilities.argmax(dim=1)
    same = int((logits.argmax(dim=1) == f_class).sum())
    majority = int(f_class.bincount().max()) / len(f_class)
    kl = kl_divergence(probabilities, logits.log_softmax(dim=1).exp())
    return Agreement(Rate.of(same, len(images)), float(kl.mean()), majority)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) in nats of each row, [B, Y] and [B, Y] to [B]."""
    return (p * (p.clamp_min(FLOOR).log() - q.clamp_min(FLOOR).log())).sum(dim=1)


def query_probabilities(query: Query, images: Tensor, n_classes: int | None = None) -> Tensor:
    """f's probabilities [B, Y] for images [B, 3, H, W], checked: a ClassifierError says what is wrong with them."""
    with torch.no_grad():
        answer = query(images)
    try:
        p = torch.as_tensor(answer).detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ClassifierError(f"the classifier answered with {type(answer).__name__}, not with numbers") from error
    if p.ndim != 2:
        raise ClassifierError(f"the classifier must answer [B, classes]; it answered {list(p.shape)}")
    if len(p) != len(images):
        raise ClassifierError(f"the classifier was sent {len(images)} images and answered for {len(p)}")
    if p.shape[1] < 2:
        raise ClassifierError("the classifier answers one number per image; give it two columns, 1 − p and p")
    if n_classes is not None and p.shape[1] != n_classes:
        raise ClassifierError(f"the classifier named {n_classes} classes before and {p.shape[1]} now")
    if not torch.isfinite(p).all():
        raise ClassifierError("the classifier answered with NaN or infinity")
    total = p.sum(dim=1, keepdim=True)
    # 1e-3 leaves room for half precision and for rounding in JSON.
    if p.min() < -1e-6 or (total - 1).abs().max() > 1e-3:
        raise ClassifierError(
            f"the classifier's answers are no probabilities: least {p.min():.4g}, rows sum to between "
            f"{total.min():.4g} and {total.max():.4g}; apply a softmax to logits first"
        )
    return p.clamp_min(0) / p.clamp_min(0).sum(dim=1, keepdim=True)


class _Asker:
    """Queries f batch by batch, keeps count, and brings the images to the surrogate's size."""

    def __init__(self, query: Query, size: int | None, cancel: Cancel | None) -> None:
        self.query, self.size, self.cancel = query, size, cancel
        self.count = 0
        self._n_classes: int | None = None

    @property
    def n_classes(self) -> int:
        assert self._n_classes is not None, "f was not asked yet"
        return self._n_classes

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images at the surrogate's size and f's probabilities for them."""
        _check_cancel(self.cancel)
        check_images(images)
        probabilities = query_probabilities(self.query, images, self._n_classes)
        self._n_classes = probabilities.shape[1]
        self.count += len(images)
        reduced = images if self.size is None else resize(images, self.size)
        return reduced.detach().to("cpu", torch.float32), probabilities

    def all(self, images: Images, batch: int) -> tuple[Tensor, Tensor]:
        """The same for every image, in order."""
        parts = [self(images[i : i + batch]) for i in range(0, len(images), batch)]
        shapes = {tuple(x.shape[1:]) for x, _ in parts}
        if len(shapes) > 1:
            raise ImageError(f"images must have one size; these have {sorted(shapes)}")
        return torch.cat([x for x, _ in parts]), torch.cat([p for _, p in parts])


def _split_sizes(n: int, recipe: SurrogateRecipe) -> tuple[int, int]:
    """Numbers of held-out and of training images."""
    if n < FEWEST_IMAGES:
        raise InputError(f"a surrogate needs at least {FEWEST_IMAGES} images; there are {n}")
    n_held_out = max(1, round(n * recipe.held_out))
    if n - n_held_out < 2:
        raise RecipeError(f"held_out={recipe.held_out} leaves {n - n_held_out} of {n} images for training")
    return n_held_out, n - n_held_out


def _extra_points(
    images: Images, train: np.ndarray, recipe: SurrogateRecipe, batch: int, rng: np.random.Generator
) -> list[Tensor]:
    """Points off the data for f to label: noisy images, mixtures and patchworks in turn, `extra_queries` in all.

    A patchwork shows one image inside a blob of another. Counterfactuals are edits of a part, and pictures alone never
    tell what f says when some of its cues change and others stay.
    """

    def gather(indices: np.ndarray) -> Tensor:
        return torch.cat([images[int(i) : int(i) + 1] for i in indices])

    batches = []
    for start in range(0, recipe.extra_queries, batch):
        count = min(batch, recipe.extra_queries - start)
        first, second = (rng.choice(train, count) for _ in range(2))
        x, other = gather(first), gather(second)
        noisy = x + recipe.noise * torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32)).to(x)
        # Uniform weights, not Beta(10, 10): f is asked along the whole way from one image to the other.
        weight = torch.from_numpy(rng.random((count, 1, 1, 1), dtype=np.float32)).to(x)
        mixed = weight * x + (1 - weight) * other
        inside = _blobs(count, x.shape[2], x.shape[3], rng).to(x)
        patched = inside * other + (1 - inside) * x
        kind = torch.arange(start, start + count, device=x.device).view(-1, 1, 1, 1) % 3
        batches.append(torch.where(kind == 0, noisy.clamp(0, 1), torch.where(kind == 1, mixed, patched)))
    return batches


def _blobs(count: int, height: int, width: int, rng: np.random.Generator) -> Tensor:
    """Soft random regions [count, 1, H, W] in [0, 1] that cover a fifth to four fifths of the picture."""
    coarse = torch.from_numpy(rng.standard_normal((count, 1, 4, 4), dtype=np.float32))
    field = F.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=False)
    share = torch.from_numpy(rng.uniform(0.2, 0.8, (count, 1, 1)).astype(np.float32))
    ordered = field.flatten(2).sort(dim=2, descending=True).values
    level = ordered.gather(2, (share * (ordered.shape[2] - 1)).long())[..., None]
    return torch.sigmoid((field - level) * 12)


def _train(
    network: nn.Module,
    images: Tensor,
    probabilities: Tensor,
    recipe: SurrogateRecipe,
    rng: np.random.Generator,
    device: torch.device,
    progress: Progress | None,
    cancel: Cancel | None,
) -> None:
    """Minimises the surrogate's objective over `recipe.steps` batches drawn in shuffled epochs."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    queue = np.empty(0, dtype=np.int64)
    batch = min(recipe.batch, len(images))
    for step in range(recipe.steps):
        _check_cancel(cancel)
        if len(queue) < batch:
            queue = rng.permutation(len(images))
        chosen, queue = queue[:batch], queue[batch:]
        x, y = images[chosen].to(device), probabilities[chosen].to(device)
        if recipe.schedule == "cosine":
            optimiser.param_groups[0]["lr"] = recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(objective(network, x, y, recipe, generator, rng))
        optimiser.step()
        if progress is not None:
            progress(step + 1, recipe.steps)


def objective(
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    recipe: SurrogateRecipe,
    generator: torch.Generator,
    rng: np.random.Generator,
) -> Tensor:
    """KL + λ1·MixUp + λ2·label smoothing + λ3·adversarial for images [B, 3, H, W] with f's probabilities [B, Y].

    KL and label smoothing see the same noisy images and share a forward pass; all images of the step go through the
    network as one batch.
    """
    inputs = [x + recipe.noise * _normal_like(x, generator)]
    targets = [y]
    if recipe.mixup_weight > 0:
        alpha = torch.from_numpy(rng.beta(recipe.mixup_beta, recipe.mixup_beta, len(x))).to(x)
        other = torch.from_numpy(rng.permutation(len(x))).to(x.device)
        mixed = _mix(x, x[other], alpha.view(-1, 1, 1, 1))
        inputs.append(mixed + recipe.noise * _normal_like(x, generator))
        targets.append(_mix(y, y[other], alpha.view(-1, 1)))
    if recipe.adversarial_weight > 0:
        attacked = math.ceil(recipe.adversarial_share * len(x))
        inputs.append(attack(network, x[:attacked], y[:attacked], recipe, generator))
        targets.append(y[:attacked])

    log_q = network(torch.cat(inputs)).log_softmax(dim=1).split([len(part) for part in inputs])
    terms = list(zip(log_q, targets, strict=True))
    smooth = (1 - recipe.smoothing) * y + recipe.smoothing / y.shape[1]
    loss = _kl(log_q[0], y, recipe.kl) + recipe.smoothing_weight * cross_entropy(log_q[0], smooth)
    if recipe.mixup_weight > 0:
        loss = loss + recipe.mixup_weight * cross_entropy(*terms[1])
    if recipe.adversarial_weight > 0:
        loss = loss + recipe.adversarial_weight * cross_entropy(*terms[-1])
    return loss


def attack(network: nn.Module, x: Tensor, y: Tensor, recipe: SurrogateRecipe, generator: torch.Generator) -> Tensor:
    """Images in the L2 ball of radius ε around x on which f̂ departs most from y (projected gradient ascent)."""
    epsilon = recipe.epsilon_at(*x.shape[-2:])
    step = 2.5 * epsilon / recipe.adversarial_steps
    # Eval mode: the attack must leave no trace in the batch norms' running statistics.
    was_training = network.training
    network.eval()
    delta = epsilon * _unit(_normal_like(x, generator))
    for _ in range(recipe.adversarial_steps):
        delta.requires_grad_(True)
        loss = cross_entropy(network(x + delta).log_softmax(dim=1), y) * len(x)
        (gradient,) = torch.autograd.grad(loss, delta)
        delta = _project(delta.detach() + step * _unit(gradient), epsilon)
        delta = (x + delta).clamp(0, 1) - x
    network.train(was_training)
    return x + delta


def cross_entropy(log_q: Tensor, p: Tensor) -> Tensor:
    """Mean of −Σ p·log q over the batch."""
    return -(p * log_q).sum(dim=1).mean()


def _kl(log_q: Tensor, p: Tensor, direction: str) -> Tensor:
    log_p = p.clamp_min(FLOOR).log()
    if direction == "f||f_hat":
        return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")


def _mix(first: Tensor, second: Tensor, alpha: Tensor) -> Tensor:
    return alpha * first + (1 - alpha) * second


def _normal_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise drawn on the CPU, so that every device sees the same."""
    return torch.randn(x.shape, generator=generator).to(x)


def _unit(x: Tensor) -> Tensor:
    """Each sample divided by its L2 norm."""
    return x / torch.linalg.vector_norm(x, dim=(1, 2, 3), keepdim=True).clamp_min(1e-12)


def _project(delta: Tensor, epsilon: float) -> Tensor:
    """Each sample brought back into the L2 ball."""
    norm = torch.linalg.vector_norm(delta, dim=(1, 2, 3), keepdim=True).clamp_min(1e-12)
    return delta * (epsilon / norm).clamp_max(1)


@torch.no_grad()
def _settle_norms(network: nn.Module, images: Tensor, batch: int, device: torch.device) -> None:
    """Batch norms take their statistics anew from clean images.

    Training showed them noisy, mixed and attacked ones; guidance and evaluation show clean ones.
    """
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) and m.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    network.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average
        norm.train()
    for start in range(0, min(len(images), 32 * batch), batch):
        part = images[start : start + batch]
        if len(part) == batch or start == 0:
            network(part.to(device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _check_cancel(cancel: Cancel | None) -> None:
    if cancel is not None and cancel():
        raise Cancelled("distillation was cancelled")


def hash_weights(network: nn.Module) -> str:
    """SHA-256 over a network's parameters and buffers as a safetensors file would hold them."""
    return hashlib.sha256(serialise(network)).hexdigest()


def serialise(network: nn.Module) -> bytes:
    """A network's parameters and buffers as the bytes of a safetensors file."""
    # Clones: safetensors refuses tensors that share memory, as tied weights do.
    state = {name: value.detach().cpu().clone().contiguous() for name, value in network.state_dict().items()}
    return safetensors.torch.save(state)
