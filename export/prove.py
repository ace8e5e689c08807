"""python -m export.prove --prior portraits: every graph, its parity, its TensorRT-RTX builds, and the loop's speed.

    ort_over_eager         time of the guided loop on ONNX Runtime / in eager torch with one decode per step
    ort_over_two_decodes   the same / in eager torch as the reference code runs it, decoding a second time for the mask
    flips_identical        whether whole runs flip the same samples on both
    graphs                 name -> fp32_gradient_error or fp32_error, fp16_cosine: each the worst sample's
    rtx_builds             name -> precision -> true, or the error

The embedded models are found by their folders (worlds/weights/NAME/prior and student): this room knows only the
engine. Pictures are samples of the prior, and the guide is distilled on them from the student's answers.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForImageClassification
from transformers.utils import logging as transformers_logging

from engine.errors import InputError, PfungstError
from engine.guidance import Model
from engine.loop import Originals, check_targets, counterfactuals, draw_noise, query, trajectory
from engine.prior import Prior, load_prior
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.runtime.onnx_runtime import Manifest, OnnxRuntime
from engine.runtime.torch_runtime import TorchRuntime
from engine.sampling import generate
from engine.surrogate import GUIDE, distil
from export import rtx
from export.artifact import Batches, write_artifact
from export.graphs import contracts, traced
from export.parity import compare_graph, eager_runtime, fresh_inputs, second_classes

ROOT = Path(__file__).parent.parent
N_PICTURES = 384
PICTURE_SEED = 700_002
BATCH = 8


class TwoDecodes(TorchRuntime):
    """Eager torch as the reference code runs it: the mask decodes the estimate again."""

    def guidance(self, z_hat: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same values, from two decoder forwards and one backward."""
        gradient, _, logits = super().guidance(z_hat, y)
        return gradient, self.decode(z_hat), logits


class Student(nn.Module):
    """The audited classifier: a Hugging Face model with the normalisation of its own folder."""

    mean: Tensor
    std: Tensor

    def __init__(self, folder: Path) -> None:
        super().__init__()
        transformers_logging.disable_progress_bar()
        self.model: nn.Module = AutoModelForImageClassification.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
        settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        self.register_buffer("mean", torch.tensor(settings["image_mean"]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(settings["image_std"]).view(1, 3, 1, 1))
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images in [0, 1]."""
        logits: Tensor = self.model(pixel_values=(images - self.mean) / self.std).logits
        return logits


def find(name: str) -> tuple[Path, Path, Path | None]:
    """(prior, classifier, recipe) of an embedded world's name or of a prior's folder with a `student` beside it."""
    folder = ROOT / "worlds" / "weights" / name / "prior"
    recipe: Path | None = ROOT / "worlds" / "recipes" / f"{name}.json"
    if not folder.is_dir():
        folder, recipe = Path(name), None
    classifier = folder.parent / "student"
    if not folder.is_dir() or not classifier.is_dir():
        raise InputError(
            f"--prior {name} is no embedded prior, nor a prior's folder with a folder `student` beside it."
        )
    return folder, classifier, recipe


def prove(name: str, rounds: int = 5, progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Everything this module promises, as one JSON object."""
    folder, classifier, settings = find(name)
    prior, f = load_prior(folder), Student(classifier)
    recipe = Recipe() if settings is None else Recipe.load(settings)
    size = prior.image_size or 64
    progress("drawing pictures")
    pictures = generate(prior, N_PICTURES + BATCH, size, seed=PICTURE_SEED)
    x0 = pictures[:BATCH]
    progress("distilling the guide")
    guide = distil(lambda images: f(images).softmax(dim=1), pictures[BATCH:], GUIDE)
    manifests: dict[str, Manifest] = {}
    builds: dict[str, dict[str, bool | str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for precision in ("fp32", "fp16"):
            out = Path(scratch) / precision
            manifests[precision] = write_artifact(
                prior,
                guide,
                recipe,
                out,
                size=(size, size),
                batches=Batches.parse(f"1-{BATCH}"),
                precision=precision,
                classifier=f,
                pictures=x0,
                progress=lambda what, done, total, precision=precision: progress(f"{precision}: {what}"),  # type: ignore[misc]
            )
            progress(f"{precision}: TensorRT-RTX")
            built = _built(out, manifests[precision])
            for graph, outcome in built.items():
                builds.setdefault(graph, {})[precision] = outcome
        progress("timing")
        rounded = _rounded_cosine(prior, guide.network, recipe, size, manifests["fp16"].cotangent_scale)
        seconds, whole = _timed(prior, f, guide.network, recipe, x0, Path(scratch) / "fp32", rounds)
    loops = {precision: manifest.parity["loop"] for precision, manifest in manifests.items()}
    return {
        "prior": name,
        "ort_over_eager": _ratio(seconds, "onnxruntime", "eager"),
        "ort_over_two_decodes": _ratio(seconds, "onnxruntime", "two_decodes"),
        "run_over_eager": _ratio(whole, "onnxruntime", "eager"),
        "flips_identical": loops["fp32"]["flips_identical"],
        "graphs": _figures(manifests),
        "fp16_cosine_every_operator_rounded": rounded,
        "rtx_builds": builds,
        "loop": loops,
        "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
        "rounds": rounds,
        "batch": BATCH,
        "guide_agreement": asdict(guide.agreement),
        "recipe": recipe.digest,
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {package: version(package) for package in ("torch", "onnxruntime", "onnx", "diffusers")},
    }


def _rounded_cosine(prior: Prior, guide: nn.Module, recipe: Recipe, size: int, scale: float) -> float:
    """The gradient's cosine when torch runs the fp16 graph and rounds after every operator, as a GPU would.

    ONNX Runtime on the CPU computes much of an fp16 graph in float32, which flatters it.
    """
    half, full = (contracts(prior, guide, recipe, size, size, precision)["guidance"] for precision in ("fp16", "fp32"))
    return compare_graph(half, traced(half, 2), full, 2, scale, fresh_inputs(prior, 2, size, size))["gradient"].cosine


def _built(folder: Path, manifest: Manifest) -> dict[str, bool | str]:
    if not rtx.available():
        return {name: "TensorRT-RTX is not installed; pip install 'pfungst[rtx]'" for name in manifest.graphs}
    return rtx.build_all(folder, manifest.graphs)


def _figures(manifests: dict[str, Manifest]) -> dict[str, dict[str, float]]:
    """The worst output's figures of each graph; of guidance, the gradient's."""
    figures: dict[str, dict[str, float]] = {}
    for name in manifests["fp32"].graphs:
        full, half = (manifests[precision].parity["graphs"][name] for precision in ("fp32", "fp16"))
        if name == "guidance":
            figures[name] = {
                "fp32_gradient_error": full["gradient"]["error"],
                "fp16_cosine": half["gradient"]["cosine"],
            }
        else:
            figures[name] = {
                "fp32_error": max(output["error"] for output in full.values()),
                "fp16_cosine": min(output["cosine"] for output in half.values()),
            }
    return figures


def _timed(
    prior: Prior, f: Model, guide: nn.Module, recipe: Recipe, x0: Tensor, folder: Path, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of one pass of the loop without early stop, and of a whole run; runtimes take turns in every round."""
    size = (x0.shape[2], x0.shape[3])
    eager = eager_runtime(prior, f, guide, recipe, *size)
    runtimes: dict[str, Runtime] = {
        "eager": eager,
        "two_decodes": TwoDecodes(prior, eager.path, eager.source),
        "onnxruntime": OnnxRuntime(folder, prior, guide, recipe),
    }
    with torch.no_grad():
        logits = query(f, x0)
        targets = second_classes(logits)
        z0 = prior.encode(x0)
        rebuilt = prior.decode(z0).clamp(0.0, 1.0) if recipe.needs_reconstruction else None
    originals = Originals(x0, z0, check_targets(targets, logits), rebuilt)
    eps = draw_noise(range(len(x0)), 1, z0)[:, 0]
    everywhere = torch.ones_like(x0[:, :1])

    def one_pass(runtime: Runtime) -> None:
        with torch.no_grad():
            trajectory(runtime, originals, eps, everywhere, recipe, margin=None)

    def whole_run(runtime: Runtime) -> None:
        counterfactuals(prior, f, guide, x0, targets, recipe, runtime=runtime)

    return _take_turns(one_pass, runtimes, rounds), _take_turns(whole_run, runtimes, max(1, rounds // 2))


def _take_turns(work: Callable[[Runtime], None], runtimes: dict[str, Runtime], rounds: int) -> dict[str, list[float]]:
    """Seconds of `work` on each runtime, in turns after a first round that does not count."""
    seconds: dict[str, list[float]] = {kind: [] for kind in runtimes}
    for turn in range(rounds + 1):
        for kind, runtime in runtimes.items():
            start = time.perf_counter()
            work(runtime)
            if turn:
                seconds[kind].append(time.perf_counter() - start)
    return seconds


def _ratio(seconds: dict[str, list[float]], fast: str, slow: str) -> float:
    """The median over rounds of the ratio within a round, which a change of the machine's pace hardly moves."""
    return statistics.median(a / b for a, b in zip(seconds[fast], seconds[slow], strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the JSON object and writes it where asked."""
    parser = argparse.ArgumentParser(prog="python -m export.prove", description=__doc__.splitlines()[0])
    parser.add_argument("--prior", default="portraits", help="portraits, histology, or a prior's folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    args = parser.parse_args(argv)
    with tqdm(bar_format="{desc} [{elapsed}]", leave=False) as bar:

        def tell(what: str) -> None:
            bar.set_description_str(what)
            bar.refresh()

        try:
            figures = prove(args.prior, max(1, args.rounds), tell)
        except PfungstError as error:
            print("prove:", error, file=sys.stderr)
            return 2
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        partial = args.json.with_name(args.json.name + ".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
