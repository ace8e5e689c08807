"""TensorRT takes every graph: TensorRT-RTX parses and builds them on the CPU, strongly typed, for three GPUs."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel

from engine.errors import InputError
from engine.prior import LatentAutoencoder, Prior, SD3Network, load_prior
from engine.recipe import Recipe
from engine.surrogate_net import NetworkConfig, SurrogateNetwork
from export import rtx
from export.graphs import contracts, traced, write_graph
from worlds import WORLDS
from worlds.store import WEIGHTS

pytestmark = [
    pytest.mark.rtx,
    pytest.mark.skipif(not rtx.available(), reason="TensorRT-RTX is not installed (extra `rtx`)"),
]
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}


def guide(**settings: object) -> SurrogateNetwork:
    torch.manual_seed(0)
    return SurrogateNetwork(2, NetworkConfig(**settings)).eval().requires_grad_(False)


@pytest.mark.proof
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("world", WORLDS)
def test_every_graph_of_the_embedded_priors_builds(world: str, precision: str, tmp_path: Path) -> None:
    prior = load_prior(WEIGHTS / world / "prior")
    for name, contract in contracts(prior, guide(), Recipe(), 64, 64, precision).items():
        file = tmp_path / f"{name}.onnx"
        write_graph(contract, traced(contract, None), file, None)
        for capability in rtx.CAPABILITIES:
            built = rtx.build(file, None, capability)
            assert built.error is None and built.bytes > 0, (name, built)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["velocity", "guidance"])
def test_a_full_width_shallow_sd3_builds_at_128_pixels(name: str, tmp_path: Path) -> None:
    """SD3-medium's widths with a ResNet-18 guide; depth repeats what is built here."""
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        num_layers=2,  # the last layer is of another build than those before it
        num_attention_heads=24,
        caption_projection_dim=1536,
        joint_attention_dim=4096,
        pooled_projection_dim=2048,
        pos_embed_max_size=192,
    )
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )
    config = transformer.config
    tokens, pooled = torch.zeros(1, 154, config.joint_attention_dim), torch.zeros(1, config.pooled_projection_dim)
    prior = Prior(LatentAutoencoder(vae), SD3Network(transformer, tokens, pooled), FLOW)
    contract = contracts(prior, guide(input_size=128, widths=(64, 128, 256, 512)), Recipe(), 128, 128, "fp16")[name]
    file = tmp_path / f"{name}.onnx"
    write_graph(contract, traced(contract, 1), file, 1)
    built = rtx.build(file, None, "SM89")
    assert built.error is None and built.bytes > 0, built


def test_a_file_that_is_no_graph_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    assert rtx.build(tmp_path / "broken.onnx", None, "SM89").error
    with pytest.raises(InputError, match="SM90"):
        rtx.build(tmp_path / "broken.onnx", None, "SM90")
