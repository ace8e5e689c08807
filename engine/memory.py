"""Peak memory inside a stated budget: the largest batch, then micro-batches, then a checkpointed decoder.

Nothing is guessed from the size of a model. Every network is run once on hollow tensors, which have a shape and no
content, at the very resolution that is asked for, and the bytes alive at each moment are counted; guide and classifier,
which may be anything, are run for real on one black image. A budget counts what a run holds at its peak: weights,
images, activations and the copies that convolutions make. Python and its libraries come on top.

Shapes: B batch, H W image size, C latent channels, h w latent size, K counterfactuals per image.
"""

import copy
import logging
import re
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.errors import InputError, RecipeError
from engine.guidance import Model, frozen_model
from engine.prior import Prior
from engine.recipe import Recipe

log = logging.getLogger(__name__)

UNITS = {"": 1, "b": 1}
UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
MIB = 1024**2
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
# Measured with benchmarks.memory: what allocators keep beyond the tensors themselves, as a share, and what libraries
# set up when they are first used (kernels made at run time, arenas for blocks too small to be mapped one by one).
SLACK = 1.2
FIXED = 96 * MIB


def byte_count(text: str | int) -> int:
    """The number of bytes that '4GiB', '800MB' or a plain number says."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([a-z]{0,3})", str(text).strip().lower(), re.ASCII)
    count = round(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if count < 1:
        raise InputError(f"{str(text)[:80]!r} is no amount of memory; write it like 4GiB, 800MB or 800000000.")
    return count


def in_words(count: int) -> str:
    """Bytes as mebibytes, rounded up: a budget that is written like this is large enough."""
    return f"{-(-count // MIB)}MiB"


@dataclass(frozen=True)
class Footprint:
    """Bytes that one image needs at the peak of each part of a run, beside the weights, which are needed throughout."""

    weights: int
    held: int  # images, masks and latents that the loop keeps
    forward: int  # encoder, decoder or network without gradient, the largest of them
    guidance: int  # decoder and guide with their backward pass
    guidance_checkpointed: int
    classifier: int

    def peak(self, batch: int, micro_batch: int, checkpoint: bool) -> int:
        """Bytes at the peak of a run over `batch` images, `micro_batch` of them in a network at a time."""
        guidance = self.guidance_checkpointed if checkpoint else self.guidance
        busy = max(micro_batch * max(self.forward, guidance), batch * self.classifier)
        return self.weights + FIXED + int(SLACK * (batch * self.held + busy))


@dataclass(frozen=True)
class Plan:
    """How a run keeps inside a budget."""

    budget: int
    height: int
    width: int
    batch: int  # images that are worked on at a time
    micro_batch: int  # of those, images per network or decoder call
    checkpoint: bool
    weights: int
    peak: int  # bytes, weights among them

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with the planned settings."""
        return recipe.changed(micro_batch=self.micro_batch, checkpoint=self.checkpoint)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        decoder = "checkpointed decoder" if self.checkpoint else "plain decoder"
        return (
            f"{self.batch} at a time, {self.micro_batch} per call, {decoder}: at most {in_words(self.peak)} of "
            f"{in_words(self.budget)} at {self.height}x{self.width} pixels"
        )


def plan_memory(
    prior: Prior,
    recipe: Recipe,
    size: tuple[int, int],
    batch: int,
    budget: int,
    *,
    f: Model | None = None,
    f_hat: Model | None = None,
) -> Plan:
    """The fastest settings for `batch` images of `size` (H, W) whose peak stays inside `budget` bytes.

    Smaller calls cost little, a checkpointed decoder costs a second forward pass, so it comes last. Settings of the
    recipe are limits: a checkpointed decoder stays one and a micro-batch never grows. A RecipeError names the smallest
    budget that works.
    """
    need = footprint(prior, recipe, size, f=f, f_hat=f_hat)
    options = [
        Plan(budget, *size, many, min(few, recipe.micro_batch or few), checkpoint, need.weights, 0)
        for checkpoint in ((True,) if recipe.checkpoint else (False, True))
        for many in _halved(batch)
        for few in _halved(many)
    ]
    for option in options:
        peak = need.peak(option.batch, option.micro_batch, option.checkpoint)
        if peak <= budget:
            plan = Plan(**{**asdict(option), "peak": peak})
            log.info("memory: %s", plan)
            return plan
    least = min(need.peak(option.batch, option.micro_batch, option.checkpoint) for option in options)
    raise RecipeError(
        f"A memory budget of {budget} bytes is too small: one image of {size[0]}x{size[1]} pixels needs at least "
        f"{in_words(least)} with this prior ({in_words(need.weights)} of them weights). Raise the budget or take "
        "smaller images."
    )


def footprint(
    prior: Prior, recipe: Recipe, size: tuple[int, int], *, f: Model | None = None, f_hat: Model | None = None
) -> Footprint:
    """What one image of `size` (H, W) needs, counted."""
    guide = f_hat if recipe.gradient == "surrogate" else f
    forward, guidance, checkpointed = _prior_bytes(prior, recipe, size)
    pull = _gradient_bytes(guide, size)
    if recipe.gradient.startswith("smoothdiff"):
        pull *= 2  # the mean derivatives are as many as the activations
    return Footprint(
        weights=sum(map(_weight_bytes, {id(model): model for model in (prior, f, f_hat)}.values())),
        held=_held_bytes(prior, recipe, size),
        forward=forward,
        # The guide runs while the decoder's activations wait for the backward pass.
        guidance=max(guidance[0], guidance[1] + pull),
        guidance_checkpointed=max(checkpointed[0], checkpointed[1] + pull),
        classifier=_query_bytes(f, size),
    )


class LiveBytes(TorchDispatchMode):
    """Inside, the bytes of all tensors made and not yet freed are counted; `peak` is the most at any moment.

    Convolutions are charged with a copy of their input and output while they run: oneDNN reorders both, and cuDNN takes
    workspace of that order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            self._note(tensor, made_here=False)
        out = func(*args, **(kwargs or {}))
        made = _tensors(out)
        for tensor in made:
            self._note(tensor, made_here=True)
        if func.name().partition(".")[0] in CONVOLUTIONS:
            self.peak = max(self.peak, self.live + sum(_nbytes(tensor) for tensor in (*inputs, *made)))
        return out

    def _note(self, tensor: Tensor, made_here: bool) -> None:
        """Counts a tensor's storage once; what existed before, such as a weight, counts nothing, nor do its views."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        count = storage.nbytes() if made_here else 0

        def freed(_: object) -> None:
            del self._known[key]
            self.live -= count

        self._known[key] = weakref.ref(storage, freed)
        self.live += count
        self.peak = max(self.peak, self.live)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes alive at once, beyond those alive before, while `run` works."""
    counter = LiveBytes()
    with counter:
        run()
    return counter.peak


def _prior_bytes(prior: Prior, recipe: Recipe, size: tuple[int, int]) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """(forward, guidance, checkpointed guidance) of one image; guidance as (peak, bytes that wait for the backward)."""
    height, width = size
    shape = (1, *prior.latent_shape(height, width))
    timestep = prior.path(recipe.steps, recipe.strength, height, width).timesteps[0]
    # Layers such as position embeddings keep plain tensors, which may meet hollow ones.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    hollow = _hollow(prior, mode)
    dtype = next((p.dtype for p in prior.parameters()), torch.float32)
    with mode:
        image, z = torch.empty(1, 3, height, width, dtype=dtype), torch.empty(shape, dtype=dtype)
        t = torch.empty((), dtype=timestep.dtype)
        with torch.no_grad():
            forward = max(
                peak_bytes(lambda: hollow.encode(image)),
                peak_bytes(lambda: hollow.decode(z)),
                peak_bytes(lambda: hollow.predict(z, t)),
            )
        return forward, _guidance_bytes(hollow, z, False), _guidance_bytes(hollow, z, True)


def _guidance_bytes(hollow: Prior, z_hat: Tensor, checkpointed: bool) -> tuple[int, int]:
    counter = LiveBytes()
    with torch.enable_grad(), counter:
        z = z_hat.detach().requires_grad_(True)
        image = hollow.decode(z, checkpointed=checkpointed)
        waiting = counter.live
        torch.autograd.grad(image, z, torch.ones_like(image))
    return counter.peak, waiting


def _hollow(prior: Prior, mode: FakeTensorMode) -> Prior:
    """A copy of the prior on the CPU whose weights have shapes but no content."""
    twins: dict[int, Any] = {}
    with mode:
        for tensor in (*prior.parameters(), *prior.buffers()):
            twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            twins[id(tensor)] = nn.Parameter(twin, requires_grad=False) if is_parameter else twin
    return copy.deepcopy(prior, twins)


def _held_bytes(prior: Prior, recipe: Recipe, size: tuple[int, int]) -> int:
    """What the loop keeps for one image, from reading it: pictures, masks and latents alive in its fullest moment.

    Pictures: the original, its reconstruction, each counterfactual and its place in the result, and eight that come and
    go: picked rows, the decoded estimate before and after joining, the mask's reference and difference, the composite.
    """
    height, width = size
    pixels = height * width
    pictures = 2 + 2 * recipe.k + 8
    masks = 3 + 2 * recipe.k + 8
    latents = 1 + recipe.k + 8
    c, h, w = prior.latent_shape(height, width)
    return 4 * (3 * pixels * pictures + pixels * masks + c * h * w * latents)


def _gradient_bytes(model: Model | None, size: tuple[int, int]) -> int:
    """The guide's gradient at one image, measured on a black one."""
    module = _module(model)
    if module is None:
        return 0

    def gradient() -> None:
        with torch.enable_grad():
            x = _black(module, size).requires_grad_(True)
            logits = module(x)
            if logits.requires_grad:
                torch.autograd.grad(logits.sum(), x)

    with frozen_model(module):
        return peak_bytes(gradient)


def _query_bytes(model: Model | None, size: tuple[int, int]) -> int:
    """The classifier's answer to one image; a remote one is not asked and needs nothing here."""
    module = _module(model)
    if module is None:
        return 0
    with torch.no_grad(), frozen_model(module):
        image = _black(module, size)
        return peak_bytes(lambda: module(image))


def _module(model: Model | None) -> nn.Module | None:
    """The torch module that a model is or, like a surrogate, has; None where there is none."""
    module = getattr(model, "network", model) if not isinstance(model, nn.Module) else model
    return module if isinstance(module, nn.Module) else None


def _black(module: nn.Module, size: tuple[int, int]) -> Tensor:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.zeros(1, 3, *size, device=device)


def _weight_bytes(model: Model | None) -> int:
    module = _module(model)
    return sum(map(_nbytes, (*module.parameters(), *module.buffers()))) if module is not None else 0


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _halved(count: int) -> list[int]:
    """count, count/2, … 1."""
    steps = [count]
    while steps[-1] > 1:
        steps.append(-(-steps[-1] // 2))
    return steps
