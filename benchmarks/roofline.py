"""What a guided step of SD3-medium can cost at best on an H100: `python -m benchmarks.roofline`.

A **model**, no measurement. The operations are counted, not estimated: the published configs of the transformer and of
the autoencoder, a ResNet-18 as guide, forward and backward on tensors without content, with torch's own counter. Bytes
are those that convolutions, matrix products and attention have to read and write if everything between them is fused
into them, weights once per batch. Attention is one fused operator: its scores stay on the chip, and its backward makes
them again, one matrix product more. A step can take no less than the larger of operations over peak and bytes over
bandwidth.

    --measure           on a CUDA device: the time of a real step, and its share of that device's floor
    --export DIR        writes full-depth SD3-medium with random weights as graphs, and tells time and peak memory

Shapes: B batch, H W image size, h w = H/8 W/8 latent size.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory import peak_rss
from engine.guidance import classification_loss
from engine.memory import footprint
from engine.prior import LatentAutoencoder, Prior, SD3Network
from engine.recipe import Recipe
from engine.surrogate_net import NetworkConfig, SurrogateNetwork
from engine.writing import replacing
from export.graphs import contracts, traced, write_graph

RESULTS = Path(__file__).parent / "results"
RESOLUTIONS = (128, 256, 512, 1024)
TEXT_TOKENS = 154
STEPS = 50
UTILISATION = 0.4
"""A share of the peak that well-tuned engines reach; the floor itself is at 1."""
CLASSES = 2
SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
TRANSFORMER: dict[str, Any] = {  # stabilityai/stable-diffusion-3-medium-diffusers, transformer/config.json
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
VAE: dict[str, Any] = {  # the same, vae/config.json
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
RESNET_18 = NetworkConfig(input_size=224, widths=(64, 128, 256, 512), blocks=2)


@dataclass(frozen=True)
class Device:
    """What a GPU's data sheet says, for half precision without sparsity."""

    name: str
    flops: float
    """Per second."""
    bandwidth: float
    """Bytes per second."""


H100 = Device("H100 SXM", 989.4e12, 3.35e12)
KNOWN = {"H100": H100, "H200": Device("H200", 989.4e12, 4.8e12), "A100": Device("A100 SXM 80GB", 312e12, 2.039e12)}


@dataclass(frozen=True)
class Work:
    """One call on one sample: operations, and bytes moved for the sample and for the weights."""

    flops: int
    activation_bytes: int
    weight_bytes: int

    def seconds(self, device: Device, batch: int) -> float:
        """The floor of a call, per sample of a batch that shares the reading of the weights."""
        moved = self.activation_bytes + self.weight_bytes / batch
        return max(self.flops / device.flops, moved / device.bandwidth)


@dataclass(frozen=True)
class Row:
    """The model at one resolution; times are per sample."""

    resolution: int
    batch: int
    text_tokens: int
    network_gflop: float
    guidance_gflop: float
    network_gbyte: float
    guidance_gbyte: float
    network_floor_ms: float
    guidance_floor_ms: float
    bound_by: str
    floor_ms_at_50_steps: float
    ms_at_50_steps_and_40_percent: float
    guidance_activation_mb: float
    """What one sample holds at the peak of the gradient, unfused, in half precision."""
    guidance_activation_mb_checkpointed: float
    weights_gb: float


def sd3_medium(
    device: torch.device | str = "meta", dtype: torch.dtype = torch.float16, layers: int = 24, blocks: int = 2
) -> Prior:
    """SD3-medium by its configs; on the meta device it has shapes and no content.

    Fewer layers of the transformer, or blocks per level of the autoencoder, make a shallow one of full width.
    """
    with torch.device(device):
        transformer = SD3Transformer2DModel(**{**TRANSFORMER, "num_layers": layers})
        vae = AutoencoderKL(**{**VAE, "layers_per_block": blocks})
        tokens = torch.zeros(1, TEXT_TOKENS, TRANSFORMER["joint_attention_dim"])
        pooled = torch.zeros(1, TRANSFORMER["pooled_projection_dim"])
    prior = Prior(LatentAutoencoder(vae), SD3Network(transformer, tokens, pooled), SCHEDULER, image_size=1024)
    # Buffers made from arrays are on the CPU whatever was asked for.
    return nn.Module.to(prior, device, dtype)


def decoder_of(prior: Prior) -> nn.Module:
    """The half of the autoencoder that the gradient goes through."""
    model: Any = prior.autoencoder.model
    decoder: nn.Module = model.decoder
    return decoder


def resnet_18(device: torch.device | str = "meta", dtype: torch.dtype = torch.float16) -> SurrogateNetwork:
    """The guide: ResNet-18's widths and depth."""
    with torch.device(device):
        network = SurrogateNetwork(CLASSES, RESNET_18)
    return nn.Module.to(network, dtype).eval().requires_grad_(False)


class FusedAttention(TorchFunctionMode):
    """Attention as one operator, forward and backward; on tensors without content torch would write its scores out."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attention(*args, **(kwargs or {}))

    @staticmethod
    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **settings: Any
    ) -> Tensor:
        """Queries, keys and values [B, heads, tokens, width]; no mask, which neither model has."""
        assert attn_mask is None
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
        return out


class HeavyTraffic(TorchDispatchMode):
    """Counts the bytes that convolutions, matrix products and attention read and write, weights apart."""

    HEAVY = ("convolution", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product")

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights = weights
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").lstrip("_").partition(".")[0].removesuffix("_backward")
        if name.startswith(self.HEAVY):
            tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
            moved = {id(t): t.numel() * t.element_size() for t in tensors if self._key(t) not in self.weights}
            self.bytes += sum(moved.values())
        return out

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata


def count(run: Callable[[], object], *models: nn.Module) -> Work:
    """The work of a call through some models."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    traffic = HeavyTraffic({HeavyTraffic._key(t) for t in tensors})
    counter = FlopCounterMode(display=False)
    with counter, traffic, FusedAttention():
        run()
    return Work(counter.get_total_flops(), traffic.bytes, sum(t.numel() * t.element_size() for t in tensors))


def step_calls(prior: Prior, guide: nn.Module, resolution: int, batch: int = 1) -> tuple[Callable[[], Any], ...]:
    """(network call, guidance call) of one step, on zeros where the prior lies."""
    weight = next(prior.parameters())
    settings: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    z = torch.zeros(batch, *prior.latent_shape(resolution, resolution), **settings)
    t = torch.zeros((), device=weight.device)
    y = torch.zeros(batch, dtype=torch.long, device=weight.device)

    def network() -> Tensor:
        with torch.no_grad():
            return prior.predict(z, t)

    def guidance() -> Tensor:
        with torch.enable_grad():
            point = z.detach().requires_grad_(True)
            loss = classification_loss(guide(prior.decode(point)).float(), y).sum()
            return torch.autograd.grad(loss, point)[0]

    return network, guidance


def model_row(prior: Prior, guide: nn.Module, resolution: int, batch: int, device: Device = H100) -> Row:
    """The model at one resolution."""
    network_call, guidance_call = step_calls(prior, guide, resolution)
    network = count(network_call, prior.network)
    guidance = count(guidance_call, decoder_of(prior), guide)
    need = footprint(prior, Recipe(), (resolution, resolution))
    floors = network.seconds(device, batch), guidance.seconds(device, batch)
    compute = (network.flops + guidance.flops) / device.flops
    whole = STEPS * floors[0] + (STEPS - 1) * floors[1]  # the last step is not guided
    return Row(
        resolution=resolution,
        batch=batch,
        text_tokens=TEXT_TOKENS,
        network_gflop=network.flops / 1e9,
        guidance_gflop=guidance.flops / 1e9,
        network_gbyte=(network.activation_bytes + network.weight_bytes / batch) / 1e9,
        guidance_gbyte=(guidance.activation_bytes + guidance.weight_bytes / batch) / 1e9,
        network_floor_ms=1e3 * floors[0],
        guidance_floor_ms=1e3 * floors[1],
        bound_by="operations" if compute >= 0.5 * sum(floors) else "bandwidth",
        floor_ms_at_50_steps=1e3 * whole,
        ms_at_50_steps_and_40_percent=1e3 * whole / UTILISATION,
        guidance_activation_mb=need.guidance / 1e6,
        guidance_activation_mb_checkpointed=need.guidance_checkpointed / 1e6,
        weights_gb=sum(p.numel() * p.element_size() for m in (prior, guide) for p in m.parameters()) / 1e9,
    )


def measured(resolution: int, batch: int, rounds: int = 10) -> dict[str, Any]:
    """A real step in eager torch on a CUDA device, as a share of the device's floor; else why not."""
    if not torch.cuda.is_available():
        return {"resolution": resolution, "measured": False, "reason": "torch sees no CUDA device"}
    name = torch.cuda.get_device_name()
    device = next((known for key, known in KNOWN.items() if key in name), None)
    if device is None:
        known = ", ".join(KNOWN)
        return {"resolution": resolution, "measured": False, "reason": f"{name} is not one of {known}"}
    prior, guide = sd3_medium("cuda"), resnet_18("cuda")
    hollow = sd3_medium(), resnet_18()
    shares: dict[str, Any] = {"resolution": resolution, "measured": True, "device": name, "batch": batch}
    torch.cuda.reset_peak_memory_stats()
    calls, bare = step_calls(prior, guide, resolution, batch), step_calls(*hollow, resolution)
    models: tuple[tuple[nn.Module, ...], ...] = ((hollow[0].network,), (decoder_of(hollow[0]), hollow[1]))
    for kind, call, empty, parts in zip(("network", "guidance"), calls, bare, models, strict=True):
        floor = count(empty, *parts).seconds(device, batch)
        seconds = []
        for turn in range(rounds + 3):  # three rounds to warm up
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if turn >= 3:
                seconds.append((time.perf_counter() - start) / batch)
        shares[f"{kind}_ms"] = 1e3 * statistics.median(seconds)
        shares[f"{kind}_share"] = floor / statistics.median(seconds)
    shares["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return shares


def export_full(out: Path, resolution: int, layers: int) -> dict[str, Any]:
    """Graphs of SD3-medium with random weights; run in a process of its own, whose peak memory is told."""
    torch.manual_seed(0)
    prior, guide = filled(sd3_medium(layers=layers)), resnet_18("cpu", torch.float32)
    out.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"resolution": resolution, "layers": layers, "precision": "fp16", "graphs": {}}
    for name in ("velocity", "guidance"):
        start = time.perf_counter()
        contract = contracts(prior, guide, Recipe(), resolution, resolution, "fp16")[name]
        file = out / f"{name}.onnx"
        write_graph(contract, traced(contract, 1), file, 1)
        written = sum(f.stat().st_size for f in out.glob(f"{name}.onnx*"))
        told["graphs"][name] = {"seconds": time.perf_counter() - start, "mb": written / 1e6}
    told["parameters"] = sum(p.numel() for p in prior.parameters())
    told["peak_gb"] = peak_rss() / 1e9
    return told


def filled(prior: Prior) -> Prior:
    """A prior from the meta device with small random weights; drawing billions of normals would take minutes."""
    pattern = 0.02 * torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    for module in prior.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.is_meta:
                continue
            values = pattern.repeat(-(-tensor.numel() // len(pattern)))[: tensor.numel()].reshape(tensor.shape)
            values = values.to(tensor.dtype)
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
            else:
                module._buffers[name] = values
    return prior


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    """The rows as CSV; every line says that it is a model, and of what."""
    with replacing(file) as partial, partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["kind", "device", *(field.name for field in fields(Row))])
        for row in rows:
            cells = [f"{value:.4g}" if isinstance(value, float) else value for value in asdict(row).values()]
            writer.writerow(["model, not measured", H100.name, *cells])


def main(argv: list[str] | None = None) -> int:
    """Prints the model as a table and writes it; measures and exports only where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--resolutions", type=int, nargs="+", default=list(RESOLUTIONS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--csv", type=Path, default=RESULTS / "roofline.csv", help="default: %(default)s")
    parser.add_argument("--measure", action="store_true", help="time a real step (needs CUDA)")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the full-depth graphs here")
    parser.add_argument("--layers", type=int, default=TRANSFORMER["num_layers"], help="depth of the exported network")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(export_full(args.export, args.resolutions[0], args.layers)))
        return 0
    if args.export is not None:
        command = [sys.executable, "-m", "benchmarks.roofline", "--child", "--export", str(args.export)]
        command += ["--layers", str(args.layers), "--resolutions", str(args.resolutions[0])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout.strip())
        return done.returncode
    prior, guide = sd3_medium(), resnet_18()
    print(f"MODEL, not a measurement: SD3-medium + ResNet-18 on {H100.name}, half precision, batch {args.batch}")
    print(
        f"{'pixels':>6} {'network GFLOP':>14} {'gradient GFLOP':>15} {'network ms':>11} {'gradient ms':>12} "
        f"{'50 steps ms':>12} {'at 40 %':>9} {'activations MB':>15}"
    )
    rows = []
    for resolution in args.resolutions:
        row = model_row(prior, guide, resolution, args.batch)
        rows.append(row)
        print(
            f"{resolution:6} {row.network_gflop:14.0f} {row.guidance_gflop:15.0f} {row.network_floor_ms:11.3f} "
            f"{row.guidance_floor_ms:12.3f} {row.floor_ms_at_50_steps:12.1f} {row.ms_at_50_steps_and_40_percent:9.1f} "
            f"{row.guidance_activation_mb:15.0f}",
            flush=True,
        )
    write_csv(args.csv, rows)
    if args.measure:
        for resolution in args.resolutions:
            print(json.dumps(measured(resolution, args.batch)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
