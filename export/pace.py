"""How long the guided loop takes on each runtime, in a process of its own.

What a process did before may change its pace: the C library returns eager torch's memory to the system after an
operator, to be handed back a page at a time, unless it has seen large blocks freed, as training frees them. The ratios
are those of a process that has loaded the models and nothing else. A second pair says what they are when the library
was told to keep all memory.
"""

import argparse
import ctypes
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.loop import check_targets, counterfactuals
from engine.runtime import Runtime
from engine.runtime.onnx_runtime import OnnxRuntime
from engine.runtime.torch_runtime import TorchRuntime
from engine.trajectory import Originals, draw_noise, one_pass
from engine.tries import query
from export.own_process import answer_of
from export.parity import eager_runtime, second_classes
from export.subject import Subject, reopen

GRAPHS = "fp32"
"""The folder of graphs beside a saved subject."""
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Of mallopt(3)."""
KEPT = 1 << 30


class TwoDecodes(TorchRuntime):
    """Eager torch as the reference code runs it: the mask decodes the estimate again."""

    def guidance(self, z_hat: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same values, from two decoder forwards and one backward."""
        gradient, _, logits = super().guidance(z_hat, y)
        return gradient, self.decode(z_hat), logits


def measured(subject: Subject, folder: Path, rounds: int) -> dict[str, Any]:
    """Ratios, seconds of a pass, milliseconds of a step's calls, and pages that the system handed out in a pass."""
    runtimes, work = runtimes_of(subject, folder), pass_of(subject)
    seconds, faults = take_turns(work, runtimes, rounds), {kind: faults_of(work, runtimes[kind]) for kind in runtimes}
    pair = {kind: runtimes[kind] for kind in ("eager", "onnxruntime")}
    whole = take_turns(run_of(subject), pair, max(1, rounds // 2), warm_up=0)
    step = milliseconds_of_a_step(subject, runtimes)
    kept = take_turns(work, runtimes, rounds) if keep_memory() else None
    return {
        **ratios(seconds),
        "run_over_eager": ratio(whole, "onnxruntime", "eager"),
        "memory_kept": None if kept is None else {**ratios(kept), "seconds": medians(kept)},
        "seconds": medians(seconds),
        "page_faults": faults,
        "milliseconds_of_a_step": step,
        "rounds": rounds,
        "machine": {"processor": processor(), "threads": torch.get_num_threads()},
    }


def keep_memory() -> bool:
    """Tells the C library to keep what is freed; false where it cannot be told."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    return tell is not None and bool(tell(MMAP_THRESHOLD, KEPT // 32)) and bool(tell(TRIM_THRESHOLD, KEPT))


def faults_of(work: Callable[[Runtime], None], runtime: Runtime) -> int:
    """Pages that the system had to hand out for some work."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work(runtime)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """ONNX Runtime's time over eager torch's, and over the reference loop's."""
    return {
        "ort_over_eager": ratio(seconds, "onnxruntime", "eager"),
        "ort_over_two_decodes": ratio(seconds, "onnxruntime", "two_decodes"),
    }


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """By runtime."""
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def runtimes_of(subject: Subject, folder: Path) -> dict[str, Runtime]:
    """Eager torch, the reference loop, and the graphs of a folder."""
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


def pass_of(subject: Subject) -> Callable[[Runtime], None]:
    """One pass of the loop without early stop, so that every runtime has the same work."""
    originals, eps = start_of(subject)
    everywhere = torch.ones_like(subject.x0[:, :1])

    def work(runtime: Runtime) -> None:
        with torch.no_grad():
            one_pass(runtime)(originals, eps, everywhere, subject.recipe, margin=None)

    return work


def run_of(subject: Subject) -> Callable[[Runtime], None]:
    """All counterfactuals of the recipe, with escalation, early stop and pruning."""
    targets = start_of(subject)[0].y

    def work(runtime: Runtime) -> None:
        counterfactuals(subject.prior, subject.f, subject.guide, subject.x0, targets, subject.recipe, runtime=runtime)

    return work


def milliseconds_of_a_step(subject: Subject, runtimes: dict[str, Runtime]) -> dict[str, dict[str, float]]:
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


def in_own_process(prior: Path, classifier: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """What a fresh process measures of the subject that was saved in a folder, with its graphs in `GRAPHS` there."""
    found: dict[str, Any] = answer_of("Timing the loop", "export.pace", prior, classifier, folder, "--rounds", rounds)
    return found


def main(argv: list[str] | None = None) -> int:
    """Prints what this process measures, as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m export.pace", description=__doc__.splitlines()[0])
    parser.add_argument("prior", type=Path)
    parser.add_argument("classifier", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args(argv)
    subject = reopen(arguments.prior, arguments.classifier, arguments.folder)
    print(json.dumps(measured(subject, arguments.folder / GRAPHS, arguments.rounds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
