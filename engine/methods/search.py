"""What every baseline shares: inputs checked, tries counted, and only unflipped samples tried again.

Shapes: B batch, K counterfactuals per image, J counterfactuals made together (1, or K where a method couples them),
H W image size, C latent channels, h w latent size.
    x0, images   [B, 3, H, W] in [0, 1]
    z, z0        [B, C, h, w]
    kept         [B, 1, H, W]; 1 keeps the original

A method is a function from one `Try` to images; `search` runs it for every counterfactual and every try. Nothing mixes
samples and each sample draws its noise from its own seed, so a result does not depend on its batch mates.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.counterfactual import CancelToken, Cost, CounterfactualSet, Progress
from engine.errors import Cancelled, PriorError
from engine.guidance import GradientSource, Guidance, Model, frozen_model, gradient_source, guidance
from engine.loop import check_guide, check_images, check_seeds, check_targets, model_hash
from engine.masks import FLOOR
from engine.path import Path
from engine.prior import Prior
from engine.recipe import GradientName, Recipe
from engine.sampling import walk
from engine.settings import Settings
from engine.trajectory import Originals, lead
from engine.tries import query

Perceptual = Callable[[Tensor, Tensor], Tensor]
"""A distance [B] between images [B, 3, H, W] and originals, such as audit.lpips.LPIPS."""
Cotangent = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(images of some samples, their rows) to (cotangent, logits)."""


class MethodSettings(Settings):
    """What the settings of every baseline have in common."""

    owner = "method's settings"

    method: str
    steps: int = Field(default=50, ge=1, le=1000, description="length of the full schedule")
    strength: float = Field(default=0.5, gt=0, lt=1, description="share of the schedule that is executed")
    gradient: GradientName = Field(
        default="vanilla", description="the audited classifier's own gradient, or the surrogate's"
    )
    temperature: float = Field(default=1.0, gt=0, description="logits are divided by it inside the loss")
    k: int = Field(default=1, ge=1, le=64, description="counterfactuals per image")
    seed: int = Field(default=0, ge=0, lt=2**63)
    micro_batch: int | None = Field(default=None, ge=1, description="samples per network call; none = all")
    checkpoint: bool = Field(default=False, description="recompute activations in the backward pass")

    @property
    def tries(self) -> tuple[float, ...]:
        """One value per try, in the order of the tries: what the method makes stronger."""
        return (1.0,)

    @property
    def shared(self) -> Recipe:
        """The part of these settings that the guided loop has too."""
        return Recipe(gradient=self.gradient, temperature=self.temperature, seed=self.seed)


class Watch(Protocol):
    """Told each step of a try; raises Cancelled where the caller wants to stop."""

    def __call__(self, step: int, steps: int) -> None: ...


@dataclass
class Tally:
    """Calls that each sample of a try used, [B] each; where J are made together, each of the J used as many."""

    network_calls: Tensor
    decoder_forwards: Tensor
    decoder_backwards: Tensor
    classifier_queries: Tensor

    @classmethod
    def of(cls, batch: int) -> "Tally":
        """Nothing used yet."""
        return cls(*(torch.zeros(batch, dtype=torch.long) for _ in range(4)))

    def add(self, rows: Tensor | None = None, **calls: int) -> None:
        """Counts calls for some samples, or for all."""
        where = slice(None) if rows is None else rows.cpu()
        for name, count in calls.items():
            getattr(self, name)[where] += count

    def cost(self, row: int, seconds: float) -> Cost:
        """What one sample's try cost."""
        calls = {name: int(counts[row]) for name, counts in vars(self).items()}
        return Cost(tries=1, seconds=seconds, **calls)


class Noise:
    """Standard normal draws of one shape, each sample's from its own generator: mates and tries do not disturb them."""

    def __init__(self, seeds: Sequence[int], k: int, like: Tensor) -> None:
        states = [int(np.random.SeedSequence([seed, k]).generate_state(1, np.uint64)[0] >> 1) for seed in seeds]
        self.generators = [torch.Generator().manual_seed(state) for state in states]
        self.like = like

    def __call__(self) -> Tensor:
        """The next draw, [B, ...]."""
        shape = self.like.shape[1:]
        draws = [torch.randn(shape, generator=generator) for generator in self.generators]
        return torch.stack(draws).to(self.like.device, self.like.dtype)


@dataclass(frozen=True)
class Try:
    """One try at the counterfactuals of some samples: what it starts from, and networks whose calls are counted."""

    prior: Prior
    path: Path
    source: GradientSource
    f: Model
    settings: MethodSettings
    originals: Originals
    closed: Tensor  # [B, 1, H, W] 1 where an earlier counterfactual has edited
    seeds: tuple[int, ...]
    ks: range
    value: float  # of settings.tries
    watch: Watch
    perceptual: Perceptual | None
    tally: Tally = field(repr=False)

    @cached_property
    def noise(self) -> Noise:
        """The samples' noise for this counterfactual, in latent shape."""
        return Noise(self.seeds, self.ks.start, self.originals.z0)

    def velocity(self, z: Tensor, i: int, rows: Tensor | None = None) -> Tensor:
        """The network's output at state z in step i."""
        self.tally.add(rows, network_calls=1)
        t = self.path.timesteps[i]
        return self._in_parts(lambda part: self.prior.predict(part, t), z)

    def encode(self, images: Tensor) -> Tensor:
        """Latents of images in [0, 1]."""
        return self._in_parts(self.prior.encode, images)

    def decode(self, z: Tensor, rows: Tensor | None = None) -> Tensor:
        """Images of latents, not clamped."""
        self.tally.add(rows, decoder_forwards=1)
        return self._in_parts(self.prior.decode, z)

    def asked(self, images: Tensor, rows: Tensor | None = None) -> Tensor:
        """The audited classifier's logits."""
        self.tally.add(rows, classifier_queries=1)
        return query(self.f, images)

    def classified(self, image: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(∇_x l, logits) at images of some samples: the plain cotangent of the gradient source."""
        return self.source(image, self.originals.y[rows])

    def guidance(self, z: Tensor, cotangent: Cotangent | None = None) -> Guidance:
        """(gradient, image, logits) at latents, pulled back through the decoder."""
        self.tally.add(decoder_forwards=1, decoder_backwards=1)
        decode = self.prior.decode
        return self.pulled_back(z, lambda part, _: decode(part, checkpointed=self.settings.checkpoint), cotangent)

    def filtered_guidance(self, x: Tensor, eps: Tensor, rows: Tensor | None = None) -> Guidance:
        """(gradient with respect to x, filtered image, logits) of some samples, or of all.

        Back-propagated through the whole chain F(x).
        """
        every = torch.arange(len(x), device=x.device) if rows is None else rows
        self.tally.add(rows, network_calls=self.path.length, decoder_forwards=1, decoder_backwards=1)
        return self.pulled_back(
            x, lambda part, at: self.filtered(part, eps[at]), lambda image, at: self.classified(image, every[at])
        )

    def filtered(self, x: Tensor, eps: Tensor) -> Tensor:
        """F(x): images sent to noise and walked back, differentiable in x."""
        prior = _Recomputed(self.prior) if self.settings.checkpoint else self.prior
        return self.prior.decode(walk(prior, self.path, self.path.noise(self.prior.encode(x), eps, 0)))  # type: ignore[arg-type]

    def pulled_back(
        self, z: Tensor, image_of: Callable[[Tensor, Tensor], Tensor], cotangent: Cotangent | None = None
    ) -> Guidance:
        """(gradient, image, logits) of image_of(z, rows), a micro-batch at a time."""
        speak = cotangent or self.classified
        found = []
        for rows in torch.arange(len(z), device=z.device).split(self.settings.micro_batch or len(z)):
            # A gradient source is told targets; this one is told rows, by which it finds targets and originals.
            found.append(guidance(partial(_swapped, image_of, rows), lambda image, y: speak(image, y), z[rows], rows))
        gradient, image, logits = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        return gradient, image, logits

    def _in_parts(self, function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        return torch.cat([function(part) for part in batch.split(self.settings.micro_batch or len(batch))])


def _swapped(image_of: Callable[[Tensor, Tensor], Tensor], rows: Tensor, z: Tensor) -> Tensor:
    return image_of(z, rows)


class _Recomputed:
    """A prior whose network keeps no activations for the backward pass and runs a second time instead."""

    def __init__(self, prior: Prior) -> None:
        self.prior = prior

    def predict(self, z: Tensor, t: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.prior.predict, z, t, use_reentrant=False, preserve_rng_state=False)
        return out


Attempt = Callable[[Try], Tensor]
"""One try of a method: images [B, J, 3, H, W]."""


@dataclass
class _Best:
    """The best try so far of each sample, by f."""

    images: Tensor  # [B, J, 3, H, W]
    logits: Tensor  # [B, J, classes]
    flipped: Tensor  # [B, J]
    values: list[list[float]]
    costs: list[Cost]


def search(
    attempt: Attempt,
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    x0: Tensor,
    targets: Sequence[int] | Tensor,
    settings: MethodSettings,
    seeds: Sequence[int] | None = None,
    *,
    together: bool = False,
    perceptual: Perceptual | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> list[CounterfactualSet]:
    """K counterfactuals per image by a method's `attempt`; `together` makes all K in one.

    f alone decides what has flipped. A try is repeated with the next of `settings.tries` for samples that f has not
    flipped, from the same noise, and the best by f is kept; every try is counted in the cost.
    """
    with torch.no_grad(), ExitStack() as stack:
        for model in (f, f_hat):
            stack.enter_context(frozen_model(model))
        start = time.perf_counter()
        check_images(x0)
        prior.latent_shape(x0.shape[2], x0.shape[3])
        source_logits = query(f, x0)
        y = check_targets(targets, source_logits)
        numbers = check_seeds(seeds, len(x0), settings.shared)
        guide = check_guide(f, f_hat, x0, source_logits, settings.shared)
        path = prior.path(settings.steps, settings.strength, x0.shape[2], x0.shape[3]).to(x0.device)
        z0 = torch.cat([prior.encode(part) for part in x0.split(settings.micro_batch or len(x0))])
        setup = Cost(classifier_queries=1, seconds=(time.perf_counter() - start) / len(x0))

        def one_try(closed: Tensor, ks: range, rows: Tensor, number: int) -> Try:
            def watch(step: int, steps: int) -> None:
                if cancel is not None and cancel.is_set():
                    raise Cancelled("The run was cancelled.")
                if progress is not None:
                    progress(Progress(ks.start, settings.k, number, step, steps, len(rows)))

            return Try(
                prior=prior,
                path=path,
                source=gradient_source(settings.shared, f, guide),
                f=f,
                settings=settings,
                originals=Originals(x0, z0, y, None).pick(rows),
                closed=closed[rows],
                seeds=tuple(numbers[row] for row in rows.tolist()),
                ks=ks,
                value=settings.tries[number],
                watch=watch,
                perceptual=perceptual,
                tally=Tally.of(len(rows)),
            )

        closed = torch.zeros_like(x0[:, :1])
        found: list[_Best] = []
        for ks in [range(settings.k)] if together else [range(k, k + 1) for k in range(settings.k)]:
            best = _best_of_tries(attempt, settings, x0, y, partial(one_try, closed, ks))
            edits = torch.stack([_edit(x0, images) for images in best.images.unbind(1)]).amax(0)
            closed = torch.maximum(closed, edits.to(closed.dtype))
            found.append(best)

    images = torch.cat([best.images for best in found], 1)
    logits = torch.cat([best.logits for best in found], 1)
    flipped = torch.cat([best.flipped for best in found], 1)
    hashes = {
        "prior": prior.content_hash,
        "classifier": model_hash(f),
        "guide": model_hash(guide),
        "recipe": settings.digest,
    }
    sets = []
    for b in range(len(x0)):
        edit = _edit(x0[b].expand_as(images[b]), images[b])
        sets.append(
            CounterfactualSet(
                x0=x0[b],
                source=int(source_logits[b].argmax()),
                target=int(y[b]),
                images=images[b],
                soft_masks=edit.to(x0.dtype),
                edit_masks=edit,
                flipped=tuple(flipped[b].tolist()),
                logits=logits[b],
                source_logits=source_logits[b],
                seed=numbers[b],
                recipe=settings,
                factors=tuple(value for best in found for value in best.values[b]),
                hashes={**hashes, "image": hashlib.sha256(x0[b].cpu().contiguous().numpy().tobytes()).hexdigest()},
                costs=tuple(best.costs[b] for best in found for _ in range(best.images.shape[1])),
                setup=setup,
            )
        )
    return sets


def _best_of_tries(
    attempt: Attempt, settings: MethodSettings, x0: Tensor, y: Tensor, one_try: Callable[[Tensor, int], Try]
) -> _Best:
    """The counterfactuals of every sample: tries of growing strength, each only for samples not yet flipped."""
    rows = torch.arange(len(x0), device=x0.device)
    best: _Best | None = None
    for number, value in enumerate(settings.tries):
        start = time.perf_counter()
        this = one_try(rows, number)
        images = settled(x0[rows], attempt(this))
        together = images.shape[1]
        logits = this.asked(images.flatten(0, 1)).unflatten(0, (len(rows), together))
        flipped = logits.argmax(2) == y[rows, None]
        seconds = (time.perf_counter() - start) / (len(rows) * together)
        spent = [this.tally.cost(b, seconds) for b in range(len(rows))]
        if best is None:
            best = _Best(images, logits, flipped, [[value] * together for _ in rows], spent)
        else:
            wanted = y[rows].repeat_interleave(together)
            ahead = lead(logits.flatten(0, 1), wanted).view_as(flipped)
            before = lead(best.logits[rows].flatten(0, 1), wanted).view_as(flipped)
            better = ~best.flipped[rows] & (flipped | (ahead > before))
            for name, new in (("images", images), ("logits", logits), ("flipped", flipped)):
                old = getattr(best, name)
                old[rows] = torch.where(better.view(*better.shape, *[1] * (new.ndim - 2)), new, old[rows])
            for row, cost, wins in zip(rows.tolist(), spent, better.tolist(), strict=True):
                best.costs[row] = best.costs[row] + cost
                best.values[row] = [value if win else old for win, old in zip(wins, best.values[row], strict=True)]
        rows = rows[~best.flipped[rows].all(1)]
        if not len(rows):
            break
    assert best is not None  # a method has at least one try
    return best


def settled(x0: Tensor, images: Tensor) -> Tensor:
    """Images [B, J, 3, H, W] in [0, 1] in which a pixel that moved by less than half a grey level has not moved."""
    if not bool(torch.isfinite(images).all()):
        raise PriorError("The method made values that are not finite; lower its guidance or its rate.")
    images = images.clamp(0.0, 1.0)
    originals = x0[:, None].expand_as(images)
    moved = (images - originals).abs().amax(2, keepdim=True) >= FLOOR / 2
    return torch.where(moved, images, originals)


def _edit(x0: Tensor, images: Tensor) -> Tensor:
    """[B, 1, H, W] where images differ from originals at all."""
    return (images != x0).any(1, keepdim=True)
