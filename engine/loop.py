"""The guided loop of SCE-LITE-HQ: K counterfactuals per image, disjoint in their edits, from inputs that are checked.

Shapes: B batch, H W image size, K counterfactuals per image.
    x0           [B, 3, H, W] in [0, 1]
    m_excl       [B, 1, H, W] 1 where the counterfactual may edit
    logits       [B, classes]
    y            [B] target classes

`counterfactuals` is the entrance. Nothing mixes samples and each sample's noise comes from its own seed, so a result
does not depend on batch mates; networks may round differently for other batch sizes, which micro_batch = 1 rules out.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from engine.counterfactual import CancelToken, Cost, CounterfactualSet, Progress
from engine.errors import ClassifierError, ImageError, RecipeError, TargetError
from engine.guidance import Model, frozen_model, gradient_source
from engine.masks import exclusion, psi
from engine.prior import Prior, content_hash
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.runtime.torch_runtime import TorchRuntime
from engine.trajectory import Originals, draw_noise, guided_at
from engine.tries import Best, escalate, query, withhold


def counterfactuals(
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    x0: Tensor,
    targets: Sequence[int] | Tensor,
    recipe: Recipe,
    seeds: Sequence[int] | None = None,
    *,
    runtime: Runtime | None = None,
    tiny_decoder: Callable[[Tensor], Tensor] | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """K counterfactuals for each image of a batch: Algorithm 1 with Phase II between counterfactuals and escalation.

    `f` is the audited classifier and alone decides what has flipped; `f_hat` guides (it may be None for gradient
    sources that use f itself). Both take images in [0, 1] of any size and give logits; the guide also sees decoded
    images that reach a little outside. Without `seeds` every image gets the recipe's. Without `runtime` the prior runs
    in eager torch.
    """
    with torch.no_grad(), ExitStack() as stack:
        for model in (f, f_hat):
            stack.enter_context(frozen_model(model))
        start = time.perf_counter()
        check_images(x0)
        prior.latent_shape(x0.shape[2], x0.shape[3])
        source_logits = query(f, x0)
        y = check_targets(targets, source_logits)
        numbers = check_seeds(seeds, len(x0), recipe)
        guide = check_guide(f, f_hat, x0, source_logits, recipe)
        if runtime is None:
            runtime = TorchRuntime(
                prior,
                prior.path(recipe.steps, recipe.strength, x0.shape[2], x0.shape[3]).to(x0.device),
                gradient_source(recipe, f, guide),
                micro_batch=recipe.micro_batch,
                checkpointed=recipe.checkpoint,
                tiny_decoder=tiny_decoder,
            )
        if not any(guided_at(runtime.path, recipe)):
            raise RecipeError(
                f"{recipe.steps} steps at strength {recipe.strength} have none that is guided: the last is not, nor is "
                f"any at a noise level up to guide_above = {recipe.guide_above:g}. Raise the steps or the strength."
            )
        z0 = runtime.encode(x0)
        rebuilt = runtime.decode(z0).clamp(0.0, 1.0) if recipe.needs_reconstruction else None
        originals = Originals(x0, z0, y, rebuilt)
        seconds = (time.perf_counter() - start) / len(x0)
        setup = Cost(decoder_forwards=int(rebuilt is not None), classifier_queries=1, seconds=seconds)

        noises = draw_noise(numbers, recipe.k, z0)
        cumulative, edited = torch.zeros_like(x0[:, :1]), torch.zeros_like(x0[:, :1])
        found: list[Best] = []
        for k in range(recipe.k):
            m_excl = exclusion(cumulative, edited, recipe.tau)
            best = escalate(runtime, f, guide, originals, noises[:, k], numbers, m_excl, recipe, k, progress, cancel)
            if k and recipe.surprise_limit is not None:
                withhold(runtime, originals, noises[:, k], source_logits, recipe.surprise_limit, best)
            cumulative = cumulative + psi(x0, best.x_cf, recipe.blur)
            edited = torch.maximum(edited, (best.soft > 0).to(edited.dtype))
            found.append(best)

    hashes = {
        "prior": prior.content_hash,
        "classifier": model_hash(f),
        "guide": model_hash(guide),
        "recipe": recipe.digest,
    }
    return [
        CounterfactualSet(
            x0=x0[b],
            source=int(source_logits[b].argmax()),
            target=int(y[b]),
            images=torch.stack([best.x_cf[b] for best in found]),
            soft_masks=torch.stack([best.soft[b] for best in found]),
            edit_masks=torch.stack([best.soft[b] > 0 for best in found]),
            flipped=tuple(bool(best.flipped[b]) for best in found),
            logits=torch.stack([best.logits[b] for best in found]),
            source_logits=source_logits[b],
            seed=numbers[b],
            recipe=recipe,
            factors=tuple(best.factors[b] for best in found),
            hashes={**hashes, "image": hashlib.sha256(x0[b].cpu().contiguous().numpy().tobytes()).hexdigest()},
            costs=tuple(best.costs[b] for best in found),
            setup=setup,
        )
        for b in range(len(x0))
    ]


def check_images(x0: Tensor) -> None:
    """Images are a float tensor [B, 3, H, W] in [0, 1]."""
    if not isinstance(x0, Tensor):
        raise ImageError(f"Images have to be a tensor [B, 3, H, W]; this is a {type(x0).__name__}.")
    if x0.ndim != 4 or x0.shape[1] != 3 or not len(x0):
        raise ImageError(f"Images have to be [B, 3, H, W] in RGB; these are {list(x0.shape)}.")
    if not x0.is_floating_point():
        raise ImageError(f"Images have to be floats in [0, 1]; these are {x0.dtype}.")
    if not bool(torch.isfinite(x0).all()):
        raise ImageError("The images hold NaN or infinity.")
    if bool(x0.min() < 0) or bool(x0.max() > 1):
        raise ImageError(f"Images have to lie in [0, 1]; these reach from {x0.min():.3g} to {x0.max():.3g}.")


def check_targets(targets: Sequence[int] | Tensor, logits: Tensor) -> Tensor:
    """Targets [B] as a tensor: known classes that f does not predict already."""
    values = targets.tolist() if isinstance(targets, Tensor) else list(targets)
    batch, classes = logits.shape
    if len(values) != batch:
        raise TargetError(f"There are {len(values)} targets for {batch} images.")
    for value, predicted in zip(values, logits.argmax(dim=1).tolist(), strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < classes:
            raise TargetError(f"The target {value!r} is unknown; the classifier has the classes 0 to {classes - 1}.")
        if value == predicted:
            raise TargetError(f"The target {value} is what the classifier says already; choose another class.")
    return torch.tensor(values, dtype=torch.long, device=logits.device)


def check_seeds(seeds: Sequence[int] | None, batch: int, recipe: Recipe) -> list[int]:
    """One seed per image."""
    numbers = [recipe.seed] * batch if seeds is None else [int(seed) for seed in seeds]
    if len(numbers) != batch:
        raise RecipeError(f"There are {len(numbers)} seeds for {batch} images.")
    if any(not 0 <= seed < 2**63 for seed in numbers):
        raise RecipeError("A seed has to lie between 0 and 2^63 - 1.")
    return numbers


def check_guide(f: Model, f_hat: Model | None, x0: Tensor, logits: Tensor, recipe: Recipe) -> Model:
    """The model whose gradient guides; a surrogate has to know the same classes as f."""
    if recipe.gradient != "surrogate":
        return f
    if f_hat is None:
        raise RecipeError("The gradient source 'surrogate' needs a surrogate; give one or choose another source.")
    if query(f_hat, x0[:1]).shape[1] != logits.shape[1]:
        raise ClassifierError("The surrogate and the classifier do not have the same number of classes.")
    return f_hat


def model_hash(model: Model) -> str:
    """A model's own content hash if it has one, else that of its weights; empty for a bare function."""
    own = getattr(model, "content_hash", None)
    if isinstance(own, str):
        return own
    return content_hash(model) if isinstance(model, nn.Module) else ""
