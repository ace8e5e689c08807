"""Peak memory of one counterfactual by resolution and setting: `python -m benchmarks.memory --json FILE`.

Each figure comes from a process of its own: the peak of its resident memory, less that of a process that only loads the
same models, plus the bytes of the weights. So it can be held against a budget, which counts weights but not Python and
its libraries. The prior is small, but built as Stable Diffusion 3 is: a transformer on the latents of an 8x
AutoencoderKL with attention in its middle. Its weights are random; memory does not depend on them.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import nn

from engine.loop import counterfactuals
from engine.memory import byte_count, footprint, plan_memory
from engine.prior import LatentAutoencoder, Prior, SD3Network
from engine.recipe import Recipe
from engine.surrogate_net import NetworkConfig, SurrogateNetwork
from engine.writing import write_text

RESOLUTIONS = (64, 128, 256, 512, 1024)
SETTINGS = ("plain", "micro_batch 1", "checkpointed", "planned")
BATCH = 2
CLASSES = 2
RECIPE = Recipe(steps=3, strength=1.0, escalation=(1.0,), margin=None)
SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
MB = 1e6


@dataclass(frozen=True)
class Measurement:
    """What one run needed."""

    resolution: int
    setting: str
    batch: int
    micro_batch: int | None
    checkpoint: bool
    planned_mb: float | None  # the plan's own estimate
    budget_mb: float
    peak_mb: float
    seconds: float
    inside: bool


def small_prior(width: int = 32, attention: bool = True) -> Prior:
    """A prior for up to 1024 pixels, built as Stable Diffusion 3: 16 latent channels at an eighth of the side."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(width, width, 2 * width, 2 * width),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=attention,
    )
    transformer = SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=8,
        pos_embed_max_size=64,
    )
    network = SD3Network(transformer, torch.zeros(1, 1, 16), torch.zeros(1, 8))
    return Prior(LatentAutoencoder(vae), network, SCHEDULER, image_size=1024)


def small_classifier(seed: int) -> nn.Module:
    """A network that resizes images to its own 64 pixels; as classifier and, from another seed, as guide."""
    torch.manual_seed(seed)
    return SurrogateNetwork(CLASSES, NetworkConfig()).eval().requires_grad_(False)


def weight_bytes(*models: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(t.numel() * t.element_size() for m in models for t in (*m.parameters(), *m.buffers()))


def child(resolution: int, setting: str, batch: int, budget: int, width: int) -> dict[str, object]:
    """What one process does: loads, and unless the setting is 'load' makes one counterfactual for each image."""
    prior, f, f_hat = small_prior(width), small_classifier(1), small_classifier(2)
    recipe, plan = RECIPE, None
    seconds = 0.0
    if setting != "load":
        x0 = torch.rand(batch, 3, resolution, resolution, generator=torch.Generator().manual_seed(0))
        if setting == "micro_batch 1":
            recipe = recipe.changed(micro_batch=1)
        elif setting == "checkpointed":
            recipe = recipe.changed(micro_batch=1, checkpoint=True)
        elif setting == "planned":
            plan = plan_memory(prior, recipe, (resolution, resolution), batch, budget, f=f, f_hat=f_hat)
            recipe = plan.apply(recipe)
        start = time.perf_counter()
        with torch.no_grad():
            targets = (1 - f(x0).argmax(1)).tolist()
        rows = plan.batch if plan else batch
        for i in range(0, batch, rows):
            counterfactuals(prior, f, f_hat, x0[i : i + rows], targets[i : i + rows], recipe)
        seconds = time.perf_counter() - start
    return {
        "peak_rss": peak_rss(),
        "weights": weight_bytes(prior, f, f_hat),
        "seconds": seconds,
        "micro_batch": recipe.micro_batch,
        "checkpoint": recipe.checkpoint,
        "planned": plan.peak if plan else None,
    }


def spawn(resolution: int, setting: str, batch: int, budget: int, width: int) -> dict[str, float]:
    """The answer of a fresh process."""
    numbers = [str(n) for n in (resolution, batch, budget, width)]
    command = [sys.executable, "-m", "benchmarks.memory", "--child", setting, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{setting} at {resolution} pixels failed: {done.stderr.strip()[-800:]}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def budget_for(resolution: int, batch: int, width: int) -> int:
    """A budget that binds: half way between the least that works and what the plain run is counted to need."""
    prior, f, f_hat = small_prior(width), small_classifier(1), small_classifier(2)
    need = footprint(prior, RECIPE, (resolution, resolution), f=f, f_hat=f_hat)
    return (need.peak(1, 1, True) + need.peak(batch, batch, False)) // 2


def measure(
    resolutions: tuple[int, ...], settings: tuple[str, ...], batch: int, budget: int | None, width: int
) -> list[Measurement]:
    """One measurement per resolution and setting, printed as they come."""
    base = spawn(resolutions[0], "load", batch, 0, width)["peak_rss"]
    print(f"{'pixels':>6}  {'setting':14} {'peak MB':>9} {'budget MB':>9} {'planned MB':>10} {'seconds':>8}  inside")
    found = []
    for resolution in resolutions:
        limit = budget or budget_for(resolution, batch, width)
        for setting in settings:
            told = spawn(resolution, setting, batch, limit, width)
            peak = told["peak_rss"] - base + told["weights"]
            planned = told["planned"] / MB if told["planned"] else None
            one = Measurement(
                resolution=resolution,
                setting=setting,
                batch=batch,
                micro_batch=int(told["micro_batch"]) if told["micro_batch"] else None,
                checkpoint=bool(told["checkpoint"]),
                planned_mb=planned,
                budget_mb=limit / MB,
                peak_mb=peak / MB,
                seconds=told["seconds"],
                inside=peak <= limit,
            )
            found.append(one)
            estimate = f"{planned:10.1f}" if planned else f"{'':>10}"
            verdict = "yes" if one.inside else "no"
            print(
                f"{resolution:6}  {setting:14} {one.peak_mb:9.1f} {one.budget_mb:9.1f} {estimate} "
                f"{one.seconds:8.2f}  {verdict}",
                flush=True,
            )
    return found


def peak_rss() -> int:
    """The largest resident size of this process in bytes.

    Not ru_maxrss: that survives execve, so a child of a large parent would report the parent's size.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024  # Linux counts kibibytes
    raise RuntimeError("/proc/self/status does not state VmHWM; this benchmark needs Linux.")


def main(argv: list[str] | None = None) -> int:
    """Measures every resolution and setting; exit code 1 if a planned run left its budget."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--resolutions", type=int, nargs="+", default=list(RESOLUTIONS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--batch", type=int, default=BATCH, help="images (default: %(default)s)")
    parser.add_argument("--width", type=int, default=32, help="channels of the decoder's last level")
    parser.add_argument("--max-memory", metavar="SIZE", help="budget, such as 800MB (default: one that binds)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        setting, *numbers = arguments.child
        resolution, batch, limit, width = map(int, numbers)
        print(json.dumps(child(resolution, setting, batch, limit, width)))
        return 0
    budget = byte_count(arguments.max_memory) if arguments.max_memory else None
    rows = measure(tuple(arguments.resolutions), tuple(arguments.settings), arguments.batch, budget, arguments.width)
    if arguments.json:
        content = {
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, CPU",
            "prior": f"SD3 build, random weights, decoder width {arguments.width}",
            "recipe": RECIPE.model_dump(mode="json"),
            "not_measured": "CUDA memory; priors of full size",
            "rows": [asdict(row) for row in rows],
        }
        write_text(arguments.json, json.dumps(content, indent=2) + "\n")
    return 0 if all(row.inside for row in rows if row.setting == "planned") else 1


if __name__ == "__main__":
    raise SystemExit(main())
