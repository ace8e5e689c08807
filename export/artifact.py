"""A prior and its guide become a folder of proven graphs.

    OUT/encoder.onnx, decoder.onnx, velocity.onnx, surrogate.onnx, guidance.onnx   (one per batch size if fixed)
    OUT/manifest.json

Every graph is compared with eager torch before the folder gets its name; a folder that misses a threshold never does.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import InputError
from engine.guidance import Model
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime.artifact_folder import GRAPHS, GraphFile, Manifest, Source
from engine.runtime.onnx_runtime import OnnxRuntime, open_session
from export.graphs import Contract, contracts, traced, write_graph
from export.manifest import graph_file, replaced_folder, write_manifest
from export.parity import (
    Figures,
    ParityError,
    Run,
    as_dict,
    compare_graph,
    compare_loops,
    fresh_inputs,
    in_session,
    require,
)

Progress = Callable[[str, int, int], None]
"""Told (what is being done, parts done, parts in all)."""
SCALES = {"fp32": (1.0,), "fp16": (1024.0, 64.0, 1.0, 16384.0), "bf16": (1.0,)}
"""Cotangent scales to try, in this order, until the gradient is proven."""
LARGEST = 256
PARITY_BATCH = 4


@dataclass(frozen=True)
class Batches:
    """Either fixed sizes, one graph each, or one graph for every batch from 1 to the largest."""

    sizes: tuple[int, ...]
    fixed: bool

    @classmethod
    def parse(cls, text: str) -> "Batches":
        """ "1,8" are two fixed sizes, "1-8" is one graph for all of them."""
        first, dash, last = text.partition("-")
        try:
            sizes = tuple(sorted({int(part) for part in ([last] if dash else text.split(","))}))
            low = int(first) if dash else sizes[0]
        except ValueError:
            raise InputError(f"The batch {text!r} is not like 1,8 (fixed sizes) or 1-8 (any size up to 8).") from None
        if low < 1 or sizes[-1] > LARGEST or (dash and low != 1):
            raise InputError(f"The batch {text!r} has to lie between 1 and {LARGEST}; a range starts at 1.")
        return cls(sizes, not dash)


def write_artifact(
    prior: Prior,
    guide: Model,
    recipe: Recipe,
    out: Path,
    *,
    size: tuple[int, int],
    batches: Batches,
    precision: str = "fp32",
    classifier: Model | None = None,
    pictures: Tensor | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Manifest:
    """Exports, proves and writes all graphs.

    With a classifier and pictures [N, 3, H, W] the whole loop is proven too. ONNX Runtime has no bf16 on the CPU: there
    the traced graph is proven in torch, and the loop is not.
    """
    source = Source.of(prior, guide, recipe)
    wanted = contracts(prior, guide, recipe, *size, precision)
    reference = contracts(prior, guide, recipe, *size, as_is=True)
    sizes: Sequence[int | None] = batches.sizes if batches.fixed else (None,)
    total, done = len(GRAPHS) * len(sizes) + 1, 0
    graphs: dict[str, tuple[GraphFile, ...]] = {}
    figures: dict[str, Any] = {}
    scales = SCALES[precision]
    most = max(batches.sizes[-1] if batches.fixed else 0, PARITY_BATCH)
    fresh = fresh_inputs(prior, most, *size, reference["guidance"])
    with replaced_folder(out) as folder:
        for name in GRAPHS:
            files = []
            for batch in sizes:
                progress(name if batch is None else f"{name}, batch {batch}", done, total)
                file = folder / (f"{name}.onnx" if batch is None else f"{name}-{batch}.onnx")
                graph = traced(wanted[name], batch)
                write_graph(wanted[name], graph, file, batch)
                tried = scales if wanted[name].has_gradient else scales[:1]
                run = graph if precision == "bf16" else _session(wanted[name], file)
                n = batch or PARITY_BATCH
                compare = partial(compare_graph, wanted[name], run, reference[name], n, fresh=fresh.inputs)
                scale, found = prove(name, compare, precision, tried)
                if wanted[name].has_gradient:
                    scales = (scale,)  # the manifest has one: graphs of further batch sizes have to do with it
                figures[file.stem] = as_dict(found)
                files.append(
                    graph_file(wanted[name], file, fixed_batch=batches.fixed, largest_batch=batch or batches.sizes[-1])
                )
                done += 1
            graphs[name] = tuple(files)
        settings: dict[str, Any] = {
            "source": source,
            "precision": precision,
            "size": size,
            "cotangent_scale": scales[0],
            "graphs": graphs,
        }
        parity: dict[str, Any] = {"graphs": figures, "kinks_passed_over": fresh.passed_over}
        manifest = write_manifest(folder, **settings, parity=parity)
        if classifier is not None and pictures is not None and precision != "bf16":
            progress("the whole loop", done, total)
            runtime = OnnxRuntime(folder, prior, guide, recipe)
            shown = pictures[: batches.sizes[-1]]
            if tuple(shown.shape[2:]) != size:
                shown = F.interpolate(shown, size=size, mode="bilinear", antialias=True).clamp(0.0, 1.0)
            loop = compare_loops(prior, classifier, guide, recipe, shown, runtime)
            if precision == "fp32" and not loop.flips_identical:
                raise ParityError(
                    "The loop on the exported graphs flips other samples than in torch; nothing was written."
                )
            manifest = write_manifest(folder, **settings, parity={**parity, "loop": asdict(loop)})
        progress("done", total, total)
    return manifest


def _session(contract: Contract, file: Path) -> Run:
    content = str(file) if file.with_name(file.name + ".data").is_file() else file.read_bytes()
    return in_session(contract, open_session(content, threads=torch.get_num_threads()))


def prove(
    name: str, compare: Callable[..., dict[str, Figures]], precision: str, scales: Sequence[float]
) -> tuple[float, dict[str, Figures]]:
    """(cotangent scale, figures) of a written graph, or a ParityError.

    Half precision has little room: too small a scale loses small gradients to zero, too large a one overflows. The
    first scale that is good enough is taken.
    """
    for scale in scales:
        figures = compare(scale=scale)
        try:
            require(name, figures, precision)
        except ParityError:
            if scale == scales[-1]:
                raise
        else:
            break
    return scale, figures
