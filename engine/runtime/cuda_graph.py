"""The guided loop as replays of captured CUDA graphs: the host starts each step with one call and waits for none.

Shapes: B batch, C latent channels, h w latent size, H W image size, N steps, K classes.
    z, z0, eps           [B, C, h, w]
    kept                 [B, 1, h, w]; 1 keeps the original
    m_excl               [B, 1, H, W]
    reference            [B, 3, H, W]
    y, active            [B]
    a, b                 [N + 1], timesteps [N]

`guided_step` and `plain_step` are pure functions of tensors with the semantics of engine.trajectory.trajectory, of
whose parts they are made. What the loop decides on the host is here a table that a step index on the device reads
(where masks begin, what is pasted) or a mask over the batch (who is still guided): a captured graph cannot shrink its
batch. Two decisions stay with the host, because they need no value of the device: whether a step is guided at all, and
to look every few steps whether anybody still has to be.

The order of the samples' arithmetic is that of the loop, so a network that rounds every sample alone (micro_batch = 1)
gives the same bits.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.errors import InputError, RecipeError
from engine.masks import to_latent
from engine.path import Path
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.runtime.artifact_folder import check_gradient, padded
from engine.trajectory import Originals, Trajectory, first_masked, guided_at, kept_cells, lead, pushed, walked

BUCKETS = (1, 2, 4, 8, 16, 32)
"""Batch sizes that are captured; others are padded up to the next."""
LOOK_EVERY = 4
WARM_UP = 3
"""Rounds before a capture, in which libraries choose their kernels and reserve their memory."""


@runtime_checkable
class CapturableRuntime(Runtime, Protocol):
    """A runtime whose `velocity_at` and `guidance` only start work on the current stream and never wait for it."""

    def velocity_at(self, z: Tensor, timestep: Tensor) -> Tensor:
        """The network's output at state z, told a timestep that lies on the device."""
        ...


class State(NamedTuple):
    """What a step changes."""

    z: Tensor
    kept: Tensor
    active: Tensor  # [B] bool, samples that are still guided
    guided_steps: Tensor  # [B]
    i: Tensor  # [] the number of the step


class Tables(NamedTuple):
    """What stays fixed through a pass, all on the device."""

    a: Tensor
    b: Tensor
    timesteps: Tensor
    masked: Tensor  # [N] bool, whether the step computes a mask
    clean: Tensor  # [N] bool, whether the step pastes z0 itself
    z0: Tensor
    eps: Tensor
    y: Tensor
    m_excl: Tensor
    reference: Tensor
    weight: Tensor  # [] the escalation factor times beta
    margin: Tensor  # [] lead at which a sample is guided no more; infinite for never


def schedule(path: Path, recipe: Recipe) -> dict[str, Tensor]:
    """The columns of `Tables` that belong to a path and a recipe."""
    steps = torch.arange(path.length)
    last = path.length - 1
    return {
        "a": path.a,
        "b": path.b,
        "timesteps": path.timesteps,
        "masked": steps >= first_masked(path, recipe),
        "clean": (steps == last) | (recipe.paste == "clean"),
    }


def first_state(tables: Tables, path: Path, recipe: Recipe) -> State:
    """z = a_0·z0 + b_0·eps, with nothing kept but what earlier counterfactuals have edited."""
    z0 = tables.z0
    zero = torch.zeros((), dtype=torch.long, device=z0.device)
    return State(
        z=at_step(path, tables, zero).noise(z0, tables.eps, 0),
        kept=to_latent(1.0 - tables.m_excl, (z0.shape[-2], z0.shape[-1]), recipe.downsampling),
        active=torch.ones(len(z0), dtype=torch.bool, device=z0.device),
        guided_steps=torch.zeros(len(z0), dtype=torch.long, device=z0.device),
        i=zero,
    )


def guided_step(state: State, tables: Tables, *, runtime: CapturableRuntime, path: Path, recipe: Recipe) -> State:
    """One guided step: velocity, estimate, step, gradient, proximity, clip, mask, paste."""
    here, z, z_hat = _walked(state, tables, runtime, path, recipe)
    z0, y = tables.z0, tables.y
    gradient, x_hat, logits = runtime.guidance(z_hat, y)
    near = z_hat if recipe.proximity == "estimate" else z
    push = pushed(gradient, near, z0, here.sigma(0), tables.weight, recipe)
    cells = kept_cells(tables.reference, x_hat, tables.m_excl, (z.shape[-2], z.shape[-1]), recipe)
    masked = tables.masked.index_select(0, state.i[None])
    kept = torch.where(_per_sample(state.active & masked), cells, state.kept)
    active = state.active & (lead(logits, y) < tables.margin)
    z = torch.where(_per_sample(active), z - push, z)
    z = _pasted(z, kept, state, tables, here)
    return State(z, kept, active, state.guided_steps + state.active, state.i + 1)


def plain_step(state: State, tables: Tables, *, runtime: CapturableRuntime, path: Path, recipe: Recipe) -> State:
    """One step without guidance: the last, or any after every sample has flipped."""
    here, z, _ = _walked(state, tables, runtime, path, recipe)
    z = _pasted(z, state.kept, state, tables, here)
    return state._replace(z=z, i=state.i + 1)


def at_step(path: Path, tables: Tables, i: Tensor) -> Path:
    """The path's formulas on step i alone, so that its step 0 is step i; i stays on the device."""
    window = copy.copy(path)
    # Indexing by a tensor without dimensions would fetch its value to the host; selecting does not.
    levels = torch.stack([i, i + 1])
    window.a, window.b = tables.a.index_select(0, levels), tables.b.index_select(0, levels)
    window.timesteps = tables.timesteps.index_select(0, i[None])
    return window


def _walked(
    state: State, tables: Tables, runtime: CapturableRuntime, path: Path, recipe: Recipe
) -> tuple[Path, Tensor, Tensor]:
    """(path at this step, z after its step, z_hat)."""
    here = at_step(path, tables, state.i)
    velocity = partial(runtime.velocity_at, timestep=here.timesteps[0])
    z, z_hat = walked(velocity, state.z, tables.z0, tables.eps, 0, here, recipe)
    return here, z, z_hat


def _pasted(z: Tensor, kept: Tensor, state: State, tables: Tables, here: Path) -> Tensor:
    clean = tables.clean.index_select(0, state.i[None])
    paste = torch.where(_per_sample(clean), tables.z0, here.noise(tables.z0, tables.eps, 1))
    return torch.where(kept > 0, paste, z)


def _per_sample(flags: Tensor) -> Tensor:
    return flags.reshape(-1, 1, 1, 1)


@dataclass
class _Pass:
    """Buffers at fixed addresses for one batch bucket and resolution, and what replays a step on them."""

    state: State
    tables: Tables
    guided: Callable[[], None]
    plain: Callable[[], None]


class CudaGraphRuntime:
    """A runtime whose passes are replays of captured steps; everything else is handed on to the runtime inside.

    One pair of graphs, guided and plain, is captured per batch bucket and resolution, at its first use. Inputs are
    copied into static buffers, results are cloned out of them. The host looks at the flip flags every `look_every`
    steps, and once nobody is left to guide it replays plain steps alone. On a CPU the same functions run on the same
    buffers without a capture.
    """

    def __init__(
        self,
        runtime: CapturableRuntime,
        recipe: Recipe,
        *,
        device: torch.device | str = "cuda",
        buckets: Sequence[int] = BUCKETS,
        look_every: int = LOOK_EVERY,
    ) -> None:
        check_gradient(recipe)
        if recipe.checkpoint:
            raise RecipeError("A captured loop cannot recompute activations; leave checkpoint off or run in torch.")
        if look_every < 1 or not buckets or min(buckets) < 1:
            raise InputError("look_every and the batch buckets of a captured loop have to be at least 1.")
        self.runtime, self.recipe, self.look_every = runtime, recipe, look_every
        self.device, self.buckets = torch.device(device), tuple(sorted(set(buckets)))
        self._guided = guided_at(runtime.path, recipe)
        self._passes: dict[tuple[Any, ...], _Pass] = {}
        self._generation = self._inner_generation()
        self._pool: Any = None

    @property
    def path(self) -> Path:
        """The path whose steps `velocity` counts."""
        return self.runtime.path

    def encode(self, images: Tensor) -> Tensor:
        """z0 of images in [0, 1]."""
        return self.runtime.encode(images)

    def decode(self, z: Tensor) -> Tensor:
        """Images by the full decoder."""
        return self.runtime.decode(z)

    def velocity(self, z: Tensor, i: int) -> Tensor:
        """The network's output at state z in step i."""
        return self.runtime.velocity(z, i)

    def guidance(self, z_hat: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradient, image, logits)."""
        return self.runtime.guidance(z_hat, y)

    @torch.no_grad()
    def trajectory(
        self,
        originals: Originals,
        eps: Tensor,
        m_excl: Tensor,
        recipe: Recipe,
        *,
        factor: float = 1.0,
        margin: float | None = None,
        watch: Callable[[int], None] = lambda step: None,
    ) -> Trajectory:
        """One pass of Algorithm 1, to the end that engine.trajectory.trajectory comes to."""
        if recipe != self.recipe:
            raise RecipeError("This loop was captured for another recipe; make a new one.")
        batch = len(eps)
        one = self._pass(self._bucket(batch), originals, eps, m_excl)
        missing = len(one.state.z) - batch
        given = {"z0": originals.z0, "eps": eps, "y": originals.y, "m_excl": m_excl}
        for name, x in {**given, "reference": originals.reference(recipe)}.items():
            getattr(one.tables, name).copy_(padded(x, missing))
        one.tables.weight.fill_(factor * recipe.beta)
        one.tables.margin.fill_(float("inf") if margin is None else margin)
        _write(one.state, first_state(one.tables, self.path, recipe))
        one.state.active[batch:] = False
        anybody = True
        for i in range(self.path.length):
            watch(i)
            if self._guided[i] and anybody:
                one.guided()
                if margin is not None and (i + 1) % self.look_every == 0:
                    anybody = bool(one.state.active.any())  # the one place where the host waits
            else:
                one.plain()
        z, kept, guided_steps = (
            x[:batch].clone().to(eps.device) for x in (one.state.z, one.state.kept, one.state.guided_steps)
        )
        return Trajectory(z, kept, guided_steps)

    def _bucket(self, batch: int) -> int:
        fitting = [size for size in self.buckets if size >= batch]
        if not fitting or batch < 1:
            raise InputError(
                f"A batch of {batch} is outside the captured sizes, 1 to {self.buckets[-1]}. Send fewer images at once."
            )
        return fitting[0]

    def _pass(self, bucket: int, originals: Originals, eps: Tensor, m_excl: Tensor) -> _Pass:
        if self._generation != self._inner_generation():
            self._passes.clear()  # other weights lie at other addresses
            self._generation = self._inner_generation()
        key = (bucket, tuple(eps.shape[1:]), tuple(m_excl.shape[1:]))
        if key not in self._passes:
            self._passes[key] = self._captured(bucket, originals, eps, m_excl)
        return self._passes[key]

    def _captured(self, bucket: int, originals: Originals, eps: Tensor, m_excl: Tensor) -> _Pass:
        """Static buffers with the values of a first batch, and the two steps captured on them."""
        missing = bucket - len(eps)
        given = {"z0": originals.z0, "eps": eps, "y": originals.y, "m_excl": m_excl}
        given["reference"] = originals.reference(self.recipe)
        columns = {name: padded(x, missing).to(self.device, copy=True).contiguous() for name, x in given.items()}
        rows = {name: x.to(self.device, copy=True) for name, x in schedule(self.path, self.recipe).items()}
        scalars = {
            name: torch.full((), value, dtype=eps.dtype, device=self.device)
            for name, value in (("weight", self.recipe.beta), ("margin", float("inf")))
        }
        tables = Tables(**columns, **rows, **scalars)
        state = State(*(x.clone() for x in first_state(tables, self.path, self.recipe)))

        def step(function: Callable[..., State]) -> Callable[[], None]:
            def body() -> None:
                after = function(state, tables, runtime=self.runtime, path=self.path, recipe=self.recipe)
                _write(state, after)

            return body if self.device.type == "cpu" else self._graph(body, state)

        return _Pass(state, tables, step(guided_step), step(plain_step))

    def _graph(self, body: Callable[[], None], state: State) -> Callable[[], None]:
        """`body` captured on the device, after rounds on a side stream that no capture sees."""
        main, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                state.i.zero_()  # a body counts on, and the tables end
                body()
            state.i.zero_()
        main.wait_stream(side)
        if self._pool is None:
            # Passes never overlap and leave nothing in the pool that another reads, so all can use the same memory.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):
            body()
        replay: Callable[[], None] = graph.replay
        return replay

    def _inner_generation(self) -> int:
        return int(getattr(self.runtime, "generation", 0))


def _write(state: State, values: State) -> None:
    """Values into the buffers of a state, in place."""
    for buffer, value in zip(state, values, strict=True):
        buffer.copy_(value)
