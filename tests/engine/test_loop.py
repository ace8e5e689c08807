"""The guided loop: numerical identities, exact composites, costs, and one clear error for each bad input.

The world of most tests is Gaussian: pixels are latents, and the network is the exact velocity (or noise) of data
N(0, 0.5²), so nothing is trained and everything has a closed form.
"""

import math
import pathlib
import threading
from collections import Counter

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from engine.counterfactual import CounterfactualSet, Progress
from engine.errors import Cancelled, ClassifierError, ImageError, RecipeError, TargetError
from engine.guidance import gradient_source
from engine.loop import counterfactuals
from engine.path import first_step
from engine.prior import IdentityAutoencoder, Network, Prior, load_prior
from engine.recipe import GradientName, Recipe
from engine.runtime import Runtime
from engine.runtime.torch_runtime import TorchRuntime
from engine.trajectory import Originals, draw_noise, lead, shaped, trajectory
from tests.engine.test_prior import save_ldm, save_sd3

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
DIFFUSION = {"_class_name": "DDIMScheduler", "num_train_timesteps": 1000, "clip_sample": False}
SPREAD = 0.5


class GaussianNetwork(Network):
    """The exact velocity or noise of Gaussian data."""

    multiple = 1

    def __init__(self, flow: bool) -> None:
        super().__init__()
        self.flow = flow
        self.alphas_bar = DDIMScheduler.from_config(DIFFUSION).alphas_cumprod
        self.samples = 0

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        self.samples += len(z)
        if self.flow:
            a, b = 1 - t / 1000, t / 1000
        else:
            a, b = self.alphas_bar[t].sqrt(), (1 - self.alphas_bar[t]).sqrt()
        z_hat = SPREAD**2 * a / (a**2 * SPREAD**2 + b**2) * z
        eps = (z - a * z_hat) / b
        return eps - z_hat if self.flow else eps


class CountingAutoencoder(IdentityAutoencoder):
    """An identity that counts decoded and pulled-back samples."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.backwards = 0

    def decode(self, z: Tensor, checkpointed: bool = False) -> Tensor:
        self.forwards += len(z)
        image = super().decode(z, checkpointed)
        if image.requires_grad:
            image.register_hook(lambda gradient: setattr(self, "backwards", self.backwards + len(gradient)))
        return image


class Sides(nn.Module):
    """Class 1 if the left or the right third of the picture is bright: two ways to flip."""

    def __init__(self, sharpness: float = 40.0) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(sharpness))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[..., :5].mean(dim=(1, 2, 3)), x[..., -5:].mean(dim=(1, 2, 3))
        score = self.sharpness * (torch.logsumexp(20 * torch.stack([left, right]), dim=0) / 20 - 0.65)
        return torch.stack([-score, score], dim=1)


def gaussian_prior(flow: bool = True) -> Prior:
    return Prior(CountingAutoencoder(), GaussianNetwork(flow), FLOW if flow else DIFFUSION)


def images(batch: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.35 + 0.1 * torch.rand(batch, 3, 16, 16, generator=generator)


RECIPE = Recipe(
    steps=8, strength=0.75, eta=0.15, normalise=True, tau=0.3, blur=1.0, feather=0.5, margin=None, micro_batch=1
)


def run(x0: Tensor, recipe: Recipe = RECIPE, prior: Prior | None = None, **options) -> list[CounterfactualSet]:
    return counterfactuals(prior or gaussian_prior(), Sides(), Sides(), x0, [1] * len(x0), recipe, **options)


@pytest.mark.parametrize("flow", [True, False])
def test_a_counterfactual_flips_and_leaves_the_rest_alone_to_the_bit(flow: bool) -> None:
    x0 = images(3)
    for result in run(x0, prior=gaussian_prior(flow), seeds=[1, 2, 3]):
        assert result.flipped == (True,) and result.source == 0 and result.target == 1
        outside = ~result.edit_masks[0].expand(3, -1, -1)
        assert torch.equal(result.images[0][outside], result.x0[outside]) and outside.any()
        assert result.images.min() >= 0 and result.images.max() <= 1
        assert torch.equal(result.edit_masks, result.soft_masks > 0)
        torch.testing.assert_close(result.logits, Sides()(result.images).detach())
        assert len(result.hashes["prior"]) == len(result.hashes["image"]) == 64
        assert result.hashes["guide"] and result.hashes["recipe"] == RECIPE.digest


@pytest.mark.parametrize("family", ["sd3", "ldm"])
def test_without_guidance_and_mask_it_is_plain_image_to_image(tmp_path: pathlib.Path, family: str) -> None:
    prior = load_prior(save_sd3(tmp_path) if family == "sd3" else save_ldm(tmp_path))
    recipe = Recipe(steps=6, strength=0.7, eta=0.0, tau=0.0, margin=None, escalation=(1.0,))
    x0 = images(2).repeat(1, 1, 2, 2)
    z0 = prior.encode(x0)
    eps = draw_noise([4, 5], 1, z0)[:, 0]
    path = prior.path(recipe.steps, recipe.strength, 32, 32)
    classifier = Sides()
    runtime = TorchRuntime(prior, path, gradient_source(recipe, classifier, classifier))
    with torch.no_grad():
        originals = Originals(x0, z0, torch.tensor([1, 1]), None)
        ours = trajectory(runtime, originals, eps, torch.ones(2, 1, 32, 32), recipe).z

        kind = FlowMatchEulerDiscreteScheduler if family == "sd3" else DDIMScheduler
        scheduler = kind.from_config(prior.scheduler)
        scheduler.set_timesteps(recipe.steps)
        begin = first_step(recipe.steps, recipe.strength)
        timesteps = scheduler.timesteps[begin:]
        if family == "sd3":
            scheduler.set_begin_index(begin)
            theirs = scheduler.scale_noise(z0, timesteps[:1], eps)
        else:
            theirs = scheduler.add_noise(z0, eps, timesteps[:1])
        for t in timesteps:
            theirs = scheduler.step(prior.predict(theirs, t), t, theirs).prev_sample
        # The same formulas in another order of operations, hence not the same bits.
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        (one, two) = counterfactuals(prior, classifier, classifier, x0, [1, 1], recipe, [4, 5])
        torch.testing.assert_close(
            torch.stack([one.images[0], two.images[0]]), prior.decode(theirs).clamp(0, 1), atol=1e-4, rtol=1e-3
        )


@pytest.mark.parametrize("estimate", ["pre", "paper"])
@pytest.mark.parametrize("family", ["sd3", "ldm"])
def test_without_drift_and_guidance_a_walk_ends_at_the_original(
    tmp_path: pathlib.Path, family: str, estimate: str
) -> None:
    prior = load_prior(save_sd3(tmp_path) if family == "sd3" else save_ldm(tmp_path))
    x0 = images(2).repeat(1, 1, 2, 2)
    z0 = prior.encode(x0)
    ends = {}
    for drift in ("kept", "cancelled"):
        recipe = Recipe(steps=6, strength=0.9, eta=0.0, tau=0.0, estimate=estimate, drift=drift, margin=None)
        path = prior.path(recipe.steps, recipe.strength, 32, 32)
        runtime = TorchRuntime(prior, path, gradient_source(recipe, Sides(), Sides()))
        with torch.no_grad():
            originals = Originals(x0, z0, torch.tensor([1, 1]), None)
            ends[drift] = trajectory(
                runtime, originals, draw_noise([4, 5], 1, z0)[:, 0], torch.ones(2, 1, 32, 32), recipe
            )
    torch.testing.assert_close(ends["cancelled"].z, z0, atol=1e-4, rtol=1e-4)
    assert (ends["kept"].z - z0).abs().mean() > 100 * (ends["cancelled"].z - z0).abs().mean()


class Slope(nn.Module):
    """Logits that are linear in the picture: the gradient of the target's is the same everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.linspace(-1, 1, x[0].numel()).view(1, *x.shape[1:])
        return torch.stack([torch.zeros(len(x)), (weights * x).sum(dim=(1, 2, 3))], dim=1)


@pytest.mark.parametrize("flow", [True, False])
def test_of_gaussian_data_an_edit_without_drift_does_not_depend_on_the_noise(flow: bool) -> None:
    """The exact network is linear: what a push becomes is the same from any state, and the rest cancels."""
    edits = {}
    for drift in ("kept", "cancelled"):
        recipe = RECIPE.changed(drift=drift, loss="target_logit", tau=0.0)
        prior, x0 = gaussian_prior(flow), images(1)
        path = prior.path(recipe.steps, recipe.strength, 16, 16)
        runtime = TorchRuntime(prior, path, gradient_source(recipe, Slope(), Slope()))
        with torch.no_grad():
            z0 = runtime.encode(x0)
            originals = Originals(x0, z0, torch.tensor([1]), None)
            noises = draw_noise([1], 2, z0)[0]
            edits[drift] = [
                trajectory(runtime, originals, eps[None], torch.ones(1, 1, 16, 16), recipe).z - z0 for eps in noises
            ]
    one, two = edits["cancelled"]
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
    assert one.abs().max() > 0.01 and (edits["kept"][0] - edits["kept"][1]).abs().max() > 0.01


def test_a_walk_without_drift_asks_the_network_twice_and_guides_only_above_the_level() -> None:
    recipe = RECIPE.changed(drift="cancelled", guide_above=0.4, escalation=(1.0,))
    path = gaussian_prior().path(recipe.steps, recipe.strength, 16, 16)
    levels = path.b[:-1].tolist()
    (found,) = run(images(1), recipe)
    assert found.costs[0].network_calls == 2 * path.length
    assert found.costs[0].decoder_backwards == sum(level > 0.4 for level in levels) < path.length - 1


def test_a_mask_that_keeps_everything_gives_back_the_image() -> None:
    (result,) = run(images(1), RECIPE.changed(tau=2.0))
    assert torch.equal(result.images[0], result.x0) and not result.edit_masks.any() and result.flipped == (False,)
    assert result.cost.tries == 3


@pytest.mark.parametrize("flow", [True, False])
def test_the_second_counterfactual_leaves_the_first_ones_edit_untouched(flow: bool) -> None:
    """There are two ways to flip: the first counterfactual takes one, the second the other, the third finds none."""
    recipe = RECIPE.changed(k=3, steps=12, eta=1.0, tau=0.5)
    for result in run(images(2), recipe, prior=gaussian_prior(flow), seeds=[1, 2]):
        assert result.flipped == (True, True, False)
        left, right = (
            result.edit_masks[..., :5].float().mean((1, 2, 3)),
            result.edit_masks[..., -5:].float().mean((1, 2, 3)),
        )
        assert {(int(left[k] > 0.9), int(right[k] > 0.9)) for k in range(2)} == {(0, 1), (1, 0)}
        for late in range(1, 3):
            for early in range(late):
                assert not (result.edit_masks[early] & result.edit_masks[late]).any()
                closed = result.edit_masks[early].expand(3, -1, -1)
                assert torch.equal(result.images[late][closed], result.x0[closed])


def test_the_second_edit_is_disjoint_even_through_a_decoder_with_a_receptive_field(tmp_path: pathlib.Path) -> None:
    prior = load_prior(save_ldm(tmp_path))
    recipe = RECIPE.changed(k=2, eta=2.0, tau=0.5, steps=4, escalation=(1.0,), mask_reference="reconstruction")
    (result,) = run(images(1).repeat(1, 1, 2, 2), recipe, prior=prior)
    first = result.edit_masks[0]
    assert first.any() and result.edit_masks[1].any() and not (first & result.edit_masks[1]).any()
    assert torch.equal(result.images[1][first.expand(3, -1, -1)], result.x0[first.expand(3, -1, -1)])


@pytest.mark.parametrize("settings", [{"prune": True}, {"prune": True, "second_pass": True}])
def test_pruned_edits_are_smaller_still_flip_and_stay_disjoint(settings: dict) -> None:
    x0 = images(3)
    whole = run(x0, RECIPE.changed(k=2), seeds=[1, 2, 3])
    pruned = run(x0, RECIPE.changed(k=2, **settings), seeds=[1, 2, 3])
    assert all(result.flipped[0] for result in pruned)
    for before, after in zip(whole, pruned, strict=True):
        assert after.edit_masks[0].sum() < before.edit_masks[0].sum()
        assert not (after.edit_masks[0] & after.edit_masks[1]).any()
        outside = ~after.edit_masks[0].expand(3, -1, -1)
        assert torch.equal(after.images[0][outside], after.x0[outside])
        torch.testing.assert_close(after.logits, Sides()(after.images).detach())
        passes = 2 if "second_pass" in settings else 1
        assert after.costs[0].network_calls == passes * before.costs[0].network_calls
        assert after.costs[0].classifier_queries > before.costs[0].classifier_queries


def same(one: CounterfactualSet, two: CounterfactualSet) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(two, name)) for name in ("images", "soft_masks", "edit_masks", "logits")
    )


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    x0 = images(2)
    recipe = RECIPE.changed(k=2, margin=0.5)
    first, again, other = run(x0, recipe, seeds=[7, 8]), run(x0, recipe, seeds=[7, 8]), run(x0, recipe, seeds=[9, 8])
    assert same(first[0], again[0]) and same(first[1], again[1])
    assert not same(first[0], other[0]) and same(first[1], other[1])
    assert same(run(x0, recipe.changed(seed=7))[0], first[0])


def test_a_batch_of_eight_is_eight_batches_of_one(tmp_path: pathlib.Path) -> None:
    """To the bit with micro_batch = 1; without it networks may round differently, so only closely."""
    prior = load_prior(save_sd3(tmp_path))
    x0 = images(8).repeat(1, 1, 2, 2)
    recipe = RECIPE.changed(steps=3, eta=1.0, k=2, margin=0.2, escalation=(1.0, 2.0), tau=0.2)
    seeds = list(range(8))
    together = run(x0, recipe, prior=prior, seeds=seeds)
    for b in range(8):
        (alone,) = run(x0[b : b + 1], recipe, prior=prior, seeds=[b])
        assert same(alone, together[b])
    # Thresholds turn a rounding difference into a whole pixel, so masks are off in the comparison across sizes.
    smooth = recipe.changed(micro_batch=None, tau=0.0, margin=None, k=1, escalation=(1.0,))
    whole = run(x0, smooth, prior=prior, seeds=seeds)
    for b in (0, 5):
        (alone,) = run(x0[b : b + 1], smooth, prior=prior, seeds=[b])
        torch.testing.assert_close(alone.images, whole[b].images, atol=1e-4, rtol=1e-3)


def test_each_guided_step_has_one_decoder_forward_and_one_backward() -> None:
    prior, batch = gaussian_prior(), 3
    results = run(images(batch), RECIPE.changed(escalation=(1.0,)), prior=prior)
    steps = prior.path(RECIPE.steps, RECIPE.strength, 16, 16).length
    autoencoder, network = prior.autoencoder, prior.network
    assert isinstance(autoencoder, CountingAutoencoder) and isinstance(network, GaussianNetwork)
    assert autoencoder.forwards == batch * (steps - 1 + 1)  # the last step is not guided; one final decode
    assert autoencoder.backwards == batch * (steps - 1)
    assert network.samples == batch * steps
    for result in results:
        cost = result.cost
        assert (cost.network_calls, cost.decoder_forwards, cost.decoder_backwards) == (steps, steps, steps - 1)
        assert cost.classifier_queries == 2 and cost.seconds > 0 and cost.tries == 1


def test_every_try_and_every_decode_is_in_the_reported_cost() -> None:
    prior = gaussian_prior()
    recipe = RECIPE.changed(k=2, eta=0.05, margin=0.5, mask_reference="reconstruction", composite="difference")
    results = run(images(3), recipe, prior=prior)
    autoencoder, network = prior.autoencoder, prior.network
    assert isinstance(autoencoder, CountingAutoencoder) and isinstance(network, GaussianNetwork)
    assert sum(r.cost.decoder_forwards for r in results) == autoencoder.forwards
    assert sum(r.cost.decoder_backwards for r in results) == autoencoder.backwards
    assert sum(r.cost.network_calls for r in results) == network.samples


def test_escalation_runs_only_what_has_not_flipped() -> None:
    x0 = images(4)
    x0[0] += 0.2  # nearly there
    x0[3] -= 0.25  # far away
    seen: list[Progress] = []
    recipe = RECIPE.changed(eta=0.1, escalation=(1.0, 3.0, 9.0))
    results = run(x0, recipe, progress=seen.append)
    tries = [result.cost.tries for result in results]
    assert tries[0] == 1 and max(tries) > 1 and len(set(tries)) > 1
    samples = Counter({p.attempt: p.samples for p in seen})
    for attempt, count in samples.items():
        assert count == sum(number > attempt for number in tries)
    for result in results:
        assert not result.flipped[0] or result.factors[0] == recipe.escalation[result.cost.tries - 1]


def test_the_best_try_by_f_is_kept_when_none_flips() -> None:
    x0 = images(1) - 0.3
    recipe = RECIPE.changed(eta=0.01, escalation=(1.0, 2.0, 4.0))
    (result,) = run(x0, recipe)
    assert not result.flipped[0]
    target = torch.tensor([1])
    single = [run(x0, recipe.changed(escalation=(factor,)))[0] for factor in recipe.escalation]
    assert lead(result.logits, target) == max(lead(one.logits, target) for one in single)


def test_early_stop_saves_gradients_and_still_flips() -> None:
    x0 = images(3)
    recipe = RECIPE.changed(eta=0.6)
    full, stopped = run(x0, recipe), run(x0, recipe.changed(margin=0.3))
    assert all(result.flipped[0] for result in stopped)
    assert sum(r.cost.decoder_backwards for r in stopped) < sum(r.cost.decoder_backwards for r in full)
    area = [float(sum(r.soft_masks.sum() for r in results)) for results in (stopped, full)]
    change = [sum(float((r.images[0] - r.x0).abs().sum()) for r in results) for results in (stopped, full)]
    assert change[0] < change[1] and area[0] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"estimate": "paper"},
        {"paste": "clean"},
        {"downsampling": "nearest"},
        {"guidance_schedule": "constant", "guide_last_step": True},
        {"proximity": "estimate", "lambda1": 0.01, "lambda2": 0.01},
        {"lambda1": 0.01, "lambda2": 0.01, "clip": 5.0},
        {"gradient_blur": 2.0},
        {"loss": "target_logit", "temperature": 2.0},
        {"mask_start": 0.0},
        {"drift": "cancelled"},
        {"drift": "cancelled", "estimate": "paper"},
        {"guide_above": 0.3},
        {"mask_reference": "reconstruction", "composite": "difference"},
        {"checkpoint": True, "micro_batch": 2},
        *({"gradient": name, "gradient_samples": 2, "gradient_points": 2} for name in GradientName.__args__),  # type: ignore[attr-defined]
    ],
)
def test_every_switch_works(settings: dict) -> None:
    class Soft(Sides):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Softplus()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.act(8 * x) / 8)

    recipe = RECIPE.changed(**{"steps": 5, **settings})
    (one, two) = counterfactuals(gaussian_prior(), Soft(), Soft(), images(2), [1, 1], recipe)
    for result in (one, two):
        outside = ~result.edit_masks[0].expand(3, -1, -1)
        assert torch.equal(result.images[0][outside], result.x0[outside])
        assert torch.isfinite(result.images).all() and result.logits[0, 1] > result.source_logits[1]


def test_a_smoothed_gradient_pushes_alike_all_around_and_keeps_its_length() -> None:
    spike = torch.zeros(2, 3, 17, 17)
    spike[0, 1, 8, 8], spike[1] = 1.0, torch.arange(3.0).view(3, 1, 1)
    smooth = shaped(spike, Recipe(gradient_blur=2.0))
    assert smooth[0, 1].sum() == pytest.approx(1.0, abs=1e-5) and not smooth[0, [0, 2]].any()
    assert smooth[0, 1, 8, 10] / smooth[0, 1, 8, 8] == pytest.approx(math.exp(-0.5), rel=1e-5)
    assert torch.allclose(smooth[0, 1], smooth[0, 1].T) and torch.allclose(smooth[1], spike[1])
    normalised = shaped(spike, Recipe(gradient_blur=2.0, normalise=True))
    assert normalised[0].square().mean() == pytest.approx(1.0, abs=1e-5)  # smoothing comes first
    assert shaped(spike, Recipe()) is spike


def test_the_estimate_is_taken_before_the_step_unless_the_paper_is_read_literally() -> None:
    """With the exact network the decoded picture of each guided step is the posterior mean at that step's level."""

    class Spy(TorchRuntime):
        def velocity(self, z: Tensor, i: int) -> Tensor:
            self.z, self.i = z, i
            return super().velocity(z, i)

        def guidance(self, z_hat: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            a, b = self.path.a[self.i], self.path.b[self.i]
            self.errors.append(float((z_hat - SPREAD**2 * a / (a**2 * SPREAD**2 + b**2) * self.z).abs().max()))
            return super().guidance(z_hat, y)

    errors = {}
    for reading in ("pre", "paper"):
        prior, recipe, f = gaussian_prior(), RECIPE.changed(estimate=reading, escalation=(1.0,)), Sides()
        spy = Spy(prior, prior.path(8, 0.75, 16, 16), gradient_source(recipe, f, f))
        assert isinstance(spy, Runtime)
        spy.errors = []  # type: ignore[attr-defined]
        run(images(1), recipe, prior=prior, runtime=spy)
        errors[reading] = max(spy.errors)  # type: ignore[attr-defined]
    assert errors["pre"] < 1e-6 and errors["paper"] > 1e-2


@pytest.mark.parametrize("family", ["sd3", "ldm"])
def test_a_counterfactual_from_a_saved_pipeline(tmp_path: pathlib.Path, family: str) -> None:
    prior = load_prior(save_sd3(tmp_path) if family == "sd3" else save_ldm(tmp_path))
    recipe = Recipe(steps=5, strength=0.6, eta=3.0, normalise=True, tau=0.2, blur=1.0, k=2, margin=None)
    (result,) = counterfactuals(prior, Sides(), Sides(), images(1).repeat(1, 1, 2, 2), [1], recipe)
    assert result.images.shape == (2, 3, 32, 32) and result.edit_masks[0].any()
    assert result.hashes["prior"] == prior.content_hash
    assert not (result.edit_masks[0] & result.edit_masks[1]).any()


def test_a_tiny_decoder_serves_the_gradient_only() -> None:
    prior = gaussian_prior()
    calls: list[int] = []

    def tiny(z: Tensor) -> Tensor:
        calls.append(len(z))
        return (z + 1) / 2

    recipe = RECIPE.changed(escalation=(1.0,), checkpoint=False)
    (result,) = run(images(1), recipe, prior=prior, tiny_decoder=tiny)
    assert isinstance(prior.autoencoder, CountingAutoencoder)
    assert prior.autoencoder.forwards == 1 and len(calls) == result.cost.decoder_backwards


def test_channels_last_gives_the_same_picture(tmp_path: pathlib.Path) -> None:
    pictures = []
    for channels_last in (False, True):
        prior, f = load_prior(save_ldm(tmp_path / str(channels_last))), Sides()
        recipe = RECIPE.changed(steps=4, tau=0.0, escalation=(1.0,))
        path = prior.path(recipe.steps, recipe.strength, 32, 32)
        runtime = TorchRuntime(prior, path, gradient_source(recipe, f, f), channels_last=channels_last)
        (result,) = run(images(1).repeat(1, 1, 2, 2), recipe, prior=prior, runtime=runtime)
        pictures.append(result.images)
    torch.testing.assert_close(*pictures, atol=1e-4, rtol=1e-3)


def test_progress_is_told_and_cancel_is_obeyed_in_every_step() -> None:
    seen: list[Progress] = []
    run(images(1), RECIPE.changed(k=2, escalation=(1.0,)), progress=seen.append)
    assert [(p.k, p.step) for p in seen] == [(k, step) for k in range(2) for step in range(6)]
    assert {(p.count, p.steps, p.samples) for p in seen} == {(2, 6, 1)}
    token, calls = threading.Event(), []

    def stop(progress: Progress) -> None:
        calls.append(progress)
        if len(calls) == 3:
            token.set()

    with pytest.raises(Cancelled):
        run(images(1), progress=stop, cancel=token)
    assert len(calls) == 3


def test_a_users_classifier_is_given_back_as_it_was() -> None:
    f = Sides().train()
    token = threading.Event()
    token.set()
    with pytest.raises(Cancelled):
        counterfactuals(gaussian_prior(), f, f, images(1), [1], RECIPE, cancel=token)
    assert f.training and f.sharpness.requires_grad and f.sharpness.grad is None


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        ([[0.5]], "tensor"),
        (torch.rand(3, 16, 16), "3, H, W"),
        (torch.rand(1, 4, 16, 16), "RGB"),
        (torch.rand(0, 3, 16, 16), "3, H, W"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "floats"),
        (torch.full((1, 3, 16, 16), float("nan")), "NaN"),
        (torch.full((1, 3, 16, 16), 1.5), "lie in"),
    ],
)
def test_images_that_cannot_be_used(picture, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        counterfactuals(gaussian_prior(), Sides(), Sides(), picture, [1], RECIPE)


def test_an_image_of_a_size_the_prior_cannot_take(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ImageError, match="divisible by 8"):
        run(torch.rand(1, 3, 30, 32), prior=load_prior(save_sd3(tmp_path)))


@pytest.mark.parametrize(
    ("targets", "words"),
    [([0], "already"), ([2], "unknown"), ([-1], "unknown"), ([1.0], "unknown"), ([1, 1], "2 targets")],
)
def test_targets_that_cannot_be_reached(targets: list, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        counterfactuals(gaussian_prior(), Sides(), Sides(), images(1), targets, RECIPE)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x: torch.full((len(x), 2), float("nan")), "NaN"),
        (lambda x: torch.zeros(len(x)), r"\[1\]"),
        (lambda x: torch.zeros(len(x), 1), "two classes"),
        (lambda x: torch.zeros(len(x) + 1, 2), r"\[2, 2\]"),
        (lambda x: [0.0, 1.0], "list"),
    ],
)
def test_classifiers_that_answer_nonsense(answer, words: str) -> None:
    with pytest.raises(ClassifierError, match=words):
        counterfactuals(gaussian_prior(), answer, Sides(), images(1), [1], RECIPE)
    with pytest.raises(ClassifierError, match=words):
        counterfactuals(gaussian_prior(), Sides(), answer, images(1), [1], RECIPE)


def test_what_does_not_go_together_is_refused() -> None:
    prior, f, x0 = gaussian_prior(), Sides(), images(1)
    with pytest.raises(RecipeError, match="needs a surrogate"):
        counterfactuals(prior, f, None, x0, [1], RECIPE)
    counterfactuals(prior, f, None, x0, [1], RECIPE.changed(gradient="vanilla", escalation=(1.0,), steps=4))
    with pytest.raises(ClassifierError, match="same number"):
        counterfactuals(prior, f, lambda x: torch.zeros(len(x), 3), x0, [1], RECIPE)
    with pytest.raises(RecipeError, match="none that is guided"):
        counterfactuals(prior, f, f, x0, [1], RECIPE.changed(steps=2, strength=0.5))
    for seeds in ([1, 2], [-1], [2**63]):
        with pytest.raises(RecipeError, match="seed"):
            counterfactuals(prior, f, f, x0, [1], RECIPE, seeds)
