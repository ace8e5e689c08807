"""The guidance gradient against autograd and closed forms, and the gradient sources of the ablation."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from engine.errors import ClassifierError
from engine.guidance import (
    classification_loss,
    clip_per_sample,
    frozen_model,
    gradient_source,
    guidance,
    normalise_per_sample,
    proximity_gradient,
    smoothdiff,
    vanilla,
)
from engine.recipe import GradientName, Recipe

SOURCES = GradientName.__args__  # type: ignore[attr-defined]


class Net(nn.Module):
    """A small convolutional classifier for 3x8x8 images."""

    def __init__(self, seed: int = 0, inplace: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(6, 6, 3), nn.Softplus())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


class Decoder(nn.Module):
    """A small decoder that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.calls = 0

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        return torch.sigmoid(self.layer(z))


Z, Y = torch.randn(4, 4, 4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 1])


def test_guidance_is_the_gradient_of_the_loss_through_the_decoder() -> None:
    decode, f_hat = Decoder(), Net()
    gradient, image, logits = guidance(decode, gradient_source(Recipe(), f_hat, f_hat), Z, Y)
    assert decode.calls == 1
    z = Z.clone().requires_grad_(True)
    loss = nn.functional.cross_entropy(f_hat(decode(z)), Y, reduction="sum")
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, z)[0])
    torch.testing.assert_close(image, decode(Z).detach())
    torch.testing.assert_close(logits, f_hat(image).detach())
    assert not (gradient.requires_grad or image.requires_grad or logits.requires_grad)


def test_micro_batches_change_nothing() -> None:
    decode, f_hat = Decoder(), Net()
    source = gradient_source(Recipe(), f_hat, f_hat)
    whole = guidance(decode, source, Z, Y)
    for size in (1, 3):
        for left, right in zip(whole, guidance(decode, source, Z, Y, size), strict=True):
            torch.testing.assert_close(left, right, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_needs_one_decoder_call_and_treats_samples_alone(name: str) -> None:
    decode, f, f_hat = Decoder(), Net(0), Net(1)
    source = gradient_source(Recipe(gradient=name, gradient_samples=3, gradient_points=3), f, f_hat)
    gradient, _, logits = guidance(decode, source, Z, Y)
    assert decode.calls == 1 and gradient.abs().sum() > 0
    torch.testing.assert_close(logits, (f_hat if name == "surrogate" else f)(decode(Z)).detach())
    alone = torch.cat([guidance(decode, source, Z[b : b + 1], Y[b : b + 1])[0] for b in range(4)])
    torch.testing.assert_close(gradient, alone, atol=1e-7, rtol=1e-4)


def test_on_a_linear_loss_the_sources_have_closed_forms() -> None:
    weight = torch.randn(2, 3 * 8 * 8)

    def linear(x: Tensor) -> Tensor:
        return x.flatten(1) @ weight.T

    image, y = torch.rand(2, 3, 8, 8), torch.tensor([1, 0])
    truth = -weight[y].reshape(2, 3, 8, 8)
    for name, expected in (
        ("vanilla", truth),
        ("smoothgrad", truth),
        ("path_gradient", truth),
        ("ig", image * truth),
        ("smoothgrad_ig", image * truth),
    ):
        cotangent, _ = gradient_source(Recipe(gradient=name, loss="target_logit"), linear, linear)(image, y)
        torch.testing.assert_close(cotangent, expected, atol=1e-5, rtol=1e-4)


def test_integrated_gradients_add_up_to_the_change_of_the_loss() -> None:
    f, image, y = Net().double(), torch.rand(2, 3, 8, 8, dtype=torch.float64), torch.tensor([1, 2])
    attribution, logits = gradient_source(Recipe(gradient="ig", gradient_points=256), f, f)(image, y)
    change = classification_loss(logits, y) - classification_loss(f(torch.zeros_like(image)), y)
    torch.testing.assert_close(attribution.sum(dim=(1, 2, 3)), change, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("inplace", [False, True])
def test_smoothdiff_without_noise_is_the_plain_gradient(inplace: bool) -> None:
    f, image, y = Net(inplace=inplace), torch.rand(2, 3, 8, 8), torch.tensor([1, 2])
    smooth, logits = smoothdiff(f, classification_loss, image, y, samples=3, noise=0.0)
    plain, expected = vanilla(f, classification_loss, image, y)
    torch.testing.assert_close(smooth, plain)
    torch.testing.assert_close(logits, expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in f.modules())


def test_smoothdiff_of_one_activation_is_smoothgrad_of_it() -> None:
    """A sum of ReLUs has the derivative 1[x > 0]; its mean over noise is what both methods give."""

    class Hinge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            total = self.act(x - 0.5).sum(dim=(1, 2, 3))
            return torch.stack([total, -total], dim=1)

    f, image, y = Hinge(), torch.rand(1, 3, 4, 4), torch.tensor([0])
    loss = partial(classification_loss, kind="target_logit")
    smooth, _ = smoothdiff(f, loss, image, y, samples=5, noise=0.3)
    recipe = Recipe(gradient="smoothgrad", gradient_samples=5, gradient_noise=0.3, loss="target_logit")
    torch.testing.assert_close(smooth, gradient_source(recipe, f, f)(image, y)[0])
    assert (smooth.abs() > 0.01).logical_and(smooth.abs() < 0.99).sum() > 0


def test_sources_that_cannot_work_say_so() -> None:
    image, y = torch.rand(1, 3, 8, 8), torch.tensor([0])
    with pytest.raises(ClassifierError, match="gradient"):
        vanilla(lambda x: torch.zeros(1, 2), classification_loss, image, y)
    with pytest.raises(ClassifierError, match="function"):
        smoothdiff(lambda x: x, classification_loss, image, y, samples=1, noise=0.1)
    with pytest.raises(ClassifierError, match="no activation"):
        smoothdiff(nn.Flatten(), classification_loss, image, y, samples=1, noise=0.1)


def test_loss_temperature_and_target_logit() -> None:
    logits, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 1])
    torch.testing.assert_close(classification_loss(logits, y, temperature=2.0), (-(logits / 2).log_softmax(1))[:, 1])
    torch.testing.assert_close(classification_loss(logits, y, "target_logit"), torch.tensor([0.0, -1.0]))


def test_clipping_is_per_sample() -> None:
    gradient = torch.stack([torch.full((1, 2, 2), 10.0), torch.full((1, 2, 2), 0.01), torch.zeros(1, 2, 2)])
    clipped = clip_per_sample(gradient, 1.0)
    assert clipped[0].norm() == pytest.approx(1.0)
    assert torch.equal(clipped[1:], gradient[1:]) and clip_per_sample(gradient, None) is gradient
    unit = normalise_per_sample(gradient)
    assert unit[0].square().mean() == pytest.approx(1.0) and unit[1].square().mean() == pytest.approx(1.0)
    assert torch.equal(unit[2], gradient[2])


def test_proximity_is_the_gradient_of_the_norms_and_zero_at_zero() -> None:
    z0 = torch.randn(2, 4, 3, 3)
    z = (z0 + torch.randn_like(z0)).requires_grad_(True)
    norms = 0.3 * (z - z0).abs().sum() + 0.7 * (z - z0).square().sum(dim=1).sqrt().sum()
    torch.testing.assert_close(proximity_gradient(z.detach(), z0, 0.3, 0.7), torch.autograd.grad(norms, z)[0])
    assert torch.equal(proximity_gradient(z0, z0, 0.3, 0.7), torch.zeros_like(z0))


def test_a_users_model_is_given_back_as_it_was() -> None:
    f = Net().train()
    f.head.weight.requires_grad_(False)
    with frozen_model(f):
        assert not f.training and not any(p.requires_grad for p in f.parameters())
    assert f.training and f.body.training and f.head.bias.requires_grad and not f.head.weight.requires_grad
