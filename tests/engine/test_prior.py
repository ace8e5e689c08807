"""Priors: tiny pipelines built from config, saved, and loaded through the real code."""

import json
import pathlib
import shutil

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    DDIMScheduler,
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

import engine.prior
from engine.errors import ImageError, PriorError, WeightsError
from engine.path import Diffusion, RectifiedFlow
from engine.prior import IdentityAutoencoder, Prior, SD3Network, UNetNetwork, content_hash, load_prior

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny_vae() -> AutoencoderTiny:
    widths = (8, 8, 8)
    return AutoencoderTiny(
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
        latent_channels=4,
        scaling_factor=1.5,
        shift_factor=0.1,
    )


def kl_vae(channels: int = 4) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        scaling_factor=0.9,
        shift_factor=0.05,
    )


def vq_vae() -> VQModel:
    return VQModel(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        norm_num_groups=4,
        num_vq_embeddings=16,
        scaling_factor=1.0,
    )


def transformer(pooled: int = 8) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=pooled,
        pos_embed_max_size=8,
    )


def unet(channels: int = 4, out: int | None = None) -> UNet2DModel:
    return UNet2DModel(
        sample_size=8,
        in_channels=channels,
        out_channels=out or channels,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
    )


def text_unet(width: int = 16) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=2,
        cross_attention_dim=width,
    )


def save_folder(folder: pathlib.Path, **parts: object) -> pathlib.Path:
    """A diffusers folder with the given parts."""
    index: dict[str, object] = {"_class_name": "DiffusionPipeline"}
    for name, part in parts.items():
        part.save_pretrained(folder / name)  # type: ignore[attr-defined]
        index[name] = ["diffusers", type(part).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def save_sd3(folder: pathlib.Path) -> pathlib.Path:
    """An unconditional small SD3 folder, as the portraits prior is one."""
    torch.manual_seed(0)
    return save_folder(
        folder, vae=tiny_vae(), transformer=transformer(), scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0)
    )


def save_ldm(folder: pathlib.Path) -> pathlib.Path:
    """An unconditional latent diffusion folder, as the histology prior is one."""
    torch.manual_seed(0)
    return save_folder(folder, vae=tiny_vae(), unet=unet(), scheduler=DDIMScheduler(clip_sample=False))


def save_clip(folder: pathlib.Path, number: str, kind: type = CLIPTextModelWithProjection, width: int = 8) -> None:
    """A tiny CLIP text encoder and a tokenizer that knows little more than its special tokens."""
    config = CLIPTextConfig(
        vocab_size=4,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=5,
        projection_dim=4,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=3,
    )
    kind(config).save_pretrained(folder / f"text_encoder{number}")
    home = folder / f"tokenizer{number}"
    home.mkdir()
    (home / "vocab.json").write_text(json.dumps({"a": 0, "a</w>": 1, "<|startoftext|>": 2, "<|endoftext|>": 3}))
    (home / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(vocab=str(home / "vocab.json"), merges=str(home / "merges.txt"), model_max_length=5).save_pretrained(
        home
    )
    index = json.loads((folder / "model_index.json").read_text())
    index[f"text_encoder{number}"] = ["transformers", kind.__name__]
    index[f"tokenizer{number}"] = ["transformers", "CLIPTokenizer"]
    (folder / "model_index.json").write_text(json.dumps(index))


@pytest.fixture
def sd3(tmp_path: pathlib.Path) -> pathlib.Path:
    return save_sd3(tmp_path / "sd3")


@pytest.fixture
def ldm(tmp_path: pathlib.Path) -> pathlib.Path:
    return save_ldm(tmp_path / "ldm")


def test_an_unconditional_sd3_folder(sd3: pathlib.Path) -> None:
    prior = load_prior(sd3)
    images = torch.rand(2, 3, 32, 16)
    vae = AutoencoderTiny.from_pretrained(sd3 / "vae").eval()
    with torch.no_grad():
        z0 = prior.encode(images)
        torch.testing.assert_close(z0, (vae.encode(2 * images - 1).latents - 0.1) * 1.5)
        torch.testing.assert_close(prior.decode(z0), (vae.decode(z0 / 1.5 + 0.1).sample + 1) / 2)
        velocity = prior.predict(z0, torch.tensor(500.0))
    assert z0.shape[1:] == prior.latent_shape(32, 16) == (4, 8, 4)
    assert velocity.shape == z0.shape and prior.image_size == 32 and prior.multiple == 8
    assert isinstance(prior.network, SD3Network)
    assert prior.network.tokens.shape == (1, 1, 16) and prior.network.tokens.abs().max() == 0
    assert isinstance(prior.path(10, 0.5, 32, 32), RectifiedFlow)
    assert not any(p.requires_grad for p in prior.parameters()) and not prior.training


def test_weights_stored_as_half_are_loaded_as_float(sd3: pathlib.Path) -> None:
    file = sd3 / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    assert {p.dtype for p in load_prior(sd3).parameters()} == {torch.float32}
    assert {p.dtype for p in load_prior(sd3, dtype=torch.float64).parameters()} == {torch.float64}
    file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    load_prior(sd3)


def test_shards_are_put_together(sd3: pathlib.Path) -> None:
    home, stem = sd3 / "transformer", "diffusion_pytorch_model"
    before = load_prior(sd3).content_hash
    tensors = load_file(home / f"{stem}.safetensors")
    (home / f"{stem}.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"{stem}-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == shard}, home / shard)
    (home / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert load_prior(sd3).content_hash == before
    (home / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../vae/x.safetensors"}}))
    with pytest.raises(WeightsError, match="outside"):
        load_prior(sd3)


def test_sd3_with_text_encoders_gets_the_empty_prompt_once(tmp_path: pathlib.Path, monkeypatch) -> None:
    folder = save_folder(
        tmp_path / "sd3", vae=tiny_vae(), transformer=transformer(), scheduler=FlowMatchEulerDiscreteScheduler()
    )
    save_clip(folder, "", width=8)
    save_clip(folder, "_2", width=6)
    prior = load_prior(folder, cache=tmp_path / "cache", text_tokens=9)
    assert isinstance(prior.network, SD3Network)
    tokens = prior.network.tokens
    assert tokens.shape == (1, 9, 16) and prior.network.pooled.shape == (1, 8)
    with torch.no_grad():
        ids = torch.tensor([[2, 3, 3, 3, 3]])
        first = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder")(ids, output_hidden_states=True)
    torch.testing.assert_close(tokens[:, :5, :8], first.hidden_states[-2])
    torch.testing.assert_close(prior.network.pooled[:, :4], first.text_embeds)
    assert tokens[:, 5:].abs().max() == 0 and tokens[..., 14:].abs().max() == 0
    assert [f.name[:11] for f in (tmp_path / "cache").iterdir()] == ["null-prompt"]
    monkeypatch.setattr(engine.prior, "_clip_null", None)  # a second load must not run the encoders
    assert load_prior(folder, cache=tmp_path / "cache", text_tokens=9).content_hash == prior.content_hash


def test_an_ldm_folder(ldm: pathlib.Path) -> None:
    prior = load_prior(str(ldm))
    z = torch.randn(2, 4, 8, 8)
    model = UNet2DModel.from_pretrained(ldm / "unet").eval()
    with torch.no_grad():
        torch.testing.assert_close(prior.predict(z, torch.tensor(7)), model(z, 7).sample)
    assert isinstance(prior.path(10, 0.5, 32, 32), Diffusion) and prior.multiple == 8


def test_a_kl_autoencoder_gives_the_posterior_mode(tmp_path: pathlib.Path) -> None:
    folder = save_folder(tmp_path, vae=kl_vae(), unet=unet(), scheduler=DDIMScheduler())
    prior = load_prior(folder)
    images = torch.rand(1, 3, 16, 16)
    vae = AutoencoderKL.from_pretrained(folder / "vae").eval()
    with torch.no_grad():
        mode = vae.encode(2 * images - 1).latent_dist.mode()
        torch.testing.assert_close(prior.encode(images), (mode - 0.05) * 0.9)
        torch.testing.assert_close(prior.decode(prior.encode(images)), (vae.decode(mode).sample + 1) / 2)


def test_a_vq_autoencoder_decodes_with_a_straight_through_gradient(tmp_path: pathlib.Path) -> None:
    prior = load_prior(save_folder(tmp_path, vqvae=vq_vae(), unet=unet(3), scheduler=DDIMScheduler()))
    z = prior.encode(torch.rand(1, 3, 16, 16)).requires_grad_(True)
    assert z.shape == (1, 3, 8, 8)
    assert torch.autograd.grad(prior.decode(z).sum(), z)[0].abs().sum() > 0


@pytest.mark.parametrize("vae", [tiny_vae, kl_vae])
def test_a_checkpointed_decoder_has_the_same_gradient(tmp_path: pathlib.Path, vae) -> None:
    prior = load_prior(save_folder(tmp_path, vae=vae(), unet=unet(), scheduler=DDIMScheduler()))
    gradients = []
    for checkpointed in (False, True):
        z = torch.ones(2, 4, 4, 4).mul(0.3).requires_grad_(True)
        image = prior.decode(z, checkpointed=checkpointed)
        gradients.append((image.detach(), torch.autograd.grad(image.square().sum(), z)[0]))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_pixel_space_model_has_an_identity_autoencoder(tmp_path: pathlib.Path) -> None:
    prior = load_prior(save_folder(tmp_path, unet=unet(3, out=6), scheduler=DDPMScheduler()))
    images = torch.rand(2, 3, 8, 8)
    assert isinstance(prior.autoencoder, IdentityAutoencoder)
    torch.testing.assert_close(prior.decode(prior.encode(images)), images)
    assert prior.encode(torch.zeros(1, 3, 8, 8)).min() == -1
    assert prior.predict(prior.encode(images), torch.tensor(3)).shape == images.shape  # learned variance dropped


def test_a_pixel_space_model_may_see_tiles_as_channels(tmp_path: pathlib.Path) -> None:
    prior = load_prior(save_folder(tmp_path, unet=unet(12, out=12), scheduler=DDPMScheduler()))
    network = prior.network
    assert isinstance(network, UNetNetwork) and (network.fold, prior.autoencoder.factor) == (2, 1)
    z, t = prior.encode(torch.rand(2, 3, 16, 16)), torch.tensor(3)
    tiles = network.model(torch.nn.functional.pixel_unshuffle(z, 2), t, return_dict=False)[0]
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):  # a tile's pixels are neighbouring channels, row by row
        assert torch.equal(prior.predict(z, t)[:, :, row::2, column::2], tiles[:, 2 * row + column :: 4])
    with pytest.raises(ImageError, match=f"divisible by {prior.multiple}"):
        prior.encode(torch.rand(1, 3, prior.multiple // 2, prior.multiple))


def test_a_text_unet_takes_a_stored_an_encoded_or_a_zero_embedding(tmp_path: pathlib.Path) -> None:
    folder = save_folder(tmp_path / "ldm", vae=tiny_vae(), unet=text_unet(), scheduler=DDIMScheduler())

    def tokens() -> torch.Tensor:
        network = load_prior(folder).network
        assert isinstance(network, UNetNetwork) and network.tokens is not None
        return network.tokens

    assert torch.equal(tokens(), torch.zeros(1, 1, 16))
    save_clip(folder, "", CLIPTextModel, width=16)
    assert tokens().shape == (1, 5, 16) and tokens().abs().max() > 0
    stored = torch.randn(1, 3, 16)
    save_file({"null_embedding": stored}, folder / "null_embedding.safetensors")
    assert torch.equal(tokens(), stored)
    save_file({"null_embedding": torch.randn(1, 3, 7)}, folder / "null_embedding.safetensors")
    with pytest.raises(WeightsError, match="null_embedding"):
        load_prior(folder)


def test_the_hash_follows_the_content(sd3: pathlib.Path) -> None:
    one, two = load_prior(sd3), load_prior(sd3)
    assert one.content_hash == two.content_hash
    with torch.no_grad():
        next(two.parameters()).add_(1e-3)
    assert content_hash(two, two.scheduler) != one.content_hash
    assert content_hash(one, {**one.scheduler, "shift": 2.0}) != one.content_hash


def test_images_that_do_not_fit_are_refused(sd3: pathlib.Path) -> None:
    prior = load_prior(sd3)
    for shape, words in (
        ((1, 3, 30, 32), "divisible by 8"),
        ((1, 1, 32, 32), "3, H, W"),
        ((3, 32, 32), "3, H, W"),
        ((1, 3, 128, 32), "at most 64"),
    ):
        with pytest.raises(ImageError, match=words):
            prior.encode(torch.rand(shape))


@pytest.mark.parametrize("part", ["vae", "transformer", "scheduler", "model_index.json", "transformer/config.json"])
def test_a_missing_part_is_named(sd3: pathlib.Path, part: str) -> None:
    victim = sd3 / part
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    with pytest.raises(PriorError, match=part):
        load_prior(sd3)


def test_a_missing_part_of_a_text_model_is_named(sd3: pathlib.Path) -> None:
    save_clip(sd3, "")
    with pytest.raises(PriorError, match="tokenizer_2"):
        load_prior(sd3)


def test_missing_cut_and_foreign_weights_are_named(sd3: pathlib.Path) -> None:
    file = sd3 / "vae" / "diffusion_pytorch_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match=r"vae.diffusion_pytorch_model\.safetensors.*cut short"):
        load_prior(sd3)
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(WeightsError, match="altered"):
        load_prior(sd3)
    save_file({"foreign": torch.ones(2)}, file)
    with pytest.raises(WeightsError, match="do not fit"):
        load_prior(sd3)
    file.unlink()
    with pytest.raises(WeightsError, match="missing"):
        load_prior(sd3)


def test_folders_that_are_no_prior_are_refused(tmp_path: pathlib.Path, ldm: pathlib.Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(PriorError, match="'transformer' or 'unet'"):
        load_prior(tmp_path)
    with pytest.raises(PriorError, match="lacks the part 'vae'"):
        load_prior(save_folder(tmp_path / "bare", unet=unet(4), scheduler=DDIMScheduler()))
    with pytest.raises(PriorError, match="FlowMatch"):
        load_prior(
            save_folder(tmp_path / "mixed", vae=tiny_vae(), transformer=transformer(), scheduler=DDIMScheduler())
        )
    with pytest.raises(PriorError, match="latent channels"):
        load_prior(save_folder(tmp_path / "odd", vae=kl_vae(5), unet=unet(4), scheduler=DDIMScheduler()))
    (ldm / "unet" / "config.json").write_text('{"_class_name": "Evil"}')
    with pytest.raises(PriorError, match="Evil"):
        load_prior(ldm)
    (ldm / "unet" / "config.json").write_text("{")
    with pytest.raises(PriorError, match="JSON"):
        load_prior(ldm)


def test_the_hub_is_asked_only_for_a_pinned_commit(sd3: pathlib.Path, monkeypatch) -> None:
    asked: list[tuple[str, str]] = []

    def download(name: str, *, revision: str, **rest: object) -> str:
        asked.append((name, revision))
        assert not any("text_encoder_3" in pattern for pattern in rest["allow_patterns"])  # type: ignore[attr-defined]
        return str(sd3)

    monkeypatch.setattr(engine.prior, "snapshot_download", download)
    for source, revision in (("owner/name", None), ("owner/name", "main"), ("no-such-folder", COMMIT)):
        with pytest.raises(PriorError):
            load_prior(source, revision=revision)
    assert not asked
    assert isinstance(load_prior("owner/name", revision=COMMIT), Prior)
    assert asked == [("owner/name", COMMIT)]
    with pytest.raises(PriorError, match=r"engine\.compvis"):
        load_prior(sd3 / "model_index.json")
