"""Counterfactuals on the disk: each is made once, and is found by its picture whatever batch it was made in.

    FOLDER/METHOD/MODELS-AND-SETTINGS/BATCH.safetensors

A batch names the pictures in it by what they were rendered from and by their seeds. So a row of all pictures goes on
from where one of a few of them ended; that an image's result does not depend on its batch mates is what makes that
right.

Shapes: images [N, 3, H, W] in [0, 1]; in a file [B, K, 3, H, W] of 8 bits, edits one bit a pixel.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from benchmarks.tables.case import Case, hash_of_causes
from benchmarks.tables.plan import Row
from engine.counterfactual import Cost, CounterfactualSet
from engine.guidance import Model
from engine.methods import METHODS, AnySettings
from engine.tries import query
from engine.writing import replacing
from worlds.world import Sample


def make_sets(
    case: Case,
    row: Row,
    settings: AnySettings,
    data: Sample,
    root: Path | None = None,
    seeds: Sequence[int] | None = None,
) -> list[CounterfactualSet]:
    """The counterfactuals of pictures by one method: read from the disk, and those it lacks made and written there.

    They lie under `root`, without one under the case's trials. Without `seeds` a picture's is its place.
    """
    folder = (case.trials if root is None else root) / case.place(row, settings)
    seeds = range(len(data.images)) if seeds is None else seeds
    names = [name_of(data, place, seed) for place, seed in enumerate(seeds)]
    images, kept = data.images, contents(folder)
    missing = [place for place, name in enumerate(names) if name not in kept]
    title = f"{case.world.name} {row.name}"
    for start in tqdm(range(0, len(missing), case.batch), desc=title, unit="batch", leave=False):
        batch = missing[start : start + case.batch]
        made = METHODS[row.method](
            case.prior(row.space),
            case.classifier,
            case.surrogates.guide,
            images[batch],
            case.targets(images[batch]),
            settings,
            [seeds[place] for place in batch],
            perceptual=case.perceptual,
        )
        write_sets(made, [names[place] for place in batch], folder)
    kept = contents(folder)
    sets = dict[int, CounterfactualSet]()
    for file in {kept[name][0] for name in names}:
        here = [place for place, name in enumerate(names) if kept[name][0] == file]
        within = [kept[names[place]][1] for place in here]
        sets |= zip(here, read_sets(file, within, case.classifier, images[here], settings), strict=True)
    return [sets[place] for place in range(len(names))]


def name_of(data: Sample, place: int, seed: int) -> str:
    """What a picture with its seed is called in a batch."""
    return f"{hash_of_causes(data.pick([place]))[:16]}-{seed}"


def contents(folder: Path) -> dict[str, tuple[Path, int]]:
    """By name: in which batch of a folder a picture's counterfactuals lie, and at which place in it."""
    found = dict[str, tuple[Path, int]]()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            names = json.loads(stored.metadata()["pictures"])
        found |= {name: (file, place) for place, name in enumerate(names)}
    return found


def write_sets(sets: Sequence[CounterfactualSet], names: Sequence[str], folder: Path) -> None:
    """A batch of counterfactual sets as one safetensors file, written under a temporary name.

    Pictures have 8 bits, as any that a person is shown, and are black where they are as they were.
    """
    edits = torch.stack([found.edit_masks for found in sets])
    images = torch.stack([found.images for found in sets]).mul(255).round().byte() * edits
    rest = [
        {
            "target": found.target,
            "seed": found.seed,
            "factors": found.factors,
            "hashes": found.hashes,
            "costs": [dataclasses.asdict(cost) for cost in found.costs],
            "setup": dataclasses.asdict(found.setup),
        }
        for found in sets
    ]
    bits = torch.from_numpy(np.packbits(edits.numpy(), axis=-1))
    said = {"pictures": json.dumps(list(names)), "sets": json.dumps(rest)}
    with replacing(folder / f"{hashlib.sha256(said['pictures'].encode()).hexdigest()[:16]}.safetensors") as partial:
        save_file({"images": images, "edits": bits}, partial, said)


def read_sets(
    file: Path, places: Sequence[int], f: Model, x0: Tensor, settings: AnySettings
) -> list[CounterfactualSet]:
    """Some counterfactual sets of a file that `write_sets` wrote; f is asked of the pictures as they are stored.

    What flips only between two grey levels has not flipped.
    """
    with safe_open(file, "pt") as stored:
        rest = json.loads(stored.metadata()["sets"])
        rounded, bits = (stored.get_tensor(name)[list(places)] for name in ("images", "edits"))
    edits = torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1, count=x0.shape[-1])).bool()
    images = torch.where(edits, rounded.to(x0.dtype) / 255, x0[:, None])
    with torch.no_grad():
        source_logits = query(f, x0)
        logits = query(f, images.flatten(0, 1)).unflatten(0, images.shape[:2])
    return [
        CounterfactualSet(
            x0=x0[b],
            source=int(source_logits[b].argmax()),
            target=one["target"],
            images=images[b],
            soft_masks=edits[b].to(x0.dtype),
            edit_masks=edits[b],
            flipped=tuple((logits[b].argmax(1) == one["target"]).tolist()),
            logits=logits[b],
            source_logits=source_logits[b],
            seed=one["seed"],
            recipe=settings,
            factors=tuple(one["factors"]),
            hashes=one["hashes"],
            costs=tuple(Cost(**cost) for cost in one["costs"]),
            setup=Cost(**one["setup"]),
        )
        for b, one in enumerate(rest[place] for place in places)
    ]
