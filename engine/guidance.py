"""The guidance gradient g_smooth(z) = ∇_z l(f_hat(D(z)), y'), from one decoder forward and one backward.

Shapes: B batch, H W image size, K classes, C latent channels, h w latent size.
    z_hat, gradient   [B, C, h, w]
    image, cotangent  [B, 3, H, W]
    logits            [B, K]
    y                 [B] target classes

A gradient source turns a decoded image into the cotangent that is pulled back through the decoder: ∇_x l for the
surrogate, a smoothed or integrated substitute for the sources of the paper's ablation. The decoder is therefore run
once whatever the source costs. Losses are summed over the batch, never averaged: no gradient depends on batch mates.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ClassifierError
from engine.recipe import Recipe

Model = Callable[[Tensor], Tensor]
Guidance = tuple[Tensor, Tensor, Tensor]
# Mean derivative of an activation, keyed by the module and the number of its call within one forward pass.
Derivatives = dict[tuple[int, int], Any]


class GradientSource(Protocol):
    """Anything that gives, for images and targets, the cotangent at the image and the logits at the image."""

    def __call__(self, image: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(cotangent [B, 3, H, W], logits [B, K]), both detached."""
        ...


def guidance(
    decode: Callable[[Tensor], Tensor], source: GradientSource, z_hat: Tensor, y: Tensor, micro_batch: int | None = None
) -> Guidance:
    """(gradient, image, logits) at z_hat: Eq. g_smooth, with the decoded image for the mask at no further cost."""
    parts = [
        _guidance(decode, source, z, target)
        for z, target in zip(z_hat.split(micro_batch or len(z_hat)), y.split(micro_batch or len(y)), strict=True)
    ]
    gradients, images, logits = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return gradients, images, logits


def _guidance(decode: Callable[[Tensor], Tensor], source: GradientSource, z_hat: Tensor, y: Tensor) -> Guidance:
    with torch.enable_grad():
        z = z_hat.detach().requires_grad_(True)
        image = decode(z)
        cotangent, logits = source(image.detach(), y)
        (gradient,) = torch.autograd.grad(image, z, cotangent)
    return gradient, image.detach(), logits


def classification_loss(logits: Tensor, y: Tensor, kind: str = "cross_entropy", temperature: float = 1.0) -> Tensor:
    """l(logits, y') per sample [B]: cross-entropy, or minus the target's logit."""
    scaled = logits / temperature
    if kind == "target_logit":
        return -scaled.gather(1, y[:, None])[:, 0]
    return F.cross_entropy(scaled, y, reduction="none")


def clip_per_sample(gradient: Tensor, limit: float | None) -> Tensor:
    """Each sample's gradient, shortened to the L2 norm `limit` if it is longer."""
    if limit is None:
        return gradient
    norms = gradient.flatten(1).norm(dim=1).clamp_min(torch.finfo(gradient.dtype).tiny)
    return gradient * (limit / norms).clamp_max(1.0).reshape(-1, 1, 1, 1)


def normalise_per_sample(gradient: Tensor) -> Tensor:
    """Each sample's gradient at root mean square 1; a zero gradient stays zero."""
    rms = gradient.flatten(1).square().mean(dim=1).sqrt().clamp_min(torch.finfo(gradient.dtype).tiny)
    return gradient / rms.reshape(-1, 1, 1, 1)


def proximity_gradient(z: Tensor, z0: Tensor, lambda1: float, lambda2: float) -> Tensor:
    """∇(lambda1·|z - z0|_1 + lambda2·sum over positions of |z - z0|_2), with sub-gradient 0 at 0.

    The L2 term is the norm, not its square, taken over the channels of each position and summed, so that neither the
    resolution nor the batch changes the weight of a position.
    """
    difference = z - z0
    gradient = lambda1 * difference.sign()
    if lambda2:
        norms = difference.norm(dim=1, keepdim=True)
        gradient = gradient + lambda2 * torch.where(norms > 0, difference / norms.clamp_min(1e-12), 0.0)
    return gradient


def gradient_source(recipe: Recipe, f: Model, f_hat: Model) -> GradientSource:
    """The source that a recipe names: the surrogate's gradient, or a treatment of the audited classifier's own.

    vanilla        ∇_x l(f(x))
    smoothgrad     its mean over noisy copies of x
    smoothdiff     one backward pass whose activation derivatives are means over noisy copies (see `smoothdiff`)
    ig             (x - baseline) · mean of ∇ on the line from a black baseline: an attribution, as in the paper's row
    path_gradient  that mean without the factor: a direction
    smoothgrad_ig, smoothdiff_ig   ig with the smoothed gradient at each point of the line
    """
    model = f_hat if recipe.gradient == "surrogate" else f
    loss = partial(classification_loss, kind=recipe.loss, temperature=recipe.temperature)
    plain: GradientSource = partial(vanilla, model, loss)
    samples, noise = recipe.gradient_samples, recipe.gradient_noise
    smooth: GradientSource = plain
    if recipe.gradient.startswith("smoothgrad"):
        smooth = partial(smoothgrad, plain, samples=samples, noise=noise)
    elif recipe.gradient.startswith("smoothdiff"):
        smooth = partial(smoothdiff, model, loss, samples=samples, noise=noise)
    if recipe.gradient == "path_gradient":
        return partial(path_gradient, smooth, points=recipe.gradient_points)
    if recipe.gradient.endswith("ig"):
        return partial(integrated_gradients, smooth, points=recipe.gradient_points)
    return smooth


def vanilla(model: Model, loss: Callable[[Tensor, Tensor], Tensor], image: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """∇_x l(model(x), y')."""
    with torch.enable_grad():
        x = image.detach().requires_grad_(True)
        logits = model(x)
        if not logits.requires_grad:
            raise ClassifierError(
                "The classifier gives no gradient with respect to its input. Use the gradient source 'surrogate'."
            )
        (gradient,) = torch.autograd.grad(loss(logits, y).sum(), x)
    return gradient, logits.detach()


def smoothgrad(
    source: GradientSource, image: Tensor, y: Tensor, *, samples: int, noise: float
) -> tuple[Tensor, Tensor]:
    """The mean of a source over noisy copies of the image; the logits are those of the clean image."""
    _, logits = source(image, y)
    total = torch.zeros_like(image)
    for offset in _noise(image, samples, noise):
        total = total + source(image + offset, y)[0]
    return total / samples, logits


def path_gradient(source: GradientSource, image: Tensor, y: Tensor, *, points: int) -> tuple[Tensor, Tensor]:
    """The mean of a source over midpoints of the line from a black baseline to the image."""
    _, logits = source(image, y)
    total = torch.zeros_like(image)
    for point in range(points):
        total = total + source(image * ((point + 0.5) / points), y)[0]
    return total / points, logits


def integrated_gradients(source: GradientSource, image: Tensor, y: Tensor, *, points: int) -> tuple[Tensor, Tensor]:
    """(x - baseline) times the path gradient, for the black baseline 0."""
    mean, logits = path_gradient(source, image, y, points=points)
    return image * mean, logits


def smoothdiff(
    model: Model, loss: Callable[[Tensor, Tensor], Tensor], image: Tensor, y: Tensor, *, samples: int, noise: float
) -> tuple[Tensor, Tensor]:
    """Smoothed differentiation: one backward pass in which every activation's derivative is its mean over noisy inputs.

    Reading chosen here: noisy copies of the image are run forwards only, and at each elementwise activation the
    derivative at its input is averaged; then the clean image is run, and each activation is replaced in the backward
    pass by multiplication with that average. Values are those of the clean image throughout. Attention, pooling and
    normalisation are differentiated exactly at the clean image. This needs `samples` forwards and one backward, where
    SmoothGrad needs `samples` of both.
    """
    if not isinstance(model, nn.Module):
        raise ClassifierError("SmoothDiff has to see the activations of a torch module; this classifier is a function.")
    activations = [module for module in model.modules() if is_elementwise(module)]
    if not activations:
        raise ClassifierError("SmoothDiff found no activation modules in the classifier.")
    means: Derivatives = {}
    for offset in _noise(image, samples, noise):
        with _recorded_derivatives(activations, means, weight=1.0 / samples), torch.no_grad():
            model(image + offset)
    with _replaced_derivatives(activations, means):
        return vanilla(model, loss, image, y)


def is_elementwise(module: nn.Module) -> bool:
    """Whether a module is an activation: torch's and transformers', or one that says so by `elementwise = True`."""
    if next(module.children(), None) is not None and not getattr(module, "elementwise", False):
        return False
    home = type(module).__module__
    known = home == "torch.nn.modules.activation" and not isinstance(
        module, nn.MultiheadAttention | nn.Softmax | nn.LogSoftmax | nn.Softmin | nn.Softmax2d | nn.GLU
    )
    return known or home == "transformers.activations" or bool(getattr(module, "elementwise", False))


@contextmanager
def frozen_model(model: Any) -> Iterator[None]:
    """A torch module is in eval mode without parameter gradients inside, and is given back as it was."""
    if not isinstance(model, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, flag in wanted:
            parameter.requires_grad_(flag)


def _noise(image: Tensor, samples: int, noise: float) -> Iterator[Tensor]:
    """Offsets [1, 3, H, W] from a fixed seed: the same for every sample, so batch mates do not matter."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(samples):
        offset = torch.randn(1, *image.shape[1:], generator=generator)
        yield noise * offset.to(image.device, image.dtype)


def _derivative(module: nn.Module, h: Tensor) -> Tensor:
    with torch.enable_grad():
        point = h.detach().clone().requires_grad_(True)
        # forward() is called directly: hooks must not run, and an in-place activation needs a copy that is no leaf.
        return torch.autograd.grad(module.forward(point * 1.0).sum(), point)[0]


@contextmanager
def _recorded_derivatives(activations: list[nn.Module], means: Derivatives, weight: float) -> Iterator[None]:
    """Inside, one forward pass adds its weighted activation derivatives to the means."""
    calls: Counter[int] = Counter()

    def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        key = (id(module), calls[id(module)])
        calls[id(module)] += 1
        means[key] = means.get(key, 0.0) + weight * _derivative(module, inputs[0])

    handles = [module.register_forward_pre_hook(record) for module in activations]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaced_derivatives(activations: list[nn.Module], means: Derivatives) -> Iterator[None]:
    """Inside, every activation gives its true value and, in the backward pass, the mean derivative."""
    calls: Counter[int] = Counter()
    waiting: dict[int, Tensor] = {}

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        waiting[id(module)] = inputs[0]
        return (inputs[0].clone(), *inputs[1:])  # an in-place activation would overwrite the tensor kept here

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        h, key = waiting.pop(id(module)), (id(module), calls[id(module)])
        calls[id(module)] += 1
        return output.detach() + means[key] * (h - h.detach())

    handles: list[Any] = [module.register_forward_pre_hook(before) for module in activations]
    handles += [module.register_forward_hook(after) for module in activations]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
