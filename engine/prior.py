"""Generative priors: autoencoder + network + path + null conditioning, loaded from diffusers folders.

Shapes: B batch, H W image size, C latent channels, h w latent size, L null tokens, D token width.
    images   [B, 3, H, W] nominally in [0, 1]
    z        [B, C, h, w] in the units that the network was trained on
    tokens   [1, L, D], pooled [1, P]

Kinds of folder:
    SD3, SD3.5              vae + transformer + scheduler + two CLIP text encoders (T5 is never read)
    unconditional small SD3 the same without text encoders; the null conditioning is one zero token
    LDM                     vae or vqvae + unet (UNet2DConditionModel or UNet2DModel) + DDIM, DDPM or PNDM scheduler
    pixel-space DDPM        unet (UNet2DModel, 3 channels, or 3·p² for tiles of p×p pixels) + scheduler, no autoencoder
"""

import hashlib
import json
import pathlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from engine.errors import ImageError, PriorError, WeightsError
from engine.path import Diffusion, Path, RectifiedFlow

# diffusers shows its models to type checkers as empty placeholders, so models are Any here.
NULL_EMBEDDING = "null_embedding.safetensors"
TILES = {3 * side**2: side for side in (1, 2, 4, 8)}
"""Channels of a pixel-space network to the side of the tile of pixels that they are."""
DIFFUSION_SCHEDULERS = ("DDIMScheduler", "DDPMScheduler", "PNDMScheduler")


class Autoencoder(nn.Module, ABC):
    """E and D between images in [0, 1] and latents in the network's units."""

    channels: int
    factor: int

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """z0 = E(x0), without sampling."""

    @abstractmethod
    def decode(self, z: Tensor, checkpointed: bool = False) -> Tensor:
        """D(z), not clamped; `checkpointed` trades a second forward for memory in the backward pass."""


class LatentAutoencoder(Autoencoder):
    """AutoencoderKL, VQModel or AutoencoderTiny, scaled and shifted as its config says.

    All three take and give [-1, 1] in diffusers (AutoencoderTiny converts to its own [0, 1] inside). KL: the posterior
    mode. VQ: the features before quantisation, as latent diffusion models are trained on; decoding quantises with a
    straight-through gradient.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.is_kl, self.is_tiny = isinstance(model, AutoencoderKL), isinstance(model, AutoencoderTiny)
        config = model.config
        self.channels = int(getattr(config, "vq_embed_dim", None) or config.latent_channels)
        blocks = config.encoder_block_out_channels if self.is_tiny else config.block_out_channels
        self.factor = 2 ** (len(blocks) - 1)
        self.scale = float(getattr(config, "scaling_factor", None) or 1.0)
        self.shift = float(getattr(config, "shift_factor", None) or 0.0)

    def encode(self, images: Tensor) -> Tensor:
        """(mode - shift)·scale."""
        encoded = self.model.encode(2.0 * images - 1.0)
        raw = encoded.latent_dist.mode() if self.is_kl else encoded.latents
        return cast(Tensor, (raw - self.shift) * self.scale)

    def decode(self, z: Tensor, checkpointed: bool = False) -> Tensor:
        """D(z / scale + shift), from [-1, 1] to [0, 1]."""
        raw = z / self.scale + self.shift
        if not (checkpointed and torch.is_grad_enabled()):
            return cast(Tensor, (self.model.decode(raw).sample + 1.0) / 2.0)
        if self.is_tiny:
            # diffusers checkpoints a tiny decoder as one piece, which saves nothing at the peak; this cuts it in four.
            layers = self.model.decoder.layers
            return cast(
                Tensor, checkpoint_sequential(layers, min(4, len(layers)), torch.tanh(raw / 3) * 3, use_reentrant=False)
            )
        with _checkpointed_layers(self.model.decoder):
            return cast(Tensor, (self.model.decode(raw).sample + 1.0) / 2.0)


class IdentityAutoencoder(Autoencoder):
    """Pixels as latents in [-1, 1], for pixel-space diffusion models."""

    channels = 3
    factor = 1

    def encode(self, images: Tensor) -> Tensor:
        """From [0, 1] to [-1, 1]."""
        return 2.0 * images - 1.0

    def decode(self, z: Tensor, checkpointed: bool = False) -> Tensor:
        """From [-1, 1] to [0, 1]."""
        return (z + 1.0) / 2.0


class Network(nn.Module, ABC):
    """G_theta with its null conditioning: one call gives the velocity or the noise."""

    multiple: int  # sides of the latent have to be divisible by it

    @abstractmethod
    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        """The prediction at state z, told the timestep t (a tensor without dimensions)."""


class SD3Network(Network):
    """An MMDiT that is always given the null prompt."""

    tokens: Tensor
    pooled: Tensor

    def __init__(self, model: Any, tokens: Tensor, pooled: Tensor) -> None:
        super().__init__()
        self.model = model
        self.multiple = int(model.config.patch_size)
        self.largest = int(model.config.pos_embed_max_size or 0) * self.multiple
        self.register_buffer("tokens", tokens)
        self.register_buffer("pooled", pooled)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        """The velocity at z."""
        batch = z.shape[0]
        out = self.model(
            hidden_states=z,
            timestep=t.expand(batch),
            encoder_hidden_states=self.tokens.expand(batch, -1, -1),
            pooled_projections=self.pooled.expand(batch, -1),
            return_dict=False,
        )
        return cast(Tensor, out[0])


class UNetNetwork(Network):
    """A U-Net, unconditional or with cross-attention on a null embedding; it may see tiles of `fold`² as channels."""

    tokens: Tensor | None

    def __init__(self, model: Any, tokens: Tensor | None = None, fold: int = 1) -> None:
        super().__init__()
        self.model, self.fold = model, fold
        self.multiple = fold * int(2 ** (len(model.config.block_out_channels) - 1))
        self.register_buffer("tokens", tokens)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        """The noise (or v) at z; a learned variance, predicted in further channels, is dropped."""
        seen = z if self.fold == 1 else F.pixel_unshuffle(z, self.fold)
        if self.tokens is None:
            out = self.model(seen, t, return_dict=False)[0]
        else:
            out = self.model(seen, t, self.tokens.expand(z.shape[0], -1, -1), return_dict=False)[0]
        out = out[:, : seen.shape[1]]
        return cast(Tensor, out if self.fold == 1 else F.pixel_shuffle(out, self.fold))


class Prior(nn.Module):
    """A generative foundation model: autoencoder, network, path and null conditioning, frozen and in eval mode."""

    def __init__(
        self, autoencoder: Autoencoder, network: Network, scheduler: Mapping[str, Any], image_size: int | None = None
    ) -> None:
        super().__init__()
        self.autoencoder, self.network = autoencoder, network
        self.scheduler = dict(scheduler)
        self.image_size = image_size
        self.eval().requires_grad_(False)

    @property
    def multiple(self) -> int:
        """The number that both sides of an image have to be divisible by."""
        return self.autoencoder.factor * self.network.multiple

    @property
    def is_flow(self) -> bool:
        """Whether the network predicts the velocity of a rectified flow."""
        return bool(self.scheduler.get("_class_name") == "FlowMatchEulerDiscreteScheduler")

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) for an image size; an ImageError for a size the prior cannot take."""
        if height < 1 or width < 1 or height % self.multiple or width % self.multiple:
            raise ImageError(
                f"An image of {height}x{width} pixels does not fit this prior: both sides have to be divisible by "
                f"{self.multiple}. Resize it first."
            )
        h, w = height // self.autoencoder.factor, width // self.autoencoder.factor
        largest = getattr(self.network, "largest", 0)
        if largest and max(h, w) > largest:
            raise ImageError(
                f"An image of {height}x{width} pixels is too large for this prior: sides may have at most "
                f"{largest * self.autoencoder.factor} pixels. Resize it first."
            )
        return self.autoencoder.channels, h, w

    def path(self, steps: int, strength: float, height: int, width: int) -> Path:
        """The path for (steps, strength), from the model's own scheduler."""
        _, h, w = self.latent_shape(height, width)
        if self.is_flow:
            tokens = (h // self.network.multiple) * (w // self.network.multiple)
            return RectifiedFlow.from_config(self.scheduler, steps, strength, tokens)
        return Diffusion.from_config(self.scheduler, steps, strength)

    def encode(self, images: Tensor) -> Tensor:
        """z0 = E(x0): the posterior mode of images in [0, 1], scaled and shifted as the config says."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ImageError(f"Images have to be [B, 3, H, W]; these are {list(images.shape)}.")
        self.latent_shape(images.shape[2], images.shape[3])
        return self.autoencoder.encode(images)

    def decode(self, z: Tensor, checkpointed: bool = False) -> Tensor:
        """D(z): images nominally in [0, 1], not clamped."""
        return self.autoencoder.decode(z, checkpointed)

    def predict(self, z: Tensor, t: Tensor) -> Tensor:
        """The velocity (rectified flow) or the noise (diffusion) at state z and timestep t."""
        return cast(Tensor, self.network(z, t))

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over all weights, the null conditioning and the schedule."""
        return content_hash(self, self.scheduler)


def content_hash(module: nn.Module, settings: Mapping[str, Any] | None = None) -> str:
    """SHA-256 over the names, shapes, types and bytes of a module's tensors, and over `settings`."""
    digest = hashlib.sha256(json.dumps(dict(settings or {}), sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        if tensor.numel():
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def load_prior(
    source: str | pathlib.Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    cache: str | pathlib.Path | None = None,
    text_tokens: int = 154,
) -> Prior:
    """The prior in a diffusers folder, or in a hub repository at a pinned commit.

    Weights are loaded as `dtype` whatever they are stored as. `cache` is the folder for hub files and for embeddings of
    the empty prompt; without it the hub's own cache is used and embeddings are computed at each load. `text_tokens` is
    the length of SD3's null prompt: 77 CLIP tokens, then zeros in the place of T5.
    """
    folder = _folder(source, revision, cache)
    index = _read_json(folder / "model_index.json", "model_index.json")
    if (folder / "transformer").is_dir() or "transformer" in index:
        prior = _load_sd3(folder, index, dtype, cache, text_tokens)
    elif (folder / "unet").is_dir() or "unet" in index:
        prior = _load_unet(folder, index, dtype)
    else:
        raise PriorError(f"The folder {folder} is no prior: it lacks the part 'transformer' or 'unet'.")
    return prior.to(device)


def _load_sd3(
    folder: pathlib.Path,
    index: dict[str, Any],
    dtype: torch.dtype,
    cache: str | pathlib.Path | None,
    text_tokens: int,
) -> Prior:
    """SD3 or SD3.5, or a small unconditional model of the same build."""
    scheduler = _scheduler(folder, ("FlowMatchEulerDiscreteScheduler",))
    model = _load_part(folder, "transformer", (SD3Transformer2DModel,), dtype)
    autoencoder = _autoencoder(folder, "vae", dtype)
    if autoencoder.channels != model.config.in_channels:
        raise PriorError(
            f"The prior {folder} does not fit together: its vae has {autoencoder.channels} latent channels, its "
            f"transformer takes {model.config.in_channels}."
        )
    if _listed(index, "text_encoder") or _listed(index, "text_encoder_2"):
        tokens, pooled = _sd3_null_prompt(folder, int(model.config.joint_attention_dim), cache, text_tokens)
    else:
        tokens = torch.zeros(1, 1, int(model.config.joint_attention_dim))
        pooled = torch.zeros(1, int(model.config.pooled_projection_dim))
    network = SD3Network(model, tokens.to(dtype), pooled.to(dtype))
    return Prior(autoencoder, network, scheduler, int(model.config.sample_size) * autoencoder.factor)


def _load_unet(folder: pathlib.Path, index: dict[str, Any], dtype: torch.dtype) -> Prior:
    """A latent diffusion model, or a pixel-space one if it comes without an autoencoder."""
    scheduler = _scheduler(folder, DIFFUSION_SCHEDULERS)
    model = _load_part(folder, "unet", (UNet2DModel, UNet2DConditionModel), dtype)
    config = model.config
    if config.get("class_embed_type") or config.get("num_class_embeds") or config.get("addition_embed_type"):
        raise PriorError(f"The unet in {folder} needs class labels or added embeddings; such priors are not supported.")
    part = next((p for p in ("vae", "vqvae") if (folder / p).is_dir() or _listed(index, p)), None)
    fold = 1
    if part:
        autoencoder: Autoencoder = _autoencoder(folder, part, dtype)
    elif config.in_channels in TILES:
        autoencoder, fold = IdentityAutoencoder(), TILES[config.in_channels]
    else:
        raise PriorError(f"The folder {folder} lacks the part 'vae': its unet works on {config.in_channels} channels.")
    if config.out_channels not in (config.in_channels, 2 * config.in_channels):
        raise PriorError(f"The unet in {folder} predicts {config.out_channels} of {config.in_channels} channels.")
    if autoencoder.channels * fold**2 != config.in_channels:
        raise PriorError(
            f"The prior {folder} does not fit together: its {part} has {autoencoder.channels} latent channels, its "
            f"unet takes {config.in_channels}."
        )
    tokens = None
    if isinstance(model, UNet2DConditionModel):
        tokens = _unet_null_embedding(folder, index, int(config.cross_attention_dim)).to(dtype)
    size = config.sample_size[0] if isinstance(config.sample_size, list | tuple) else config.sample_size
    network = UNetNetwork(model, tokens, fold)
    return Prior(autoencoder, network, scheduler, int(size) * fold * autoencoder.factor if size else None)


def _sd3_null_prompt(
    folder: pathlib.Path, width: int, cache: str | pathlib.Path | None, text_tokens: int
) -> tuple[Tensor, Tensor]:
    """SD3's embeddings of the empty prompt without T5: (tokens [1, L, D], pooled [1, P]); the encoders are freed."""
    parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    for part in parts:
        _require(folder, part)
    stored = None
    if cache is not None:
        stored = pathlib.Path(cache) / f"null-prompt-{_files_hash(folder, parts)}.safetensors"
    if stored is not None and stored.is_file():
        known = _read_safetensors(stored)
        clip, pooled = known["clip"], known["pooled"]
    else:
        first, second = (_clip_null(folder, number, CLIPTextModelWithProjection) for number in ("", "_2"))
        clip, pooled = torch.cat([first[0], second[0]], dim=-1), torch.cat([first[1], second[1]], dim=-1)
        if stored is not None:
            stored.parent.mkdir(parents=True, exist_ok=True)
            save_file({"clip": clip, "pooled": pooled}, stored)
    tokens = torch.zeros(1, max(text_tokens, 1), width)
    length = min(clip.shape[1], tokens.shape[1])
    tokens[:, :length, : clip.shape[2]] = clip[:, :length]
    return tokens, pooled


def _unet_null_embedding(folder: pathlib.Path, index: dict[str, Any], width: int) -> Tensor:
    """The null embedding [1, L, D] of a cross-attention U-Net.

    It is the stored one if the folder has such a file, else the empty prompt through the folder's CLIP encoder, else
    one zero token, which leaves of cross-attention only its bias.
    """
    stored = folder / NULL_EMBEDDING
    if stored.is_file():
        tokens = _read_safetensors(stored).get("null_embedding")
        if tokens is None or tokens.ndim != 3 or tokens.shape[0] != 1 or tokens.shape[2] != width:
            raise WeightsError(f"The file {stored} has to hold a tensor 'null_embedding' of shape [1, L, {width}].")
        return tokens.float()
    if _listed(index, "text_encoder"):
        for part in ("tokenizer", "text_encoder"):
            _require(folder, part)
        return _clip_null(folder, "", CLIPTextModel)[0]
    if _listed(index, "bert"):
        raise PriorError(f"The text encoder 'bert' in {folder} is not supported; store {NULL_EMBEDDING} beside it.")
    return torch.zeros(1, 1, width)


def _clip_null(folder: pathlib.Path, number: str, kind: type[Any]) -> tuple[Tensor, Tensor]:
    """The empty prompt through one CLIP encoder: SD3 reads the layer before the last, latent diffusion the last."""
    file = folder / f"text_encoder{number}"
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder / f"tokenizer{number}", local_files_only=True)
        encoder = kind.from_pretrained(file, local_files_only=True, use_safetensors=True, dtype=torch.float32).eval()
    except (OSError, ValueError, SafetensorError, RuntimeError) as error:
        raise WeightsError(f"The text encoder in {file} cannot be loaded: {error}") from None
    length = encoder.config.max_position_embeddings
    ids = tokenizer("", padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    with torch.no_grad():
        out = encoder(ids, output_hidden_states=True)
    if kind is CLIPTextModel:
        return out.last_hidden_state, out.pooler_output
    return out.hidden_states[-2], out.text_embeds


def _autoencoder(folder: pathlib.Path, part: str, dtype: torch.dtype) -> LatentAutoencoder:
    return LatentAutoencoder(_load_part(folder, part, (AutoencoderKL, VQModel, AutoencoderTiny), dtype))


def _load_part(folder: pathlib.Path, part: str, kinds: tuple[type[Any], ...], dtype: torch.dtype) -> Any:
    """One model of a diffusers folder, every weight accounted for."""
    home = _require(folder, part)
    config = _read_json(home / "config.json", f"{part}/config.json")
    kind = next((k for k in kinds if k.__name__ == config.get("_class_name")), None)
    if kind is None:
        names = " or ".join(k.__name__ for k in kinds)
        raise PriorError(f"The part {part!r} of {folder} is a {config.get('_class_name')}; it has to be {names}.")
    state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in _weights(home).items()}
    # AutoencoderTiny stores settings that it does not take back, which diffusers would report at each load.
    settings = {name: value for name, value in config.items() if name in signature(kind.__init__).parameters}
    try:
        with torch.device("meta"):
            model = kind.from_config(settings)
        wanted = model.state_dict().keys()
        state = {name if name in wanted else _modern(name): tensor for name, tensor in state.items()}
        model.load_state_dict(state, strict=True, assign=True)
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            # Buffers that are not stored have to be computed, which the meta device does not do.
            model = kind.from_config(settings).to(dtype)
            model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise WeightsError(f"The weights in {home} do not fit its config.json: {str(error)[:300]}") from None
    except (TypeError, ValueError) as error:
        raise PriorError(f"The config {home / 'config.json'} cannot be used: {error}") from None
    return model.eval()


def _modern(name: str) -> str:
    """Today's name of an autoencoder's attention weights, which old folders call query, key, value and proj_attn."""
    for old, new in (("query", "to_q"), ("key", "to_k"), ("value", "to_v"), ("proj_attn", "to_out.0")):
        name = name.replace(f".{old}.", f".{new}.")
    return name


def _weights(home: pathlib.Path) -> dict[str, Tensor]:
    """All tensors of a part: one safetensors file, its fp16 variant, or the shards that an index lists."""
    stem = "diffusion_pytorch_model"
    for name in (f"{stem}.safetensors", f"{stem}.fp16.safetensors"):
        if (home / name).is_file():
            return _read_safetensors(home / name)
    for name in (f"{stem}.safetensors.index.json", f"{stem}.safetensors.index.fp16.json"):
        if (home / name).is_file():
            shards = sorted(set(_read_json(home / name, name).get("weight_map", {}).values()))
            if any(pathlib.PurePath(shard).name != shard for shard in shards):
                raise WeightsError(f"The index {home / name} points outside its folder.")
            return {key: t for shard in shards for key, t in _read_safetensors(home / shard).items()}
    raise WeightsError(f"The weight file {home / f'{stem}.safetensors'} is missing; only safetensors files are read.")


def _read_safetensors(file: pathlib.Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise WeightsError(f"The weight file {file} is missing.")
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"The weight file {file} is cut short or altered: {error}") from None


def _read_json(file: pathlib.Path, part: str) -> dict[str, Any]:
    if not file.is_file():
        raise PriorError(f"The folder {file.parent} lacks the part {part!r}.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PriorError(f"The file {file} cannot be read as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise PriorError(f"The file {file} has to hold one JSON object.")
    return content


def _scheduler(folder: pathlib.Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    _require(folder, "scheduler")
    config = _read_json(folder / "scheduler" / "scheduler_config.json", "scheduler/scheduler_config.json")
    if config.get("_class_name") not in kinds:
        raise PriorError(
            f"The scheduler in {folder} is a {config.get('_class_name')}; it has to be {' or '.join(kinds)}."
        )
    return config


def _require(folder: pathlib.Path, part: str) -> pathlib.Path:
    if not (folder / part).is_dir():
        raise PriorError(f"The prior {folder} lacks the part {part!r}.")
    return folder / part


def _listed(index: dict[str, Any], part: str) -> bool:
    """Whether model_index.json names a part; dropped parts are stored as [null, null]."""
    entry = index.get(part)
    return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None


def _files_hash(folder: pathlib.Path, parts: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in sorted(f for part in parts for f in (folder / part).rglob("*") if f.is_file()):
        digest.update(file.relative_to(folder).as_posix().encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:32]


def _folder(source: str | pathlib.Path, revision: str | None, cache: str | pathlib.Path | None) -> pathlib.Path:
    """The local folder of a source; only an explicit hub id with a 40-digit commit reaches the network."""
    folder = pathlib.Path(source)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise PriorError(f"{source} is a file. A CompVis checkpoint has to be converted first: engine.compvis.")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) or revision is None:
        raise PriorError(f"{source} is no folder. For a hub repository give its id and revision=<40-digit commit>.")
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise PriorError(f"The revision {revision!r} is not pinned; give the 40-digit commit.")
    wanted = [f"{part}/*" for part in ("vae", "vqvae", "transformer", "unet", "scheduler")]
    wanted += [f"{part}{number}/*" for part in ("tokenizer", "text_encoder") for number in ("", "_2")]
    try:
        found = snapshot_download(
            str(source),
            revision=revision,
            cache_dir=cache,
            allow_patterns=["model_index.json", NULL_EMBEDDING, *wanted],
            ignore_patterns=["*.bin", "*.msgpack", "*.onnx*"],
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise PriorError(f"The hub repository {source} at {revision} cannot be fetched: {error}") from None
    return pathlib.Path(found)


@contextmanager
def _checkpointed_layers(decoder: nn.Module) -> Iterator[None]:
    """Inside, each residual block, upsampling and attention of a decoder recomputes its activations when needed.

    diffusers checkpoints whole levels of the decoder, of which the last then holds the peak; layers of their own cost
    the same second forward pass and a third less memory.
    """
    layers = [layer for layer in decoder.modules() if isinstance(layer, ResnetBlock2D | Upsample2D | Attention)]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own shows again
