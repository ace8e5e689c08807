"""Every method keeps one contract; each one's own promises have known answers."""

import dataclasses
import re
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor, nn

from engine.counterfactual import CounterfactualSet, Progress
from engine.errors import Cancelled, ClassifierError, ImageError, RecipeError, TargetError
from engine.methods import METHODS, method_named
from engine.methods.dive import alikeness_gradient
from engine.prior import load_prior
from tests.engine.methods.toys import BASELINES, SHORT, Sides, gaussian_prior, images, run, short
from tests.engine.test_loop import SPREAD
from tests.engine.test_prior import save_folder, save_ldm, save_sd3


def same(one: CounterfactualSet, other: CounterfactualSet) -> bool:
    return torch.equal(one.images, other.images) and torch.equal(one.edit_masks, other.edit_masks)


# The contract ----------------------------------------------------------------------------------------------------


def test_the_registry_names_all_methods() -> None:
    assert list(METHODS) == [
        "sce-lite-hq",
        "dime",
        "fastdime",
        "fastdime-2",
        "fastdime-2+",
        "ace",
        "sce",
        "diffeocf",
        "dive",
    ]
    assert all(method_named(name).name == name for name in METHODS)
    with pytest.raises(RecipeError, match="There is no method 'time'; there are sce-lite-hq, dime"):
        method_named("time")
    with pytest.raises(RecipeError, match="takes AceSettings, not Recipe"):
        run("ace", images(1), settings=METHODS["sce-lite-hq"].defaults)


@pytest.mark.parametrize("name", METHODS)
def test_a_counterfactual_flips_and_all_is_told(name: str) -> None:
    for found in run(name, images(2), seeds=[1, 2], settings=short(name, k=2)):
        assert found.flipped[0] and found.source == 0 and found.target == 1
        assert found.images.shape == (2, 3, 16, 16) and found.images.min() >= 0 and found.images.max() <= 1
        outside = ~found.edit_masks.expand(-1, 3, -1, -1)
        assert torch.equal(found.images[outside], found.x0.expand_as(found.images)[outside])
        assert torch.equal(found.edit_masks, found.soft_masks > 0)
        torch.testing.assert_close(found.logits, Sides()(found.images).detach())
        assert found.flipped == tuple((found.logits.argmax(1) == 1).tolist())
        assert len(found.factors) == len(found.costs) == 2 and all(cost.tries >= 1 for cost in found.costs)
        assert found.recipe == short(name, k=2) and found.hashes["recipe"] == short(name, k=2).digest
        assert {"prior", "classifier", "guide", "image"} <= found.hashes.keys()


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_bits_and_another_seed_another_picture(name: str) -> None:
    x0 = images(2)
    first, again = run(name, x0, seeds=[3, 4]), run(name, x0, seeds=[3, 4])
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    if name != "diffeocf":  # the first counterfactual of DiffeoCF has no noise in it
        assert not same(first[0], run(name, x0, seeds=[5, 4])[0])


@pytest.mark.parametrize("name", BASELINES)  # tests/engine/test_loop.py holds it for SCE-LITE-HQ
def test_four_in_a_batch_are_four_batches_of_one(name: str) -> None:
    x0, settings = images(4), short(name, k=2)
    together = run(name, x0, seeds=[7, 8, 9, 10], settings=settings)
    for b in range(4):
        (alone,) = run(name, x0[b : b + 1], seeds=[7 + b], settings=settings)
        assert same(together[b], alone) and together[b].factors == alone.factors
        for one, other in zip(together[b].costs, alone.costs, strict=True):
            assert dataclasses.replace(one, seconds=0.0) == dataclasses.replace(other, seconds=0.0)


@pytest.mark.parametrize("name", METHODS)
def test_calls_are_counted_as_they_were_made(name: str) -> None:
    prior = gaussian_prior(flow=False)
    sets = run(name, images(3), prior=prior, seeds=[1, 2, 3], settings=short(name, k=2))
    assert sum(found.cost.network_calls for found in sets) == prior.network.samples
    decoded = sum(found.cost.decoder_forwards for found in sets)
    assert decoded == prior.autoencoder.forwards
    assert sum(found.cost.decoder_backwards for found in sets) == prior.autoencoder.backwards
    assert all(found.cost.seconds > 0 for found in sets)


class Three(nn.Module):
    """`Sides` with a third class that it never gives, though it has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = Sides()

    def forward(self, x: Tensor) -> Tensor:
        never = -50 + 1e-3 * x.mean((1, 2, 3))
        return torch.cat([self.sides(x), never[:, None]], 1)


@pytest.mark.parametrize("name", BASELINES)
def test_only_samples_that_f_has_not_flipped_are_tried_again(name: str) -> None:
    prior, x0, settings = gaussian_prior(flow=False), images(3), short(name)
    if "iterations" in SHORT[name]:
        (*_, most) = SHORT[name]["iterations"]
        settings = settings.changed(iterations=(most, most + 1))
    seen: list[Progress] = []
    sets = METHODS[name](prior, Three(), Three(), x0, [1, 2, 1], settings, [0, 1, 2], progress=seen.append)
    assert [found.flipped[0] for found in sets] == [True, False, True]
    tries = [found.costs[0].tries for found in sets]
    assert tries[1] == 2 and 1 in (tries[0], tries[2])
    samples = {where.attempt: where.samples for where in seen}
    assert samples == {0: 3, 1: tries.count(2)}
    assert sum(found.cost.network_calls for found in sets) == prior.network.samples
    assert sum(found.cost.decoder_forwards for found in sets) == prior.autoencoder.forwards


@pytest.mark.parametrize("name", METHODS)
def test_every_step_can_be_watched_and_cancelled(name: str) -> None:
    token, seen = threading.Event(), []

    def watch(where: Progress) -> None:
        seen.append(where.step)
        if len(seen) == 3:
            token.set()

    with pytest.raises(Cancelled):
        run(name, images(1), progress=watch, cancel=token)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("name", METHODS)
def test_bad_input_is_refused_before_the_network_is_called(name: str) -> None:
    prior, method = gaussian_prior(flow=False), METHODS[name]
    f = Sides()
    with pytest.raises(ImageError, match=r"lie in \[0, 1\]"):
        method(prior, f, f, images(1) + 2, [1], short(name))
    with pytest.raises(TargetError, match="says already"):
        method(prior, f, f, images(1), [0], short(name))
    with pytest.raises(RecipeError, match="2 seeds for 1 images"):
        method(prior, f, f, images(1), [1], short(name), [1, 2])
    assert prior.network.samples == 0


@pytest.mark.parametrize("name", BASELINES)
def test_a_classifier_without_gradient_needs_the_surrogate(name: str) -> None:
    def black_box(x: Tensor) -> Tensor:
        return Sides()(x).detach()

    x0 = images(1)
    with pytest.raises(ClassifierError, match="surrogate"):
        METHODS[name](gaussian_prior(False), black_box, None, x0, [1], short(name, gradient="vanilla"))
    settings = short(name, gradient="surrogate")
    (found,) = METHODS[name](gaussian_prior(False), black_box, Sides(), x0, [1], settings)
    assert found.flipped == (True,)


def test_settings_are_checked_stored_and_read_back(tmp_path: Path) -> None:
    for name, method in METHODS.items():
        settings = short(name, k=3)
        settings.save(tmp_path / "settings.json")
        assert method.defaults.load(tmp_path / "settings.json") == settings
    with pytest.raises(RecipeError, match="'dilation' should be odd, but is 4"):
        METHODS["ace"].defaults.changed(dilation=4)
    with pytest.raises(RecipeError, match="method's settings has no setting 'eta'"):
        METHODS["dime"].defaults.changed(eta=1.0)


def test_a_file_of_settings_belongs_to_one_method(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"guidance": [3.0]}')
    assert method_named("fastdime-2").load(file) == METHODS["fastdime-2"].defaults.changed(guidance=(3.0,))
    METHODS["fastdime"].defaults.save(file)
    with pytest.raises(RecipeError, match="variant '1'; that of the method fastdime-2 is '2'"):
        method_named("fastdime-2").load(file)
    with pytest.raises(RecipeError, match="'method' should be 'ace'"):
        method_named("ace").load(file)


def test_only_the_guided_loop_runs_elsewhere_than_in_torch() -> None:
    for name, method in METHODS.items():
        method.check_runtime("torch")
        if name == "sce-lite-hq":
            method.check_runtime("onnx")
            continue
        with pytest.raises(RecipeError, match=f"{re.escape(name)} runs in eager torch alone, not on onnx"):
            method.check_runtime("onnx")
        with pytest.raises(RecipeError, match="in eager torch alone"):
            method(gaussian_prior(False), Sides(), Sides(), images(1), [1], short(name), runtime=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["sd3", "ldm", "pixel"])
def test_every_method_runs_on_real_networks_of_every_family(tmp_path: Path, family: str) -> None:
    if family == "pixel":
        torch.manual_seed(0)
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        unet = UNet2DModel(16, 3, 3, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, **blocks)
        save_folder(tmp_path, unet=unet, scheduler=DDPMScheduler(clip_sample=False))
    prior = load_prior({"sd3": save_sd3, "ldm": save_ldm}.get(family, lambda folder: folder)(tmp_path))
    x0 = images(1).repeat(1, 1, 2, 2)
    few = {"iterations": (2,)}
    for name in BASELINES:
        changes = few if "iterations" in SHORT[name] else {"steps": 6, "guidance": (1.0,)}
        changes |= {"rate": 0.01} if name == "sce" else {}  # it stops where it has flipped
        (found,) = METHODS[name](prior, Sides(), Sides(), x0, [1], short(name, **changes))
        assert torch.isfinite(found.images).all() and found.cost.decoder_backwards >= 2


# Each method's own promises --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [6, 12])
def test_dime_needs_a_square_of_network_calls_where_fastdime_needs_one_each(steps: int) -> None:
    calls = {}
    for name in ("dime", "fastdime", "fastdime-2", "fastdime-2+"):
        prior = gaussian_prior(flow=False)
        run(name, images(1), prior=prior, settings=short(name, steps=2 * steps, strength=0.5, guidance=(1.0,)))
        calls[name] = prior.network.samples
    assert calls == {
        "dime": steps * (steps + 1) // 2,
        "fastdime": steps,
        "fastdime-2": 2 * steps,
        "fastdime-2+": 2 * steps,
    }


@pytest.mark.parametrize(("name", "per_iteration"), [("ace", 3), ("sce", 4)])
def test_filtering_methods_pay_the_chain_in_every_iteration(name: str, per_iteration: int) -> None:
    prior = gaussian_prior(flow=False)
    (found,) = METHODS[name](prior, Three(), Three(), images(1), [2], short(name))
    # f flips nothing here, so the last picture alone is repainted.
    assert found.cost.network_calls == (12 + 1) * per_iteration == prior.network.samples


def test_authors_schedules_are_what_their_papers_say() -> None:
    prior = gaussian_prior(flow=False)
    lengths = {}
    for name in ("dime", "fastdime", "ace", "sce"):
        settings = METHODS[name].defaults
        lengths[name] = prior.path(settings.steps, settings.strength, 16, 16).length
    assert lengths == {"dime": 60, "fastdime": 60, "ace": 5, "sce": 20}
    assert METHODS["dime"].defaults.tries == (8.0, 10.0, 15.0)  # type: ignore[union-attr]


def test_the_unguided_walk_samples_the_exact_posterior() -> None:
    """With the exact network the walk from z_t draws from p(z_0 | z_t): a Gaussian known in closed form."""
    prior = gaussian_prior(flow=False)
    x0 = torch.full((8, 3, 16, 16), 0.3)
    settings = short("fastdime", steps=1000, strength=0.03, guidance=(1e-9,), l1=0.0, mask_start=1.0, micro_batch=None)
    sets = run("fastdime", x0, prior=prior, settings=settings, seeds=list(range(8)))
    path = prior.path(1000, 0.03, 16, 16)
    a, b2, data = path.a[0].double(), path.b[0].double() ** 2, SPREAD**2
    gain = data * a / (a**2 * data + b2)
    z = 2 * torch.stack([found.images[0] for found in sets]).double() - 1
    variance = data * b2 / (a**2 * data + b2) + gain**2 * b2  # of z_0 given z_t, and of its mean by the first noise
    torch.testing.assert_close(z.mean(), gain * a * -0.4, atol=0.01, rtol=0)
    torch.testing.assert_close(z.var(), variance, atol=0, rtol=0.05)


def test_the_perceptual_distance_holds_dime_back() -> None:
    x0, settings = images(2), short("fastdime", guidance=(20.0,), mask_start=1.0)

    def squared(x: Tensor, original: Tensor) -> Tensor:
        return (x - original).square().sum((1, 2, 3))

    free = run("fastdime", x0, seeds=[1, 2], settings=settings)
    held = run("fastdime", x0, seeds=[1, 2], settings=settings, perceptual=squared)
    for one, other in zip(free, held, strict=True):
        assert (other.images - other.x0).abs().mean() < 0.9 * (one.images - one.x0).abs().mean()


def test_fastdime_leaves_what_its_mask_keeps_to_the_bit() -> None:
    for name in ("fastdime", "fastdime-2", "fastdime-2+"):
        for found in run(name, images(2), seeds=[1, 2], settings=short(name, threshold=0.6)):
            kept = ~found.edit_masks[0, 0]
            assert kept.any() and torch.equal(found.images[0][:, kept], found.x0[:, kept])


def test_sce_locks_what_earlier_counterfactuals_edited() -> None:
    for found in run("sce", images(2), seeds=[1, 2], settings=short("sce", k=2)):
        first, second = found.edit_masks
        assert first.any() and second.any() and not (first & second).any()


def test_sce_descends_until_f_is_as_sure_of_the_target_as_it_was_of_the_rest() -> None:
    settings = short("sce", iterations=(40,), temperature=20.0, rate=60.0)
    x0 = images(4) + torch.tensor([0.1, 0.14, 0.17, 0.2]).view(-1, 1, 1, 1)
    sets = run("sce", x0, seeds=[1, 2, 3, 4], settings=settings)
    for found in sets:
        before, after = (float((logits / 20).softmax(-1)[1]) for logits in (found.source_logits, found.logits[0]))
        assert after >= 1 - before > 0.5
    # Who is done costs nothing while others go on; a picture is decoded in each step and in each repainting.
    spent = [found.cost.decoder_backwards for found in sets]
    assert len(set(spent)) > 1 and max(spent) < 40
    for found in sets:
        assert found.cost.network_calls == 4 * found.cost.decoder_forwards > 4 * found.cost.decoder_backwards


def test_sce_keeps_its_surest_picture() -> None:
    """The goal is out of reach, the descent goes on to its end, and what it found on the way is not lost."""
    short_of_it = short("sce", temperature=0.001)
    few, many = (run("sce", images(2), seeds=[1, 2], settings=short_of_it.changed(iterations=(n,))) for n in (6, 12))
    for one, other in zip(few, many, strict=True):
        assert other.cost.decoder_backwards in (one.cost.decoder_backwards, 12)
        assert float(other.logits[0].softmax(0)[1]) >= float(one.logits[0].softmax(0)[1])


def test_ace_moves_a_pixel_at_most_one_step_an_iteration() -> None:
    settings = short("ace", iterations=(3,), step_size=0.02, strength=0.1, l1=0.0)
    assert settings.tries == (3,)  # type: ignore[union-attr]
    (found,) = run("ace", images(1), settings=settings)
    assert found.cost.decoder_backwards == 3


def test_diffeocf_stops_at_its_confidence_and_starts_exactly_at_the_image() -> None:
    (found,) = run("diffeocf", images(1), settings=short("diffeocf", iterations=(200,), confidence=0.9))
    assert 0.9 <= float(found.logits[0].softmax(0)[1]) < 0.999
    assert found.cost.decoder_backwards < 200 and found.cost.network_calls == 0
    # One step of Adam has the length of its rate in every coordinate that has a gradient.
    (one,) = run("diffeocf", images(1), settings=short("diffeocf", iterations=(1,), rate=0.02))
    change = (one.images[0] - one.x0).abs()
    torch.testing.assert_close(change[:, :, :5], torch.full_like(change[:, :, :5], 0.01), atol=1e-4, rtol=0)
    assert (change[:, :, 5:11] == 0).all()  # `Sides` does not look there


def test_dive_pushes_perturbations_apart() -> None:
    e = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).view(1, 2, 1, 1, 2)
    # cos² of the angle θ between the two is ½ at 45°; d cos²θ/dθ = -sin 2θ = -1, and the first has length 1.
    torch.testing.assert_close(alikeness_gradient(e)[0, 0, 0, 0], torch.tensor([0.0, 1.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(alikeness_gradient(e)[0, 1, 0, 0], torch.tensor([0.5, -0.5]), atol=1e-6, rtol=0)

    def cosine(diversity: float) -> float:
        (found,) = run("dive", images(1), seeds=[1], settings=short("dive", k=2, diversity=diversity))
        first, second = (found.images - found.x0).flatten(1)
        return float(torch.cosine_similarity(first, second, dim=0).abs())

    assert cosine(30.0) < 0.5 * cosine(0.0)


def test_models_come_back_as_they_were() -> None:
    f = Sides().train()
    for name in BASELINES:
        METHODS[name](gaussian_prior(False), f, Sides(), images(1), [1], short(name))
    assert f.training and all(parameter.requires_grad for parameter in f.parameters())
    assert Counter(parameter.grad is None for parameter in f.parameters()) == {True: 1}
