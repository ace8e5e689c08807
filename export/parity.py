"""Proof that exported graphs compute what eager torch computes: per graph, per sample, on fresh inputs; and the loop.

Shapes: B batch; a graph's outputs are compared sample by sample, never over the batch, where a large sample would hide
a small one that is wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from engine.counterfactual import CounterfactualSet
from engine.errors import ModelError
from engine.guidance import Model, gradient_source
from engine.loop import check_targets, counterfactuals
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.runtime.artifact_folder import DTYPES, LARGEST_ERROR, SMALLEST_COSINE, network_of
from engine.runtime.torch_runtime import TorchRuntime
from engine.sampling import walk
from engine.trajectory import Originals, draw_noise, one_pass
from engine.tries import query
from export.graphs import Contract

Run = Callable[..., Any]
FRESH_SEED = 90_001
FRESH_STEPS = 10
NUDGE, NUDGES, LARGEST_JUMP = 1e-6, 4, 1e-5
"""A latent is smooth if no nudge of this size, out of so many, turns torch's own gradient by more than the jump."""
LARGEST_SEARCH = 8
"""Latents looked at for each one that is wanted."""


class ParityError(ModelError):
    """An exported graph does not compute what torch computes; it must not be used."""


@dataclass(frozen=True)
class Figures:
    """The worst sample of a batch."""

    error: float
    cosine: float
    n: int

    @classmethod
    def of(cls, found: Tensor, expected: Tensor) -> "Figures":
        """Relative error |a - b| / |b| and cosine of each sample's flattened values, in float64."""
        if found.shape != expected.shape:
            raise ParityError(f"A graph gives {list(found.shape)} where torch gives {list(expected.shape)}.")
        a, b = found.detach().double().flatten(1), expected.detach().double().flatten(1)
        if not bool(torch.isfinite(b).all()):
            raise ParityError("Torch itself gives NaN or infinity on the fresh inputs, so nothing can be proven.")
        if not bool(torch.isfinite(a).all()):
            return cls(float("inf"), -1.0, len(a))
        norms = b.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        errors = (a - b).norm(dim=1) / norms
        cosines = (a * b).sum(dim=1) / (norms * a.norm(dim=1)).clamp_min(torch.finfo(torch.float64).tiny)
        return cls(float(errors.max()), float(cosines.min()), len(a))


@dataclass(frozen=True)
class LoopFigures:
    """A whole run on two runtimes."""

    n: int
    flips: int
    flips_identical: bool
    mask_iou: float
    """Smallest intersection over union of the edit masks."""
    latent_error: float
    """Largest relative error of a sample's final latent, of one pass."""


@dataclass(frozen=True)
class Fresh:
    """Inputs that no export has seen, by port: `z_hat` [N, C, h, w], `image` [N, 3, H, W], and `y` [N] if chosen."""

    inputs: dict[str, Tensor]
    passed_over: int = 0
    """Latents that were drawn too, but left out because rounding decides torch's float32 gradient there."""


@torch.no_grad()
def fresh_inputs(prior: Prior, n: int, height: int, width: int, guidance: Contract | None = None) -> Fresh:
    """What the loop hands to a decoder and a guide: denoised latents, here walked from noise, and their pictures.

    Gaussian latents will not do. Off the data, a decoder with ReLUs has kinks everywhere, and rounding the latent alone
    turns its float32 gradient by more than half precision does on data: there the portraits prior falls to a cosine of
    0.997 in fp16. The network is given noise, as in the loop.

    On data, too, some latents lie within rounding of a kink: two correct programs that add in another order differ
    there by 1e-3, and a comparison says nothing about either. With the float32 guidance graph such latents are passed
    over, by torch's own gradient alone, before any other program has run; where too few are smooth, the smoothest of
    all are taken.
    """
    generator = torch.Generator().manual_seed(FRESH_SEED)
    path = prior.path(FRESH_STEPS, 1.0, height, width)
    found: list[tuple[float, Tensor, Tensor]] = []
    drawn = 0
    classes = 2 if guidance is None else guidance.classes
    while sum(jump <= LARGEST_JUMP for jump, _, _ in found) < n and drawn < LARGEST_SEARCH * n:
        latents = walk(prior, path, torch.randn(n, *prior.latent_shape(height, width), generator=generator))
        y = torch.randint(classes, (n,), generator=generator)
        jumps = torch.zeros(n) if guidance is None else gradient_jumps(guidance, latents, y)
        found += zip(jumps.tolist(), latents, y, strict=True)
        drawn += n
    smooth = [one for one in found if one[0] <= LARGEST_JUMP]
    chosen = smooth[:n] if len(smooth) >= n else sorted(found, key=lambda one: one[0])[:n]
    z, y = torch.stack([latent for _, latent, _ in chosen]), torch.stack([label for _, _, label in chosen])
    inputs = {"z_hat": z, "image": prior.decode(z).clamp(0.0, 1.0)}
    kinked = [sum(jump > LARGEST_JUMP for jump, _, _ in ones) for ones in (found, chosen)]
    return Fresh(inputs if guidance is None else {**inputs, "y": y}, passed_over=kinked[0] - kinked[1])


def gradient_jumps(guidance: Contract, z_hat: Tensor, y: Tensor) -> Tensor:
    """How far nudges of the latent turn torch's gradient, the farthest of NUDGES, relative to its length: [N]."""
    generator = torch.Generator().manual_seed(FRESH_SEED)
    scale = torch.ones(())

    def gradient(z: Tensor) -> Tensor:
        rows: Tensor = guidance.function(z, y, scale)[0].double().flatten(1)
        return rows

    here = gradient(z_hat)
    length = here.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    nudged = (z_hat + NUDGE * torch.randn(z_hat.shape, generator=generator) for _ in range(NUDGES))
    return torch.stack([(gradient(z) - here).norm(dim=1) / length for z in nudged]).amax(dim=0)


def compare_graph(
    contract: Contract, run: Run, reference: Contract, batch: int, scale: float, fresh: dict[str, Tensor] | None = None
) -> dict[str, Figures]:
    """Each output of a graph against the float32 function in eager torch, on inputs that the export never saw."""
    known = {} if fresh is None else {**fresh, **({"z": fresh["z_hat"]} if contract.name == "decoder" else {})}
    inputs = [
        known[port.name][:batch] if port.name in known else x
        for port, x in zip(contract.inputs, contract.examples(batch, FRESH_SEED), strict=True)
    ]
    given = [
        torch.full_like(x, scale) if p.name == "scale" else x for p, x in zip(contract.inputs, inputs, strict=True)
    ]
    with torch.no_grad():
        found, expected = _tuple(run(*given)), _tuple(reference.function(*inputs))
    return {p.name: Figures.of(a, b) for p, a, b in zip(contract.outputs, found, expected, strict=True)}


def in_session(contract: Contract, session: Any) -> Run:
    """A session of ONNX Runtime on the CPU as a function of tensors."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        feed = {p.name: x.to(DTYPES[p.dtype][0]).numpy() for p, x in zip(contract.inputs, inputs, strict=True)}
        return tuple(torch.from_numpy(array) for array in session.run([p.name for p in contract.outputs], feed))

    return run


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def require(name: str, figures: dict[str, Figures], precision: str) -> None:
    """A ParityError unless every output is close enough: 1e-4 relative in fp32, a cosine of 0.999 below."""
    for output, worst in figures.items():
        if precision == "fp32" and not worst.error <= LARGEST_ERROR:
            raise ParityError(
                f"{name}: {output} differs from torch by {worst.error:.1e} relative, more than {LARGEST_ERROR:.0e}. "
                "The graph was not written."
            )
        if precision != "fp32" and not worst.cosine >= SMALLEST_COSINE:
            raise ParityError(
                f"{name}: the cosine of {output} with torch in float32 is {worst.cosine:.5f} in {precision}, less than "
                f"{SMALLEST_COSINE}. Export in fp32. The graph was not written."
            )


def eager_runtime(prior: Prior, f: Model, guide: Model, recipe: Recipe, height: int, width: int) -> TorchRuntime:
    """The reference that graphs are compared with."""
    path = prior.path(recipe.steps, recipe.strength, height, width)
    return TorchRuntime(prior, path, gradient_source(recipe, f, guide))


def compare_loops(
    prior: Prior,
    f: Model,
    guide: Model,
    recipe: Recipe,
    x0: Tensor,
    runtime: Runtime,
    targets: Sequence[int] | None = None,
) -> LoopFigures:
    """Whole runs of `counterfactuals` in eager torch and on another runtime, with the same seeds."""
    network = network_of(guide)
    eager = eager_runtime(prior, f, network, recipe, x0.shape[2], x0.shape[3])
    with torch.no_grad():
        logits = query(f, x0)
    chosen = second_classes(logits) if targets is None else list(targets)
    seeds = list(range(len(x0)))
    runs: list[list[CounterfactualSet]] = [
        counterfactuals(prior, f, network, x0, chosen, recipe, seeds, runtime=one) for one in (eager, runtime)
    ]
    flips = [[one.flipped for one in run] for run in runs]
    ends = []
    with torch.no_grad():
        for one in (eager, runtime):
            z0 = one.encode(x0)
            rebuilt = one.decode(z0).clamp(0.0, 1.0) if recipe.needs_reconstruction else None
            originals = Originals(x0, z0, check_targets(chosen, logits), rebuilt)
            eps = draw_noise(seeds, 1, z0)[:, 0]
            ends.append(one_pass(one)(originals, eps, torch.ones_like(x0[:, :1]), recipe, margin=recipe.margin).z)
    return LoopFigures(
        n=len(x0),
        flips=sum(sum(one) for one in flips[0]),
        flips_identical=flips[0] == flips[1],
        mask_iou=min(
            iou(a, b)
            for first, second in zip(*runs, strict=True)
            for a, b in zip(first.edit_masks, second.edit_masks, strict=True)
        ),
        latent_error=Figures.of(ends[1], ends[0]).error,
    )


def second_classes(logits: Tensor) -> list[int]:
    """The class after the predicted one, for each sample."""
    return [int(row) for row in logits.topk(2, dim=1).indices[:, 1]]


def iou(a: Tensor, b: Tensor) -> float:
    """Intersection over union of two masks; 1 if both are empty."""
    union = int((a | b).sum())
    return int((a & b).sum()) / union if union else 1.0


def as_dict(figures: dict[str, Figures]) -> dict[str, Any]:
    """Figures as JSON."""
    return {name: asdict(worst) for name, worst in figures.items()}
