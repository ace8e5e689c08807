"""python -m export.prove --prior portraits: every graph, its parity, its TensorRT-RTX builds, and the loop's speed.

    ort_over_eager         time of the guided loop on ONNX Runtime / in eager torch with one decode per step
    ort_over_two_decodes   the same / in eager torch as the reference code runs it, decoding a second time for the mask
    flips_identical        whether whole runs flip the same samples on both
    graphs                 name -> fp32_gradient_error or fp32_error, fp16_cosine: each the worst sample's
    kinks_passed_over      fresh latents not compared, because rounding decides torch's own gradient there
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
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForImageClassification
from transformers.utils import logging as transformers_logging

from engine.errors import InputError, PfungstError
from engine.loop import check_targets, counterfactuals
from engine.prior import Prior, load_prior
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.runtime.artifact_folder import Manifest
from engine.runtime.onnx_runtime import OnnxRuntime
from engine.runtime.torch_runtime import TorchRuntime
from engine.sampling import generate
from engine.surrogate import GUIDE, Agreement, distil
from engine.trajectory import Originals, draw_noise, one_pass
from engine.tries import query
from engine.writing import write_text
from export import rtx
from export.artifact import Batches, write_artifact
from export.graphs import contracts, traced
from export.parity import compare_graph, eager_runtime, fresh_inputs, second_classes

ROOT = Path(__file__).parent.parent
N_PICTURES = 256
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


@dataclass(frozen=True)
class Subject:
    """What is exported and timed: a prior with its recipe, a classifier, its guide, and pictures [B, 3, H, W]."""

    prior: Prior
    f: nn.Module
    guide: nn.Module
    agreement: Agreement | None
    recipe: Recipe
    x0: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """(H, W)."""
        return self.x0.shape[2], self.x0.shape[3]


def open_subject(name: str, progress: Callable[[str], None] = lambda what: None) -> Subject:
    """Loads the models of a name; pictures are samples of the prior, and the guide is distilled on some of them."""
    folder, classifier, settings = find(name)
    prior, f = load_prior(folder), Student(classifier)
    recipe = Recipe() if settings is None else Recipe.load(settings)
    progress("drawing pictures")
    pictures = generate(prior, N_PICTURES + BATCH, prior.image_size or 64, seed=PICTURE_SEED)
    progress("distilling the guide")
    guide = distil(lambda images: f(images).softmax(dim=1), pictures[BATCH:], GUIDE)
    return Subject(prior, f, guide.network, guide.agreement, recipe, pictures[:BATCH])


def prove(name: str, rounds: int = 11, progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Everything this module promises, as one JSON object."""
    subject = open_subject(name, progress)
    manifests: dict[str, Manifest] = {}
    builds: dict[str, dict[str, bool | str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for precision in ("fp32", "fp16"):
            out = Path(scratch) / precision
            manifests[precision] = write_artifact(
                subject.prior,
                subject.guide,
                subject.recipe,
                out,
                size=subject.size,
                batches=Batches.parse(f"1-{BATCH}"),
                precision=precision,
                classifier=subject.f,
                pictures=subject.x0,
                progress=lambda what, done, total, precision=precision: progress(f"{precision}: {what}"),  # type: ignore[misc]
            )
            progress(f"{precision}: TensorRT-RTX")
            for graph, outcome in _built(out, manifests[precision]).items():
                builds.setdefault(graph, {})[precision] = outcome
        progress("timing")
        rounded = _rounded_cosine(subject, manifests["fp16"].cotangent_scale)
        runtimes = _runtimes(subject, Path(scratch) / "fp32")
        seconds = take_turns(_one_pass(subject), runtimes, rounds)
        pair = {kind: runtimes[kind] for kind in ("eager", "onnxruntime")}
        whole = take_turns(_whole_run(subject), pair, max(1, rounds // 2), warm_up=0)
        step = _seconds_of_a_step(subject, runtimes)
    loops = {precision: manifest.parity["loop"] for precision, manifest in manifests.items()}
    return {
        "prior": name,
        "ort_over_eager": ratio(seconds, "onnxruntime", "eager"),
        "ort_over_two_decodes": ratio(seconds, "onnxruntime", "two_decodes"),
        "run_over_eager": ratio(whole, "onnxruntime", "eager"),
        "flips_identical": loops["fp32"]["flips_identical"],
        "graphs": _figures(manifests),
        "kinks_passed_over": manifests["fp32"].parity["kinks_passed_over"],
        "fp16_cosine_every_operator_rounded": rounded,
        "rtx_builds": builds,
        "loop": loops,
        "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
        "milliseconds_of_a_step": step,
        "rounds": rounds,
        "batch": len(subject.x0),
        "guide_agreement": None if subject.agreement is None else asdict(subject.agreement),
        "recipe": subject.recipe.digest,
        "machine": {"processor": processor(), "threads": torch.get_num_threads()},
        "versions": {package: version(package) for package in ("torch", "onnxruntime", "onnx", "diffusers")},
    }


def _rounded_cosine(subject: Subject, scale: float) -> float:
    """The gradient's cosine when torch runs the fp16 graph and rounds after every operator, as a GPU would.

    ONNX Runtime on the CPU computes much of an fp16 graph in float32, which flatters it.
    """
    models = (subject.prior, subject.guide, subject.recipe, *subject.size)
    half, full = contracts(*models, "fp16")["guidance"], contracts(*models, as_is=True)["guidance"]
    fresh = fresh_inputs(subject.prior, 2, *subject.size, full)
    return compare_graph(half, traced(half, 2), full, 2, scale, fresh.inputs)["gradient"].cosine


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


def _runtimes(subject: Subject, folder: Path) -> dict[str, Runtime]:
    eager = eager_runtime(subject.prior, subject.f, subject.guide, subject.recipe, *subject.size)
    return {
        "eager": eager,
        "two_decodes": TwoDecodes(subject.prior, eager.path, eager.source),
        "onnxruntime": OnnxRuntime(folder, subject.prior, subject.guide, subject.recipe),
    }


def start_of(subject: Subject) -> tuple[Originals, Tensor]:
    """(originals, eps) of a pass over the subject's pictures, each towards its second class."""
    x0, recipe = subject.x0, subject.recipe
    with torch.no_grad():
        logits = query(subject.f, x0)
        z0 = subject.prior.encode(x0)
        rebuilt = subject.prior.decode(z0).clamp(0.0, 1.0) if recipe.needs_reconstruction else None
    originals = Originals(x0, z0, check_targets(second_classes(logits), logits), rebuilt)
    return originals, draw_noise(range(len(x0)), 1, z0)[:, 0]


def _one_pass(subject: Subject) -> Callable[[Runtime], None]:
    """One pass of the loop without early stop, so that every runtime has the same work."""
    originals, eps = start_of(subject)
    everywhere = torch.ones_like(subject.x0[:, :1])

    def work(runtime: Runtime) -> None:
        with torch.no_grad():
            one_pass(runtime)(originals, eps, everywhere, subject.recipe, margin=None)

    return work


def _whole_run(subject: Subject) -> Callable[[Runtime], None]:
    """All counterfactuals of the recipe, with escalation, early stop and pruning."""
    targets = start_of(subject)[0].y

    def work(runtime: Runtime) -> None:
        counterfactuals(subject.prior, subject.f, subject.guide, subject.x0, targets, subject.recipe, runtime=runtime)

    return work


def _seconds_of_a_step(subject: Subject, runtimes: dict[str, Runtime]) -> dict[str, dict[str, float]]:
    """Milliseconds of a step's two calls on each runtime; what a pass takes beyond them is the same for all."""
    originals, eps = start_of(subject)

    def velocity(runtime: Runtime) -> None:
        runtime.velocity(eps, 0)

    def guidance(runtime: Runtime) -> None:
        runtime.guidance(originals.z0, originals.y)

    return {
        kind: {
            "velocity": 1e3 * statistics.median(take_turns(velocity, {kind: runtime}, 9)[kind]),
            "guidance": 1e3 * statistics.median(take_turns(guidance, {kind: runtime}, 9)[kind]),
        }
        for kind, runtime in runtimes.items()
    }


def take_turns(
    work: Callable[[Runtime], None], runtimes: dict[str, Runtime], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of `work` on each runtime, in turns; rounds to warm up do not count."""
    seconds: dict[str, list[float]] = {kind: [] for kind in runtimes}
    for turn in range(rounds + warm_up):
        for kind, runtime in runtimes.items():
            start = time.perf_counter()
            work(runtime)
            if turn >= warm_up:
                seconds[kind].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], fast: str, slow: str) -> float:
    """The median over rounds of the ratio within a round, which a change of the machine's pace hardly moves."""
    return statistics.median(a / b for a, b in zip(seconds[fast], seconds[slow], strict=True))


def processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the JSON object and writes it where asked."""
    parser = argparse.ArgumentParser(prog="python -m export.prove", description=__doc__.splitlines()[0])
    parser.add_argument("--prior", default="portraits", help="portraits, histology, or a prior's folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds (default: 11)")
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
        write_text(args.json, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
