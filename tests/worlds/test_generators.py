"""The lighter decoder keeps the encoder and its latents, and learns from them."""

from pathlib import Path

import pytest
import torch

from worlds import generators
from worlds.generators import LIGHT_BLOCKS, autoencoder, encode_all, train_light_decoder


def test_a_light_decoder_has_the_same_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "DECODER_STEPS", 3)
    torch.manual_seed(0)
    vae = autoencoder().eval().requires_grad_(False)
    vae.register_to_config(scaling_factor=0.5, shift_factor=0.25)
    images = torch.randint(256, (20, 3, 16, 16), dtype=torch.uint8)
    latents = encode_all(vae, images)
    light = train_light_decoder(vae, images, latents, tmp_path / "decoder.safetensors", "decoder")
    assert tuple(light.config["num_decoder_blocks"]) == LIGHT_BLOCKS
    torch.testing.assert_close(encode_all(light, images), latents, rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in light.parameters())
    picture = light.decode(latents / 0.5 + 0.25, return_dict=False)[0]
    assert picture.shape == images.shape
    again = train_light_decoder(vae, images, latents, tmp_path / "decoder.safetensors", "decoder")
    torch.testing.assert_close(again.state_dict(), light.state_dict(), rtol=0, atol=0)
