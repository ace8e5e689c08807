"""python -m export.prove --prior portraits: every graph, its parity, its TensorRT-RTX builds, and the loop's speed.

    ort_over_eager         time of the guided loop on ONNX Runtime / in eager torch with one decode per step
    ort_over_two_decodes   the same / in eager torch as the reference code runs it, decoding a second time for the mask
    memory_kept            both ratios where the C library was told to keep freed memory
    behind_the_proof       both ratios in the proof's own process, after it has distilled and exported
    flips_identical        whether whole runs flip the same samples on both
    graphs                 name -> fp32_gradient_error or fp32_error, fp16_cosine: each the worst sample's
    kinks_passed_over      fresh latents not compared, because rounding decides torch's own gradient there
    rtx_builds             name -> precision -> true, or the error

Pictures are samples of the prior, and the guide is distilled on them from the student's answers. The loop is timed in a
process of its own (export.pace).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.errors import PfungstError
from engine.runtime.artifact_folder import Manifest
from engine.writing import write_text
from export import rtx
from export.artifact import Batches, write_artifact
from export.graphs import contracts, traced
from export.pace import GRAPHS, in_own_process, pass_of, ratios, runtimes_of, take_turns
from export.parity import compare_graph, fresh_inputs
from export.subject import BATCH, Subject, find, open_subject


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
        rounded = _rounded_cosine(subject, manifests["fp16"].cotangent_scale)
        progress("timing")
        subject.save(Path(scratch))
        prior, classifier, _ = find(name)
        pace = in_own_process(prior, classifier, Path(scratch), rounds)
        here = ratios(take_turns(pass_of(subject), runtimes_of(subject, Path(scratch) / GRAPHS), rounds))
    loops = {precision: manifest.parity["loop"] for precision, manifest in manifests.items()}
    return {
        "prior": name,
        **pace,
        "behind_the_proof": here,
        "flips_identical": loops["fp32"]["flips_identical"],
        "graphs": _figures(manifests),
        "kinks_passed_over": manifests["fp32"].parity["kinks_passed_over"],
        "fp16_cosine_every_operator_rounded": rounded,
        "rtx_builds": builds,
        "loop": loops,
        "batch": len(subject.x0),
        "guide_agreement": None if subject.agreement is None else asdict(subject.agreement),
        "recipe": subject.recipe.digest,
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
