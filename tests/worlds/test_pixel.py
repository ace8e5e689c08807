"""Pixel-space priors: noise levels as drawn, training that resumes to the same weights, folders that open again."""

from pathlib import Path

import pytest
import torch
from diffusers import UNet2DModel

from engine.prior import IdentityAutoencoder
from worlds import WORLDS, pixel, train
from worlds.pixel import BUDGET_MB, CENTRE, SPREAD, noise_levels, pixel_network, pixel_scheduler, train_pixel
from worlds.store import PIXEL, open_prior, weights_megabytes, write_prior

WORLD = WORLDS["portraits"]


def small_network() -> UNet2DModel:
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return UNet2DModel(32, 12, 12, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, **blocks)


def test_both_networks_fit_their_budget_in_half_precision() -> None:
    count = sum(parameter.numel() for parameter in pixel_network().parameters())
    assert len(WORLDS) * 2 * count / 1e6 <= BUDGET_MB


def test_noise_levels_are_log_normal_and_every_batch_has_all_kinds() -> None:
    ratios = (1 / pixel_scheduler().alphas_cumprod - 1).sqrt()
    g = torch.Generator().manual_seed(0)
    batches = torch.stack([noise_levels(g, ratios) for _ in range(2_000)])
    logs = ratios[batches].log()
    assert logs.mean().item() == pytest.approx(CENTRE, abs=0.03)
    assert logs.std().item() == pytest.approx(SPREAD, abs=0.05)
    assert (logs.min(1).values < CENTRE - SPREAD).all()  # the lowest eighth lies below -1.15 standard deviations
    assert (batches.diff(dim=1) >= 0).all()


def test_training_lowers_the_error_of_v_and_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixel, "pixel_network", small_network)
    monkeypatch.setattr(pixel, "CYCLES", {"portraits": (3,)})
    monkeypatch.setattr("worlds.training.CHECKPOINT_EVERY", 1)
    images = WORLD.sample(8, seed=0).images.mul(255).round().byte()
    whole = train_pixel(WORLD, images, tmp_path / "whole.safetensors")
    asked: list[int] = []
    real = pixel.generator

    def killed(seed: int, step: int) -> torch.Generator:
        asked.append(step)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(seed, step)

    monkeypatch.setattr(pixel, "generator", killed)
    with pytest.raises(KeyboardInterrupt):
        train_pixel(WORLD, images, tmp_path / "killed.safetensors")
    resumed = train_pixel(WORLD, images, tmp_path / "killed.safetensors")
    assert asked == [0, 1, 2, 2]
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_is_trained_is_stored_with_a_card_and_opens_as_a_prior_over_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network = small_network()
    write_prior(WORLD, {"unet": network}, pixel_scheduler(), tmp_path, part=PIXEL)
    prior = open_prior(WORLD, tmp_path, part=PIXEL)
    assert isinstance(prior.autoencoder, IdentityAutoencoder)
    assert (prior.image_size, prior.scheduler["prediction_type"]) == (64, "v_prediction")
    assert 0 < weights_megabytes(tmp_path, [PIXEL]) < 0.1
    assert weights_megabytes(tmp_path) == 0
    monkeypatch.setattr(pixel, "COLUMNS", 1)
    pixel.write_pixel_card(WORLD, tmp_path, n=2)
    card = (tmp_path / "portraits" / "pixel.md").read_text()
    assert "«portraits-pixel»" in card
    assert "| frechet_samples |" in card
    assert (tmp_path / "portraits" / "pixel.png").is_file()
    open_prior(WORLD, tmp_path, part=PIXEL)  # the card is no part of the weights


def test_the_command_trains_the_pixel_space_prior_of_the_named_world(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    monkeypatch.setattr(train, "train_pixel_prior", lambda world, checkpoints: trained.append(world.name))
    assert train.main(["pixel"]) == 0
    assert train.main(["pixel", "--world", "histology"]) == 0
    assert trained == ["portraits", "histology", "histology"]
    torch.use_deterministic_algorithms(False)
    with pytest.raises(SystemExit):
        train.main(["portraits", "--world", "histology"])
