"""Latent diffusion checkpoints in the CompVis layout (PathLDM's), turned into diffusers folders.

The layout is one file with a flat state dict:
    model.diffusion_model.*    the U-Net: input_blocks, middle_block, output_blocks with spatial transformers
    model_ema.*                its moving average, names without dots; preferred where present
    first_stage_model.*        the autoencoder, VQ (with quantize.*) or KL
    cond_stage_model.*         the frozen CLIP text encoder, needed once for the null embedding
    betas, scale_factor        the noise schedule and the latents' scale
The build of each network is read off the shapes; only the number of attention heads cannot be, and is a setting.
"""

import json
import pathlib
import re
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel, VQModel
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import PriorError, WeightsError
from engine.prior import NULL_EMBEDDING

State = dict[str, Tensor]

RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
UNET_ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def convert_compvis(
    file: str | pathlib.Path, folder: str | pathlib.Path, *, heads: int = 1, text_tokens: int = 154
) -> pathlib.Path:
    """A CompVis checkpoint becomes a diffusers folder that `load_prior` reads.

    `heads` is the U-Net's num_heads and `text_tokens` its text length; the defaults are PathLDM's. The file is
    read with weights_only, so nothing in it is executed.
    """
    state = read_checkpoint(file)
    unet_state = _unet_part(file, state)
    stage_state = _under(state, "first_stage_model.")
    if "encoder.conv_in.weight" not in stage_state:
        raise PriorError(f"The checkpoint {file} lacks the part 'first_stage_model'.")
    unet = _filled(UNet2DConditionModel, unet_config(unet_state, heads), rename_unet(unet_state), "unet", file)
    scale = float(state["scale_factor"]) if "scale_factor" in state else 1.0
    kind: Any = VQModel if "quantize.embedding.weight" in stage_state else AutoencoderKL
    config = first_stage_config(stage_state, scale)
    stage = _filled(kind, config, rename_first_stage(stage_state), "first_stage_model", file)
    scheduler: Any = DDIMScheduler(**schedule_config(state))

    home = pathlib.Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    unet.save_pretrained(home / "unet")
    stage.save_pretrained(home / "vae")
    scheduler.save_pretrained(home / "scheduler")
    width = int(unet.config.cross_attention_dim)
    embedding = null_embedding(_under(state, "cond_stage_model.transformer.text_model."), text_tokens)
    if embedding is not None and embedding.shape[2] == width:
        save_file({"null_embedding": embedding}, home / NULL_EMBEDDING)
    index = {
        "_class_name": "DiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", kind.__name__],
        "scheduler": ["diffusers", "DDIMScheduler"],
    }
    # Written last: a folder without it is no prior, so a conversion that was cut short cannot be mistaken for one.
    (home / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return home


def read_checkpoint(file: str | pathlib.Path) -> State:
    """The flat state dict of a checkpoint file, read without executing anything in it."""
    if not pathlib.Path(file).is_file():
        raise WeightsError(f"The checkpoint {file} is missing.")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise WeightsError(
            f"The checkpoint {file} cannot be read as plain tensors ({str(error)[:120]}). It is damaged, or holds "
            "Python objects: save its 'state_dict' alone."
        ) from None
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise WeightsError(f"The checkpoint {file} holds no state dict.")
    return {name: value.float() for name, value in state.items() if isinstance(value, Tensor)}


def unet_config(state: State, heads: int) -> dict[str, Any]:
    """The config of the UNet2DConditionModel that a CompVis U-Net amounts to."""
    levels: list[tuple[int, bool]] = [(0, False)]
    layers = [0]
    number = 1
    while f"input_blocks.{number}.0.op.weight" in state or f"input_blocks.{number}.0.in_layers.0.weight" in state:
        if f"input_blocks.{number}.0.op.weight" in state:
            levels.append((0, False))
            layers.append(0)
        else:
            channels = state[f"input_blocks.{number}.0.out_layers.3.weight"].shape[0]
            if f"input_blocks.{number}.1.qkv.weight" in state:
                raise PriorError("The U-Net has attention without text; only spatial transformers are supported.")
            levels[-1] = (channels, f"input_blocks.{number}.1.proj_in.weight" in state)
            layers[-1] += 1
        number += 1
    if len(set(layers)) != 1 or not layers[0] or "middle_block.1.proj_in.weight" not in state:
        raise PriorError("The U-Net is not of the latent diffusion build with spatial transformers.")
    middle = "middle_block.1."
    blocks = {name.split(".")[3] for name in state if name.startswith(f"{middle}transformer_blocks.")}
    return {
        "in_channels": state["input_blocks.0.0.weight"].shape[1],
        "out_channels": state["out.2.weight"].shape[0],
        "block_out_channels": [channels for channels, _ in levels],
        "layers_per_block": layers[0],
        "down_block_types": ["CrossAttnDownBlock2D" if text else "DownBlock2D" for _, text in levels],
        "up_block_types": ["CrossAttnUpBlock2D" if text else "UpBlock2D" for _, text in reversed(levels)],
        "cross_attention_dim": state[f"{middle}transformer_blocks.0.attn2.to_k.weight"].shape[1],
        "transformer_layers_per_block": len(blocks),
        "use_linear_projection": state[f"{middle}proj_in.weight"].ndim == 2,
        # diffusers reads this setting as the number of heads in U-Nets of this age.
        "attention_head_dim": heads,
        "sample_size": 64,
    }


def rename_unet(state: State) -> State:
    """The U-Net's weights under diffusers' names; spatial transformers are named alike in both."""
    layers = _layers_per_level(state)
    renamed: State = {}
    for name, tensor in state.items():
        end = next((old for old in UNET_ENDS if name.startswith(f"{old}.")), None)
        if end is not None:
            renamed[UNET_ENDS[end] + name[len(end) :]] = tensor
            continue
        match = re.match(r"(input_blocks|middle_block|output_blocks)\.(\d+)\.(?:(\d+)\.)?(.*)", name)
        if match is None:
            continue
        side, number, part, rest = match[1], int(match[2]), match[3], match[4]
        if side == "middle_block":
            place = ("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1")[number]
            renamed[f"{place}.{_resnet(rest) if number != 1 else rest}"] = tensor
            continue
        if side == "input_blocks":
            level, layer = divmod(number - 1, layers + 1)
            block = f"down_blocks.{level}"
        else:
            level, layer = divmod(number, layers + 1)
            block = f"up_blocks.{level}"
        if rest.startswith("op."):
            renamed[f"{block}.downsamplers.0.conv.{rest[3:]}"] = tensor
        elif part == "0":
            renamed[f"{block}.resnets.{layer}.{_resnet(rest)}"] = tensor
        elif rest.startswith("conv."):
            renamed[f"{block}.upsamplers.0.{rest}"] = tensor
        else:
            renamed[f"{block}.attentions.{layer}.{rest}"] = tensor
    return renamed


def first_stage_config(state: State, scale: float) -> dict[str, Any]:
    """The config of the VQModel or AutoencoderKL that a CompVis first stage amounts to."""
    levels = 1 + max(int(m[1]) for m in (re.match(r"encoder\.down\.(\d+)\.", name) for name in state) if m)
    if any(re.match(r"encoder\.down\.\d+\.attn\.", name) for name in state):
        raise PriorError("The first stage has attention outside its middle; such autoencoders are not supported.")
    layers = 1 + max(int(m[1]) for m in (re.match(r"encoder\.down\.0\.block\.(\d+)\.", name) for name in state) if m)
    channels = [state[f"encoder.down.{level}.block.0.conv2.weight"].shape[0] for level in range(levels)]
    config: dict[str, Any] = {
        "in_channels": state["encoder.conv_in.weight"].shape[1],
        "out_channels": state["decoder.conv_out.weight"].shape[0],
        "block_out_channels": channels,
        "layers_per_block": layers,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "latent_channels": state["decoder.conv_in.weight"].shape[1],
        "sample_size": 64 * 2 ** (levels - 1),
        "scaling_factor": scale,
    }
    if "quantize.embedding.weight" in state:
        config["num_vq_embeddings"], config["vq_embed_dim"] = state["quantize.embedding.weight"].shape
    return config


def rename_first_stage(state: State) -> State:
    """The first stage's weights under diffusers' names; discriminator and loss weights are left out."""
    levels = 1 + max(int(m[1]) for m in (re.match(r"decoder\.up\.(\d+)\.", name) for name in state) if m)
    renamed: State = {}
    for name, tensor in state.items():
        if not name.startswith(("encoder.", "decoder.", "quantize.", "quant_conv.", "post_quant_conv.")):
            continue
        new = name.replace("nin_shortcut", "conv_shortcut").replace(".norm_out.", ".conv_norm_out.")
        new = re.sub(r"\.mid\.block_([12])\.", lambda m: f".mid_block.resnets.{int(m[1]) - 1}.", new)
        new = re.sub(
            r"\.mid\.attn_1\.(norm|q|k|v|proj_out)\.", lambda m: f".mid_block.attentions.0.{ATTENTION[m[1]]}.", new
        )
        new = re.sub(r"encoder\.down\.(\d+)\.block\.", r"encoder.down_blocks.\1.resnets.", new)
        new = re.sub(r"encoder\.down\.(\d+)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0.", new)
        # CompVis numbers the decoder's levels from the finest, diffusers from the coarsest.
        new = re.sub(
            r"decoder\.up\.(\d+)\.(block|upsample)\.",
            lambda m: f"decoder.up_blocks.{levels - 1 - int(m[1])}.{'resnets' if m[2] == 'block' else 'upsamplers.0'}.",
            new,
        )
        if ".attentions.0.to_" in new and tensor.ndim == 4:
            tensor = tensor[:, :, 0, 0]  # 1x1 convolutions there, linear layers here
        renamed[new] = tensor
    return renamed


def schedule_config(state: State) -> dict[str, Any]:
    """The checkpoint's own noise schedule, walked as CompVis' DDIM sampler does."""
    config: dict[str, Any] = {
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "prediction_type": "epsilon",
    }
    if "betas" in state:
        betas = state["betas"].double().tolist()
        return {**config, "num_train_timesteps": len(betas), "trained_betas": betas}
    # What CompVis calls linear is linear in the square root.
    return {
        **config,
        "num_train_timesteps": 1000,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.0015,
        "beta_end": 0.0195,
    }


def null_embedding(state: State, length: int) -> Tensor | None:
    """The empty prompt [1, length, D] through the checkpoint's own CLIP text encoder; None if it has none.

    PathLDM feeds more tokens than CLIP has positions: each further chunk restarts the positions, the causal mask runs
    over the whole sequence, and padding is masked. The empty prompt is a start and an end token, then padding by end
    tokens.
    """
    words, places = state.get("embeddings.token_embedding.weight"), state.get("embeddings.position_embedding.weight")
    if words is None or places is None:
        return None
    start, end = len(words) - 2, len(words) - 1
    ids = torch.full((length,), end)
    ids[0] = start
    x = words[ids] + places[torch.arange(length) % len(places)]
    width = x.shape[1]
    heads = max(width // 64, 1)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    allowed[:, 2:] = False
    number = 0
    while f"encoder.layers.{number}.layer_norm1.weight" in state:
        layer = f"encoder.layers.{number}."
        h = _norm(state, f"{layer}layer_norm1", x)
        q, k, v = (
            _linear(state, f"{layer}self_attn.{part}_proj", h).reshape(length, heads, -1).transpose(0, 1)
            for part in "qkv"
        )
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(0, 1).reshape(length, width)
        x = x + _linear(state, f"{layer}self_attn.out_proj", h)
        h = _linear(state, f"{layer}mlp.fc1", _norm(state, f"{layer}layer_norm2", x))
        x = x + _linear(state, f"{layer}mlp.fc2", h * torch.sigmoid(1.702 * h))
        number += 1
    return _norm(state, "final_layer_norm", x)[None].contiguous()


def _norm(state: State, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)


def _linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _unet_part(file: str | pathlib.Path, state: State) -> State:
    """The U-Net's weights; where the checkpoint has a moving average of them, that."""
    unet = _under(state, "model.diffusion_model.")
    if "input_blocks.0.0.weight" not in unet:
        raise PriorError(f"The checkpoint {file} lacks the part 'model.diffusion_model'.")
    averages = {name: "model_ema." + f"diffusion_model.{name}".replace(".", "") for name in unet}
    return {name: state.get(averages[name], tensor) for name, tensor in unet.items()}


def _layers_per_level(state: State) -> int:
    number = 1
    while f"input_blocks.{number}.0.in_layers.0.weight" in state:
        number += 1
    return number - 1


def _resnet(rest: str) -> str:
    old = next((old for old in RESNET if rest.startswith(f"{old}.")), None)
    return rest if old is None else RESNET[old] + rest[len(old) :]


def _under(state: State, prefix: str) -> State:
    return {name[len(prefix) :]: tensor for name, tensor in state.items() if name.startswith(prefix)}


def _filled(kind: Any, config: dict[str, Any], state: State, part: str, file: str | pathlib.Path) -> Any:
    model = kind(**config)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise WeightsError(f"The part {part!r} of {file} does not fit its build: {str(error)[:300]}") from None
    return model.eval()
