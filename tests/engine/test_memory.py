"""Memory: bytes are counted, plans keep inside the budget, and 1024 pixels work in the smallest one."""

import pathlib
import re

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from audit.classifier import HuggingFaceClassifier
from benchmarks.memory import small_classifier, small_prior
from engine.errors import InputError, RecipeError
from engine.loop import counterfactuals
from engine.memory import FIXED, LiveBytes, byte_count, footprint, peak_bytes, plan_memory
from engine.prior import Prior, load_prior
from engine.recipe import Recipe
from tests.engine.test_prior import kl_vae, save_folder, text_unet, tiny_vae, transformer, unet, vq_vae

RECIPE = Recipe(steps=3, strength=1.0, escalation=(1.0,), margin=None)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 * 1024**3),
        ("800MB", 800_000_000),
        ("1.5 kib", 1536),
        ("12", 12),
        (12, 12),
        ("7B", 7),
        (" 2TB ", 2 * 10**12),
    ],
)
def test_amounts_of_memory(text: str | int, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-4GiB", "4GiBs", "GiB", "nan", "4,5GB", "1e9", "0.1B", "4G", "٤GB"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(InputError, match="write it like 4GiB"):
        byte_count(text)


# Counting --------------------------------------------------------------------------------------------------------


def test_what_is_freed_is_not_counted_and_what_was_there_neither() -> None:
    there = torch.zeros(1000)

    def run() -> None:
        a = there + 1  # 4000 bytes
        b = a * 2  # 8000
        del a
        c = b.view(10, 100).t()  # a view needs nothing
        c.add_(there.view(100, 10))
        d = b * 2  # 8000 again
        del b, c, d

    counter = LiveBytes()
    with counter:
        run()
    assert (counter.peak, counter.live) == (8000, 0)


def test_what_waits_for_the_backward_pass_is_counted() -> None:
    x = torch.zeros(1000, requires_grad=True)
    counter = LiveBytes()
    with counter:
        y = x.exp().exp()  # both results are kept
        assert counter.live == 8000
        (gradient,) = torch.autograd.grad(y.sum(), x)
        del y
    assert counter.live == 4000 == gradient.nbytes


def test_hollow_tensors_need_what_real_ones_need() -> None:
    prior = small_prior(width=8)
    need = footprint(prior, RECIPE, (64, 64))
    image, z = torch.rand(1, 3, 64, 64), torch.randn(1, 16, 8, 8)
    t = torch.tensor(500.0)

    def guidance(checkpointed: bool) -> int:
        def run() -> None:
            start = z.clone().requires_grad_(True)
            decoded = prior.decode(start, checkpointed)
            torch.autograd.grad(decoded, start, torch.ones_like(decoded))

        return peak_bytes(run)

    with torch.no_grad():
        forward = [peak_bytes(run) for run in (lambda: prior.encode(image), lambda: prior.decode(z))]
        forward.append(peak_bytes(lambda: prior.predict(z, t)))
    assert need.forward == pytest.approx(max(forward), rel=0.02)
    assert need.guidance == pytest.approx(guidance(False), rel=0.02)
    assert need.guidance_checkpointed == pytest.approx(guidance(True), rel=0.02)
    assert need.guidance_checkpointed < 0.6 * need.guidance
    assert need.weights == sum(p.nbytes for p in (*prior.parameters(), *prior.buffers()))
    assert all(type(p) is nn.Parameter for p in prior.parameters())


# Plans -----------------------------------------------------------------------------------------------------------


def least_budget(prior: Prior, size: int, batch: int = 1, **models: nn.Module) -> int:
    """The budget that the refusal of a far too small one names."""
    with pytest.raises(RecipeError, match=f"{size}x{size} pixels needs at least") as refusal:
        plan_memory(prior, RECIPE, (size, size), batch, 1, **models)
    words = re.search(r"at least (\w+)", str(refusal.value))
    assert words
    return byte_count(words[1])


def test_a_smaller_budget_gives_smaller_calls_then_a_checkpointed_decoder_then_a_refusal() -> None:
    prior, batch = small_prior(width=8), 6
    need = footprint(prior, RECIPE, (64, 64))
    plain = plan_memory(prior, RECIPE, (64, 64), batch, 2**40)
    assert (plain.batch, plain.micro_batch, plain.checkpoint) == (6, 6, False)
    least = least_budget(prior, 64, batch)
    effort = []
    for budget in torch.linspace(least, plain.peak, 6).long().tolist():
        plan = plan_memory(prior, RECIPE, (64, 64), batch, budget)
        assert plan.peak <= budget and plan.peak == need.peak(plan.batch, plan.micro_batch, plan.checkpoint)
        effort.append((not plan.checkpoint, plan.batch, plan.micro_batch))
    assert effort == sorted(effort)
    assert effort[0] == (False, 1, 1) and effort[-1] == (True, 6, 6)
    with pytest.raises(RecipeError, match="Raise the budget"):
        plan_memory(prior, RECIPE, (64, 64), batch, least - 2**20)


def test_what_the_recipe_already_limits_stays_limited() -> None:
    recipe = RECIPE.changed(micro_batch=2, checkpoint=True)
    plan = plan_memory(small_prior(width=8), recipe, (64, 64), 8, 2**40)
    assert (plan.batch, plan.micro_batch, plan.checkpoint) == (8, 2, True)
    assert plan.apply(recipe) == recipe


def prior_folder(kind: str, folder: pathlib.Path) -> pathlib.Path:
    """One of each kind of prior."""
    torch.manual_seed(0)
    if kind == "SD3":
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        return save_folder(folder, vae=tiny_vae(), transformer=transformer(), scheduler=scheduler)
    if kind == "pixels":
        return save_folder(folder, unet=unet(3), scheduler=DDPMScheduler(clip_sample=False))
    scheduler = DDIMScheduler(clip_sample=False)
    if kind == "VQ":
        return save_folder(folder, vqvae=vq_vae(), unet=unet(3), scheduler=scheduler)
    return save_folder(folder, vae=kl_vae(), unet=text_unet(), scheduler=scheduler)


@pytest.mark.parametrize("kind", ["SD3", "KL with text", "VQ", "pixels"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_no_run_needs_more_than_was_planned(tmp_path: pathlib.Path, kind: str, checkpoint: bool) -> None:
    prior = load_prior(prior_folder(kind, tmp_path))
    f, f_hat = small_classifier(1), small_classifier(2)
    x0 = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    targets = (1 - f(x0).argmax(1)).tolist()
    recipe = RECIPE.changed(checkpoint=checkpoint, micro_batch=2, k=2, mask_reference="reconstruction")
    plan = plan_memory(prior, recipe, (32, 32), 4, 2**40, f=f, f_hat=f_hat)
    needed = peak_bytes(lambda: counterfactuals(prior, f, f_hat, x0, targets, plan.apply(recipe)))
    assert needed <= plan.peak - plan.weights - FIXED
    assert needed > 0.3 * (plan.peak - plan.weights - FIXED)


def test_a_planned_run_makes_the_same_pictures() -> None:
    prior, f, f_hat = small_prior(width=8), small_classifier(1), small_classifier(2)
    x0 = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    targets = (1 - f(x0).argmax(1)).tolist()
    budget = least_budget(prior, 64, f=f, f_hat=f_hat)
    plan = plan_memory(prior, RECIPE, (64, 64), 3, budget, f=f, f_hat=f_hat)
    assert (plan.micro_batch, plan.checkpoint) == (1, True)
    whole = counterfactuals(prior, f, f_hat, x0, targets, RECIPE)
    for b in range(3):
        (one,) = counterfactuals(prior, f, f_hat, x0[b : b + 1], targets[b : b + 1], plan.apply(RECIPE))
        torch.testing.assert_close(one.images, whole[b].images, atol=1e-3, rtol=0)


# High resolution -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_1024_pixels_work_in_the_smallest_budget_and_the_classifier_sees_its_own_size() -> None:
    prior = small_prior(width=8, attention=False)
    torch.manual_seed(0)
    model = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2)
    )
    f = HuggingFaceClassifier(model, ("no", "yes"), {"size": {"height": 48, "width": 48}})
    seen: set[tuple[int, ...]] = set()
    model.register_forward_pre_hook(
        lambda _module, _inputs, named: seen.add(tuple(named["pixel_values"].shape[2:])), with_kwargs=True
    )
    f_hat = small_classifier(2)
    x0 = torch.rand(1, 3, 1024, 1024, generator=torch.Generator().manual_seed(0))
    targets = (1 - f(x0).argmax(1)).tolist()
    plan = plan_memory(prior, RECIPE, (1024, 1024), 1, least_budget(prior, 1024, f=f, f_hat=f_hat), f=f, f_hat=f_hat)
    recipe = plan.apply(RECIPE.changed(steps=2, blur=1.0))
    made: list[Tensor] = []
    needed = peak_bytes(
        lambda: made.extend(found.images for found in counterfactuals(prior, f, f_hat, x0, targets, recipe))
    )
    assert made[0].shape == (1, 3, 1024, 1024)
    assert bool(made[0].isfinite().all()) and not torch.equal(made[0][0], x0[0])
    assert seen == {(48, 48)}
    assert plan.checkpoint and needed <= plan.peak - plan.weights - FIXED
