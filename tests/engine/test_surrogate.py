"""Surrogates: the smooth unit, the network, distillation from queries and the pair."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.errors import Cancelled, ClassifierError, ImageError, InputError, RecipeError
from engine.surrogate import (
    EVALUATOR,
    GUIDE,
    Surrogate,
    SurrogatePair,
    SurrogateRecipe,
    attack,
    check_recipes,
    cross_entropy,
    distil,
    kl_divergence,
    query_probabilities,
)
from engine.surrogate_cache import hash_images
from engine.surrogate_net import (
    NetworkConfig,
    SmoothActivation,
    SurrogateNetwork,
    resize,
    resize_matrix,
    smooth_activation,
    smoothed_copy,
)

TINY = NetworkConfig(input_size=16, widths=(8, 16), blocks=1)
QUICK = SurrogateRecipe(role="guide", seed=3, network=TINY, steps=4, adversarial_steps=1)


def colour_images(n: int, seed: int = 0, size: int = 16) -> Tensor:
    """Pictures with a random tint and some texture."""
    generator = torch.Generator().manual_seed(seed)
    tint = torch.rand(n, 3, 1, 1, generator=generator)
    return (0.8 * tint + 0.2 * torch.rand(n, 3, size, size, generator=generator)).clamp(0, 1)


def colour_classifier(images: Tensor) -> Tensor:
    """Whether red or blue prevails, softly."""
    red_over_blue = images[:, 0].mean(dim=(1, 2)) - images[:, 2].mean(dim=(1, 2))
    return torch.stack([-8 * red_over_blue, 8 * red_over_blue], dim=1).softmax(dim=1)


# The unit and the network ----------------------------------------------------------------------------------------


def test_smooth_unit_has_the_stated_values() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, 3.0], dtype=torch.float64)
    leaky = torch.tensor([0.0, 1.0, -0.1, 3.0], dtype=torch.float64)
    softplus = torch.log1p(torch.exp(10 * x)) / 10
    torch.testing.assert_close(smooth_activation(x), 0.5 * (leaky + softplus))
    assert smooth_activation(torch.zeros(())).item() == pytest.approx(np.log(2) / 20)


def test_slope_of_the_smooth_unit_is_never_zero_and_jumps_less_than_half_of_relus() -> None:
    x = torch.linspace(-3, 3, 6001, dtype=torch.float64).requires_grad_(True)
    (slope,) = torch.autograd.grad(smooth_activation(x).sum(), x)
    leak = torch.where(x > 0, 1.0, 0.1)
    torch.testing.assert_close(slope, 0.5 * (leak + torch.sigmoid(10 * x)))
    assert slope.min() >= 0.05 and slope.max() <= 1
    jump = slope.diff()
    assert jump.argmax() in (2999, 3000)
    assert jump.max() == pytest.approx(0.45, abs=0.005)
    # Everywhere else the slope is continuous: it moves by at most β/8 per unit of x.
    assert jump.sort().values[-2] <= 0.001 * 10 / 8 + 1e-9


def test_network_takes_any_size_and_gives_logits_with_gradient() -> None:
    network = SurrogateNetwork(5, TINY).eval()
    for size in (16, 32, 20, 9):
        images = torch.rand(2, 3, size, size, requires_grad=True)
        logits = network(images)
        assert logits.shape == (2, 5)
        (gradient,) = torch.autograd.grad(logits.sum(), images)
        assert (gradient.abs().amax(dim=(0, 1)) > 0).all(), "a pixel was left without a gradient"


def test_network_has_no_max_pool_and_no_relu() -> None:
    kinds = {type(m) for m in SurrogateNetwork(2).modules()}
    assert not kinds & {nn.ReLU, nn.MaxPool2d}
    assert SmoothActivation in kinds


def test_network_size_must_fit_its_stride() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        NetworkConfig(input_size=48)


def test_resize_is_average_pooling_at_integer_factors_and_bilinear_when_growing() -> None:
    images = torch.rand(2, 3, 12, 24)
    torch.testing.assert_close(resize(images, 6), nn.functional.avg_pool2d(images, (2, 4)))
    grown = nn.functional.interpolate(images, (32, 32), mode="bilinear", align_corners=False)
    torch.testing.assert_close(resize(images, 32), grown)
    area = nn.functional.interpolate(images, (12, 12), mode="area")
    torch.testing.assert_close(resize_matrix(24, 12), torch.eye(12).repeat_interleave(2, dim=1) / 2)
    torch.testing.assert_close(resize(images, 12), area)
    torch.testing.assert_close(resize(torch.full((1, 3, 10, 7), 0.3), 4), torch.full((1, 3, 4, 4), 0.3))


# The smooth mirror -----------------------------------------------------------------------------------------------


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(196, 8), nn.GELU(),
        nn.Linear(8, 3),
    )  # fmt: skip


def test_smoothed_copy_leaves_the_classifier_untouched() -> None:
    f = classifier().train()
    f[0].weight.requires_grad_(False)
    calls: list[int] = []
    f[2].register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(f.state_dict())
    flags = [p.requires_grad for p in f.parameters()]
    mirror = smoothed_copy(f)
    with torch.no_grad():
        for p in mirror.parameters():
            p.add_(1)
    mirror(torch.rand(2, 3, 16, 16))
    assert f.training and all(m.training for m in f.modules())
    assert [p.requires_grad for p in f.parameters()] == flags
    assert len(f[2]._forward_hooks) == 1 and not calls
    assert isinstance(f[2], nn.ReLU) and isinstance(f[3], nn.MaxPool2d) and isinstance(f[6], nn.GELU)
    for name, value in f.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_smoothed_copy_swaps_units_and_max_pools_and_keeps_the_weights() -> None:
    f = classifier()
    mirror = smoothed_copy(f)
    assert [type(m) for m in mirror.children()][2:4] == [SmoothActivation, nn.AvgPool2d]
    assert not mirror.training and not any(p.requires_grad for p in mirror.parameters())
    assert mirror.state_dict().keys() == f.state_dict().keys()
    images = torch.rand(2, 3, 16, 16)
    x = nn.functional.avg_pool2d(smooth_activation(f.eval()[1](f[0](images))), 2)
    expected = f[7](smooth_activation(f[5](x.flatten(1))))
    torch.testing.assert_close(mirror(images), expected)


def test_smoothed_copy_knows_the_units_of_transformers() -> None:
    activations = pytest.importorskip("transformers.activations")
    mirror = smoothed_copy(nn.Sequential(nn.Linear(4, 4), activations.GELUActivation(), nn.Tanh()))
    assert [type(m) for m in mirror.children()] == [nn.Linear, SmoothActivation, nn.Tanh]


def test_smoothed_copy_refuses_a_model_without_units() -> None:
    with pytest.raises(ClassifierError, match="would not be smooth"):
        smoothed_copy(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)))


# Losses ----------------------------------------------------------------------------------------------------------


def test_kl_of_equal_distributions_is_zero_and_of_a_coin_is_known() -> None:
    p = torch.tensor([[0.2, 0.8], [1.0, 0.0]])
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros(2))
    coin, biased = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    assert kl_divergence(coin, biased).item() == pytest.approx(0.5 * np.log(4 / 3), rel=1e-5)


def test_attack_stays_in_the_ball_and_raises_the_loss() -> None:
    torch.manual_seed(0)
    network = SurrogateNetwork(2, TINY).train()
    statistics = copy.deepcopy(network.state_dict())
    x = colour_images(6) * 0.6 + 0.2
    y = colour_classifier(x)
    recipe = QUICK.changed(adversarial_steps=5, adversarial_epsilon=4.0)
    x_adv = attack(network, x, y, recipe, torch.Generator().manual_seed(0)).detach()
    assert network.training
    assert all(torch.equal(v, statistics[k]) for k, v in network.state_dict().items())
    radius = recipe.epsilon_at(16, 16)
    assert radius == pytest.approx(0.5)
    assert (x_adv - x).flatten(1).norm(dim=1).max() <= radius * (1 + 1e-5)
    network.eval()
    loss, loss_adv = (cross_entropy(network(i).log_softmax(1), y).item() for i in (x, x_adv))
    assert loss_adv > loss


# Distillation ----------------------------------------------------------------------------------------------------


def test_distilling_a_colour_classifier_follows_it_on_held_out_images() -> None:
    recipe = QUICK.changed(steps=200, adversarial_steps=2, adversarial_share=0.5, held_out=0.2)
    surrogate = distil(colour_classifier, colour_images(600), recipe)
    assert surrogate.agreement.rate.n == 120
    assert surrogate.agreement.rate.value >= 0.95
    assert surrogate.agreement.rate.lower > surrogate.agreement.majority
    assert surrogate.agreement.mean_kl < 0.1
    fresh = colour_images(200, seed=9)
    same = surrogate.predict(fresh) == colour_classifier(fresh).argmax(dim=1)
    assert same.float().mean() >= 0.95
    assert not surrogate.network.training and not any(p.requires_grad for p in surrogate.network.parameters())


def test_distillation_is_the_same_from_the_same_seed_and_keeps_the_global_random_state() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    images = colour_images(40)
    first, second = (distil(colour_classifier, images, QUICK) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.weights_hash == second.weights_hash
    assert first.weights_hash != distil(colour_classifier, images, QUICK.changed(seed=4)).weights_hash


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": "f_hat||f"},
        {"mixup_weight": 0.0},
        {"adversarial_weight": 0.0, "mixup_weight": 0.0, "smoothing_weight": 0.0},
        {"schedule": "constant"},
    ],
)
def test_every_switch_of_the_recipe_changes_the_result(settings: dict[str, object]) -> None:
    images = colour_images(40)
    plain = distil(colour_classifier, images, QUICK)
    assert distil(colour_classifier, images, QUICK.changed(**settings)).weights_hash != plain.weights_hash


def test_extra_queries_are_counted_and_lie_in_range() -> None:
    seen: list[Tensor] = []

    def query(images: Tensor) -> Tensor:
        seen.append(images)
        return colour_classifier(images)

    surrogate = distil(query, colour_images(40), QUICK.changed(extra_queries=33), query_batch=16)
    asked = torch.cat(seen)
    assert len(asked) == surrogate.queries == 73
    assert asked.min() >= 0 and asked.max() <= 1
    assert len(asked.flatten(1).unique(dim=0)) == 73


def test_images_may_be_read_slice_by_slice_at_any_size() -> None:
    class OnDisk:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: slice, /) -> Tensor:
            return images[index]

    images = colour_images(40, size=24)
    assert hash_images(OnDisk(), batch=7) == hash_images(images)
    assert (
        distil(colour_classifier, OnDisk(), QUICK).weights_hash == distil(colour_classifier, images, QUICK).weights_hash
    )


def test_a_white_box_mirror_is_trained_as_a_copy() -> None:
    mirror = smoothed_copy(classifier())
    before = copy.deepcopy(mirror.state_dict())

    def query(images: Tensor) -> np.ndarray:
        return np.full((len(images), 3), 1 / 3)

    surrogate = distil(query, colour_images(40), QUICK, network=mirror)
    assert surrogate.n_classes == 3 and surrogate(colour_images(2)).shape == (2, 3)
    assert not any(p.requires_grad for p in mirror.parameters())
    assert all(torch.equal(v, before[k]) for k, v in mirror.state_dict().items())


def test_progress_and_cancel() -> None:
    told: list[tuple[int, int]] = []
    distil(colour_classifier, colour_images(40), QUICK, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    with pytest.raises(Cancelled):
        distil(colour_classifier, colour_images(40), QUICK, progress=lambda *_: told.clear(), cancel=lambda: not told)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (torch.full((4, 2), float("nan")), "NaN"),
        (torch.full((4, 2), 0.7), "sum to between 1.4"),
        (torch.tensor([[1.5, -0.5]]).repeat(4, 1), "no probabilities"),
        (torch.full((3, 2), 0.5), "sent 4 images and answered for 3"),
        (torch.full((4,), 0.5), r"\[B, classes\]"),
        (torch.full((4, 1), 1.0), "one number per image"),
        (torch.full((4, 3), 1 / 3), "2 classes before and 3 now"),
        ("no", "not with numbers"),
        (None, "not with numbers"),
    ],
)
def test_bad_answers_of_a_classifier_are_refused(answer: object, sentence: str) -> None:
    with pytest.raises(ClassifierError, match=sentence):
        query_probabilities(lambda _: answer, torch.rand(4, 3, 8, 8), n_classes=2)


def test_good_answers_may_be_arrays_and_rounded() -> None:
    p = query_probabilities(lambda _: np.array([[0.3334, 0.6669]]), torch.rand(1, 3, 8, 8))
    torch.testing.assert_close(p.sum(dim=1), torch.ones(1))


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (torch.rand(20, 1, 16, 16), r"\[B, 3, H, W\]"),
        (torch.full((20, 3, 16, 16), 2.0), r"\[0, 1\]"),
        (torch.full((20, 3, 16, 16), float("nan")), "NaN"),
        (torch.zeros(20, 3, 16, 16, dtype=torch.uint8), "255"),
    ],
)
def test_bad_images_are_refused_before_the_classifier_is_asked(images: Tensor, sentence: str) -> None:
    def never(_: Tensor) -> Tensor:
        raise AssertionError("f was asked")

    with pytest.raises(ImageError, match=sentence):
        distil(never, images, QUICK)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(InputError, match="at least 16"):
        distil(colour_classifier, colour_images(5), QUICK)


# Recipes and pairs -----------------------------------------------------------------------------------------------


def test_default_recipes_make_a_pair() -> None:
    check_recipes(GUIDE, EVALUATOR)
    assert GUIDE.seed != EVALUATOR.seed and GUIDE.network != EVALUATOR.network


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(RecipeError, match="'noise'"):
        SurrogateRecipe(role="guide", seed=0, noise=-1.0)
    with pytest.raises(RecipeError, match="'role'"):
        GUIDE.changed(role="judge")


def test_radius_scales_with_the_side() -> None:
    assert GUIDE.epsilon_at(128, 128) == pytest.approx(1.0)
    assert GUIDE.epsilon_at(64, 64) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("evaluator", "sentence"),
    [
        (GUIDE, "circular"),
        (EVALUATOR.changed(seed=GUIDE.seed), "share the seed"),
        (GUIDE.changed(role="evaluator", seed=GUIDE.seed + 1), "seed only"),
    ],
)
def test_a_guide_cannot_be_its_own_evaluator(evaluator: SurrogateRecipe, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        check_recipes(GUIDE, evaluator)


def test_a_pair_refuses_equal_weights_and_other_classes() -> None:
    guide = distil(colour_classifier, colour_images(40), QUICK)

    def evaluator(weights_hash: str, n_classes: int = 2) -> Surrogate:
        return Surrogate(guide.network, EVALUATOR, n_classes, guide.agreement, 40, weights_hash)

    SurrogatePair(guide, evaluator("other"))
    with pytest.raises(RecipeError, match="same weights"):
        SurrogatePair(guide, evaluator(guide.weights_hash))
    with pytest.raises(RecipeError, match="2 classes and the evaluator 3"):
        SurrogatePair(guide, evaluator("other", n_classes=3))
