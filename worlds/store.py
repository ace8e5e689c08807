"""Where the embedded models lie, and how they are written and opened.

    worlds/weights/<world>/prior/       a diffusers folder (half precision on disk, float32 in use)
    worlds/weights/<world>/student/     Hugging Face image-classification folders
    worlds/weights/<world>/twin/
    worlds/weights/<world>/oracle/
"""

import json
import shutil
from pathlib import Path

import torch
from diffusers import ModelMixin, SchedulerMixin

from worlds.world import World

ROOT = Path(__file__).parent
WEIGHTS = ROOT / "weights"
CHECKPOINTS = ROOT / ".training"


def prior_folder(world: World) -> Path:
    return WEIGHTS / world.name / "prior"


def write_prior(folder: Path, parts: dict[str, ModelMixin], scheduler: SchedulerMixin) -> None:
    """Saves networks and scheduler as a plain diffusers folder; an older one stays until the new one is whole."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    index: dict[str, object] = {"_class_name": "DiffusionPipeline"}
    for name, network in {**parts, "scheduler": scheduler}.items():
        index[name] = ["diffusers", type(network).__name__]
        if isinstance(network, torch.nn.Module):
            network = network.to(torch.float16)
        network.save_pretrained(partial / name)
    (partial / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
