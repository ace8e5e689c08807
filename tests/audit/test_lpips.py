"""LPIPS: its properties with the published weights, and what it refuses."""

import pathlib

import pytest
import safetensors.torch
import torch
from torch import Tensor

from audit.lpips import LPIPS
from engine.errors import ImageError, WeightsError

WEIGHTS = pathlib.Path(__file__).parents[2] / "../shared/weights/lpips_alex_v0.1.safetensors"


@pytest.fixture(scope="module")
def lpips() -> LPIPS:
    if not WEIGHTS.exists():
        pytest.skip("the published LPIPS weights are not beside the repository (../shared/weights)")
    return LPIPS.load(WEIGHTS)


def picture(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 8, 8, generator=generator)
    return torch.nn.functional.interpolate(coarse, (64, 64), mode="bilinear")


def test_distance_is_zero_to_itself_symmetric_and_grows_with_noise(lpips: LPIPS) -> None:
    x = picture()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    little, much = (x + 0.02 * noise).clamp(0, 1), (x + 0.2 * noise).clamp(0, 1)
    assert lpips(x, x).item() == 0
    assert 0 < lpips(x, little).item() < lpips(x, much).item() < 2
    torch.testing.assert_close(lpips(x, much), lpips(much, x))


def test_blur_is_perceived_more_than_a_change_of_brightness_of_equal_size(lpips: LPIPS) -> None:
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(2)) * 0.2 + picture() * 0.6
    blurred = torch.nn.functional.avg_pool2d(x, 5, 1, 2, count_include_pad=False)
    brighter = x + (blurred - x).square().mean().sqrt()
    assert lpips(x, blurred).item() > 3 * lpips(x, brighter).item()


def test_pairs_do_not_see_their_batch_mates(lpips: LPIPS) -> None:
    x, y = torch.cat([picture(0), picture(1)]), torch.cat([picture(2), picture(3)])
    single = torch.cat([lpips(x[:1], y[:1]), lpips(x[1:], y[1:])])
    torch.testing.assert_close(lpips(x, y), single)


def test_heads_are_non_negative_so_it_is_a_distance(lpips: LPIPS) -> None:
    assert all((head.weight >= 0).all() for head in lpips.heads)
    assert not any(p.requires_grad for p in lpips.parameters())


def test_closed_form_with_one_head(lpips: LPIPS) -> None:
    first, *_ = lpips.features(picture(0))
    other, *_ = lpips.features(picture(1))
    cosine = torch.nn.functional.cosine_similarity(first, other, dim=1)
    flat = LPIPS()
    flat.convolutions.load_state_dict(lpips.convolutions.state_dict())
    for i, head in enumerate(flat.heads):
        head.weight.fill_(1.0 if i == 0 else 0.0)
    # Σ_c (a − b)² = 2 − 2·cos for unit vectors.
    torch.testing.assert_close(flat(picture(0), picture(1))[0], (2 - 2 * cosine).mean(), rtol=1e-4, atol=1e-6)


def test_images_that_do_not_fit_are_refused() -> None:
    network = LPIPS()
    with pytest.raises(ImageError, match="at least 32"):
        network(torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16))
    with pytest.raises(ImageError, match="one shape"):
        network(torch.rand(1, 3, 32, 32), torch.rand(2, 3, 32, 32))


def test_weight_files_that_do_not_fit_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(WeightsError, match="no LPIPS weight file"):
        LPIPS.load(tmp_path / "missing.safetensors")
    (tmp_path / "text.safetensors").write_text("no weights")
    with pytest.raises(WeightsError, match="cannot be read"):
        LPIPS.load(tmp_path / "text.safetensors")
    safetensors.torch.save_file({"lin0.weight": torch.zeros(1, 64, 1, 1)}, tmp_path / "part.safetensors")
    with pytest.raises(WeightsError, match="is missing"):
        LPIPS.load(tmp_path / "part.safetensors")
