"""The captured loop: the same end as the loop's, to the bit; and nothing in a step that a CUDA graph could not hold.

Without a GPU capturability is proven twice. The step runs on tensors of the meta device, which have shapes and no
values: whatever asks for a value, or brings a tensor of the host in, is refused by a guard. And the step, traced on the
CPU, runs as a graph of operators on fake CUDA tensors under the same guard.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from engine.errors import InputError, ModelError, RecipeError
from engine.guidance import gradient_source
from engine.loop import counterfactuals
from engine.prior import Prior, load_prior
from engine.recipe import Recipe
from engine.runtime.cuda_graph import (
    CapturableRuntime,
    CudaGraphRuntime,
    State,
    Tables,
    first_state,
    guided_step,
    plain_step,
    schedule,
)
from engine.runtime.torch_runtime import TorchRuntime, use_xformers
from engine.surrogate_net import NetworkConfig, SurrogateNetwork
from engine.trajectory import Originals, WalkingRuntime, draw_noise, trajectory
from tests.engine.test_loop import RECIPE, Sides, gaussian_prior, images
from tests.engine.test_prior import save_ldm, save_sd3

TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)


class NotCapturable(Exception):
    """An operator that a CUDA graph cannot hold."""


class Guard(TorchDispatchMode):
    """Refuses operators that wait for a value, draw noise, or touch a tensor of any other device than this."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.seen = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tag in func.tags for tag in TAGS) or "lift_fresh" in str(func):
            raise NotCapturable(f"{func}")
        self._check(func, (args, kwargs))
        wanted = (kwargs or {}).get("device")
        if wanted is not None:
            self._check_device(func, torch.device(wanted))
        result = func(*args, **(kwargs or {}))
        self._check(func, result)
        self.seen += 1
        return result

    def _check(self, func: Any, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._check_device(func, leaf.device)

    def _check_device(self, func: Any, device: torch.device) -> None:
        if device.type != self.device:
            raise NotCapturable(f"{func} on {device}")


def small_guide(classes: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return (
        SurrogateNetwork(classes, NetworkConfig(input_size=32, widths=(8, 16), blocks=1)).eval().requires_grad_(False)
    )


@pytest.fixture(scope="module")
def priors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prior]:
    """Real small priors of both families, built from config."""
    return {
        "sd3": load_prior(save_sd3(tmp_path_factory.mktemp("sd3"))),
        "ldm": load_prior(save_ldm(tmp_path_factory.mktemp("ldm"))),
    }


def bound(prior: Prior, guide: nn.Module, recipe: Recipe, size: int) -> TorchRuntime:
    path = prior.path(recipe.steps, recipe.strength, size, size)
    return TorchRuntime(prior, path, gradient_source(recipe, guide, guide), micro_batch=recipe.micro_batch)


@torch.no_grad()
def task(runtime: TorchRuntime, x0: Tensor, recipe: Recipe, seed: int = 0) -> tuple[Originals, Tensor, Tensor]:
    """(originals, noise, exclusion mask); a corner is closed as if an earlier counterfactual had edited it."""
    z0 = runtime.encode(x0)
    rebuilt = runtime.decode(z0).clamp(0.0, 1.0) if recipe.needs_reconstruction else None
    m_excl = torch.ones_like(x0[:, :1])
    m_excl[..., :8, :8] = 0.0
    y = torch.arange(len(x0)) % 2
    return Originals(x0, z0, y, rebuilt), draw_noise(range(seed, seed + len(x0)), 1, z0)[:, 0], m_excl


SETTINGS: list[dict[str, Any]] = [
    {},
    {"estimate": "paper", "guide_last_step": True, "paste": "clean", "mask_start": 0.0},
    {"proximity": "estimate", "lambda1": 0.02, "lambda2": 0.05, "clip": 0.5, "normalise": False},
    {"mask_reference": "reconstruction", "downsampling": "nearest", "guidance_schedule": "constant"},
    {"gradient_blur": 1.5},
    {"drift": "cancelled", "guide_above": 0.3},
]


@pytest.mark.parametrize("margin", [None, 0.05])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("flow", [True, False])
def test_a_pass_ends_where_the_loop_ends_to_the_bit(flow: bool, settings: dict[str, Any], margin: float | None) -> None:
    recipe = RECIPE.changed(**settings)
    runtime = bound(gaussian_prior(flow), Sides(4.0), recipe, 16)
    originals, eps, m_excl = task(runtime, images(3), recipe)
    walked = CudaGraphRuntime(runtime, recipe, device="cpu", look_every=2)
    with torch.no_grad():
        expected = trajectory(runtime, originals, eps, m_excl, recipe, factor=1.5, margin=margin)
    found = walked.trajectory(originals, eps, m_excl, recipe, factor=1.5, margin=margin)
    assert torch.equal(found.z, expected.z) and torch.equal(found.kept, expected.kept)
    assert torch.equal(found.guided_steps, expected.guided_steps)
    assert expected.guided_steps.max() > 0 and not torch.equal(expected.z, originals.z0)
    if margin is not None:
        assert expected.guided_steps.min() < runtime.path.length - 1  # somebody has left early


@pytest.mark.parametrize("family", ["sd3", "ldm"])
def test_a_pass_of_a_real_prior_ends_where_the_loop_ends(priors: dict[str, Prior], family: str) -> None:
    """To the bit where samples are computed alone, closely where a network rounds with the batch."""
    for micro_batch, exact in ((1, True), (None, False)):
        recipe = RECIPE.changed(steps=5, eta=1.0, tau=0.2, micro_batch=micro_batch)
        runtime = bound(priors[family], small_guide(), recipe, 32)
        originals, eps, m_excl = task(runtime, images(3).repeat(1, 1, 2, 2), recipe)
        with torch.no_grad():
            expected = trajectory(runtime, originals, eps, m_excl, recipe, margin=0.0)
        found = CudaGraphRuntime(runtime, recipe, device="cpu").trajectory(originals, eps, m_excl, recipe, margin=0.0)
        tolerance = 0.0 if exact else 1e-4
        torch.testing.assert_close(found.z, expected.z, atol=tolerance, rtol=tolerance)
        assert torch.equal(found.kept, expected.kept) and torch.equal(found.guided_steps, expected.guided_steps)


def test_whole_runs_are_the_same_and_go_through_the_captured_pass() -> None:
    recipe = RECIPE.changed(k=2, margin=0.2, second_pass=True)
    prior, x0 = gaussian_prior(), images(3)
    runtime = bound(prior, Sides(), recipe, 16)
    walked = CudaGraphRuntime(runtime, recipe, device="cpu")
    assert isinstance(walked, WalkingRuntime) and isinstance(runtime, CapturableRuntime)
    assert not isinstance(runtime, WalkingRuntime)
    runs = [
        counterfactuals(prior, Sides(), Sides(), x0, [1] * 3, recipe, [1, 2, 3], runtime=one)
        for one in (runtime, walked)
    ]
    assert walked._passes
    for expected, found in zip(*runs, strict=True):
        assert torch.equal(found.images, expected.images) and torch.equal(found.logits, expected.logits)
        assert found.flipped == expected.flipped and found.flipped[0] and found.factors == expected.factors
        for one, other in zip(found.costs, expected.costs, strict=True):
            assert (one.tries, one.network_calls, one.decoder_backwards) == (
                other.tries,
                other.network_calls,
                other.decoder_backwards,
            )


def test_buffers_stay_where_they_are_and_results_do_not_lie_in_them() -> None:
    runtime = bound(gaussian_prior(), Sides(), RECIPE, 16)
    walked = CudaGraphRuntime(runtime, RECIPE, device="cpu", buckets=(4,))
    first = walked.trajectory(*task(runtime, images(3), RECIPE), RECIPE)
    (one,) = walked._passes.values()
    addresses = [x.data_ptr() for x in (*one.state, *one.tables)]
    kept = first.z.clone()
    second = walked.trajectory(*task(runtime, images(4, seed=1), RECIPE, seed=9), RECIPE)
    assert list(walked._passes.values()) == [one] and len(second.z) == 4 and len(first.z) == 3
    assert [x.data_ptr() for x in (*one.state, *one.tables)] == addresses
    assert torch.equal(first.z, kept) and not torch.equal(second.z[:3], kept)
    assert torch.equal(walked.trajectory(*task(runtime, images(3), RECIPE), RECIPE).z, kept)


def test_the_host_looks_every_few_steps_and_then_guides_no_more() -> None:
    """Samples that have the target already are done after one guided step; the host notices at its next look."""
    recipe = RECIPE.changed(steps=12, strength=1.0)
    calls: list[int] = []

    class Counting(TorchRuntime):
        def guidance(self, z_hat: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            calls.append(len(z_hat))
            return super().guidance(z_hat, y)

    prior = gaussian_prior()
    runtime = Counting(prior, prior.path(12, 1.0, 16, 16), gradient_source(recipe, Sides(), Sides()), micro_batch=1)
    originals, eps, m_excl = task(runtime, images(2), recipe)
    done = Originals(originals.x0, originals.z0, torch.zeros(2, dtype=torch.long), None)
    for look_every, expected in ((1, 1), (4, 4), (100, 11)):
        calls.clear()
        walked = CudaGraphRuntime(runtime, recipe, device="cpu", look_every=look_every)
        end = walked.trajectory(done, eps, m_excl, recipe, margin=-0.5)
        assert len(calls) == expected and end.guided_steps.tolist() == [1, 1]


def test_swapped_weights_void_what_was_captured() -> None:
    runtime: Any = bound(gaussian_prior(), Sides(), RECIPE, 16)
    runtime.generation = 0
    walked = CudaGraphRuntime(runtime, RECIPE, device="cpu")
    walked.trajectory(*task(runtime, images(1), RECIPE), RECIPE)
    (before,) = walked._passes.values()
    runtime.generation = 1
    walked.trajectory(*task(runtime, images(1), RECIPE), RECIPE)
    (after,) = walked._passes.values()
    assert after is not before


def test_what_cannot_be_captured_is_refused() -> None:
    runtime = bound(gaussian_prior(), Sides(), RECIPE, 16)
    with pytest.raises(RecipeError, match="smoothgrad"):
        CudaGraphRuntime(runtime, RECIPE.changed(gradient="smoothgrad"), device="cpu")
    with pytest.raises(RecipeError, match="checkpoint"):
        CudaGraphRuntime(runtime, RECIPE.changed(checkpoint=True), device="cpu")
    with pytest.raises(InputError, match="at least 1"):
        CudaGraphRuntime(runtime, RECIPE, device="cpu", look_every=0)
    walked = CudaGraphRuntime(runtime, RECIPE, device="cpu", buckets=(2,))
    with pytest.raises(RecipeError, match="another recipe"):
        walked.trajectory(*task(runtime, images(1), RECIPE), RECIPE.changed(eta=0.1))
    with pytest.raises(InputError, match="batch of 3 is outside the captured sizes, 1 to 2"):
        walked.trajectory(*task(runtime, images(3), RECIPE), RECIPE)


def buffers(runtime: TorchRuntime, recipe: Recipe, size: int) -> tuple[State, Tables]:
    originals, eps, m_excl = task(runtime, torch.rand(2, 3, size, size), recipe)
    tables = Tables(
        **schedule(runtime.path, recipe),
        z0=originals.z0,
        eps=eps,
        y=originals.y,
        m_excl=m_excl,
        reference=originals.reference(recipe),
        weight=torch.tensor(1.5),
        margin=torch.tensor(0.5),
    )
    return first_state(tables, runtime.path, recipe), tables


EVERYTHING = Recipe(
    steps=6, lambda1=0.01, lambda2=0.01, clip=1.0, normalise=True, blur=1.0, mask_reference="reconstruction"
)


@pytest.mark.parametrize("step", [guided_step, plain_step])
@pytest.mark.parametrize("family", ["sd3", "ldm"])
def test_a_step_touches_nothing_of_the_host(priors: dict[str, Prior], family: str, step: Callable[..., State]) -> None:
    """The very functions that are captured, autograd included, on a device of which the host can learn nothing."""
    runtime = bound(priors[family], small_guide(), EVERYTHING, 32)
    state, tables = tree_map(lambda x: x.to("meta"), buffers(runtime, EVERYTHING, 32))
    prior, guide = (copy.deepcopy(module).to("meta") for module in (priors[family], small_guide()))
    elsewhere = TorchRuntime(prior, runtime.path, gradient_source(EVERYTHING, guide, guide))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Guard("meta") as guard:
        after = step(state, tables, runtime=elsewhere, path=runtime.path, recipe=EVERYTHING)
    assert guard.seen > 100
    for before, x in zip(state, after, strict=True):
        assert (x.shape, x.dtype, x.device.type) == (before.shape, before.dtype, "meta")


@pytest.mark.parametrize("family", ["sd3", "ldm"])
def test_the_traced_step_runs_on_fake_cuda(priors: dict[str, Prior], family: str) -> None:
    runtime = bound(priors[family], small_guide(), EVERYTHING, 32)
    state, tables = buffers(runtime, EVERYTHING, 32)

    def function(state: State, tables: Tables) -> State:
        return guided_step(state, tables, runtime=runtime, path=runtime.path, recipe=EVERYTHING)

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(state, tables)
        expected = function(state, tables)
        for found, exact in zip(graph(state, tables), expected, strict=True):
            assert torch.equal(found, exact)  # the trace is the step

    with FakeTensorMode() as fake:

        def on_cuda(x: Tensor) -> Tensor:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

        for node in graph.graph.nodes:
            if node.op == "get_attr":
                weight = getattr(graph, node.target)
                delattr(graph, node.target)
                graph.register_buffer(node.target, on_cuda(weight))
            elif "device" in node.kwargs:
                # Where the traced function made a tensor, it made it on the device of its inputs.
                node.kwargs = {**node.kwargs, "device": torch.device("cuda")}
        graph.recompile()
        given = tree_map(on_cuda, (state, tables))
        with torch.no_grad(), Guard("cuda") as guard:
            after = graph(*given)
    assert fake is not None and guard.seen > 100
    for before, x in zip(state, after, strict=True):
        assert (x.shape, x.dtype, x.device.type) == (before.shape, before.dtype, "cuda")


OFFENCES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "asks for a value": lambda x, i: x.sum().item(),
    "branches on a value": lambda x, i: x if bool((x > 0).any()) else -x,
    "indexes by a number of the device": lambda x, i: x[i],
    "shrinks its batch": lambda x, i: x[(x > 0).nonzero()[:, 0]],
    "picks by a mask": lambda x, i: x[x > 0],
    "copies to the host": lambda x, i: x.cpu(),
    "brings a constant of the host": lambda x, i: x * torch.tensor(2.0),
    "brings a table of the host": lambda x, i: x + torch.ones(3).to(x.device),
    "makes a tensor on the host": lambda x, i: torch.zeros(3),
    "draws noise": lambda x, i: x + torch.randn_like(x),
}


@pytest.mark.parametrize("offence", OFFENCES.values(), ids=OFFENCES)
def test_the_guard_sees_an_offence(offence: Callable[[Tensor, Tensor], Any]) -> None:
    x, i = torch.empty(2, 3, device="meta"), torch.zeros((), dtype=torch.long, device="meta")
    with pytest.raises((NotCapturable, RuntimeError)) as caught, Guard("meta"):
        offence(x, i)
    assert caught.type is NotCapturable, caught.value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
@pytest.mark.parametrize("family", ["sd3", "ldm"])
def test_a_captured_pass_on_a_gpu_ends_where_the_loop_ends(priors: dict[str, Prior], family: str) -> None:
    recipe = RECIPE.changed(steps=5, eta=1.0, tau=0.2, micro_batch=None)
    prior, guide = (copy.deepcopy(module).to("cuda") for module in (priors[family], small_guide()))
    path = prior.path(recipe.steps, recipe.strength, 32, 32).to("cuda")
    runtime = TorchRuntime(prior, path, gradient_source(recipe, guide, guide))
    walked = CudaGraphRuntime(runtime, recipe, buckets=(4,), look_every=2)
    for seed in (0, 5):
        x0 = images(3, seed).repeat(1, 1, 2, 2).to("cuda")
        with torch.no_grad():
            z0 = runtime.encode(x0)
            originals = Originals(x0, z0, torch.tensor([0, 1, 0], device="cuda"), None)
            eps, m_excl = draw_noise(range(3), 1, z0)[:, 0], torch.ones_like(x0[:, :1])
            expected = trajectory(runtime, originals, eps, m_excl, recipe, margin=None)
        found = walked.trajectory(originals, eps, m_excl, recipe, margin=None)
        torch.testing.assert_close(found.z, expected.z, atol=1e-3, rtol=1e-3)
        assert torch.equal(found.guided_steps, expected.guided_steps)


def test_switches_of_the_torch_runtime(priors: dict[str, Prior], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPE.changed(steps=5)
    plain = bound(priors["ldm"], small_guide(), recipe, 32)
    prior = copy.deepcopy(priors["ldm"])
    laid_out = TorchRuntime(prior, plain.path, plain.source, channels_last=True)
    z = torch.randn(2, *prior.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(laid_out.velocity(z, 0), plain.velocity(z, 0), atol=1e-5, rtol=1e-4)
    weights = [p for p in prior.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert weights and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    with pytest.raises(InputError, match="'flash' is unknown; choose one of sdpa, xformers"):
        TorchRuntime(prior, plain.path, plain.source, attention="flash")
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(ModelError, match=r"xformers cannot be loaded.*pfungst\[gpu\].*sdpa"):
        TorchRuntime(prior, plain.path, plain.source, attention="xformers")


def test_xformers_is_switched_on_in_every_network_that_takes_it(
    priors: dict[str, Prior], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package itself needs a GPU: here its import and diffusers' switch stand at the border."""
    monkeypatch.setattr("engine.runtime.torch_runtime.import_module", lambda name: None)
    prior = copy.deepcopy(priors["sd3"])
    switched: list[str] = []
    for part in ("network", "autoencoder"):
        model = getattr(prior, part).model
        monkeypatch.setattr(
            model, "enable_xformers_memory_efficient_attention", lambda part=part: switched.append(part), raising=False
        )
    use_xformers(prior)
    assert switched == ["network", "autoencoder"]
    with pytest.raises(ModelError, match="No network of this prior takes xformers"):
        use_xformers(gaussian_prior())

    def refuse() -> None:
        raise ValueError("torch.cuda.is_available() should be True")

    monkeypatch.setattr(prior.network.model, "enable_xformers_memory_efficient_attention", refuse)
    with pytest.raises(ModelError, match=r"xformers does not run here: torch\.cuda\.is_available"):
        use_xformers(prior)
