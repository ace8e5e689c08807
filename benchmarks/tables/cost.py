"""The numbers of Table 3: time, memory and network calls, each run in a process of its own.

Such a process holds the prior, the classifier, the guide and a few pictures, and nothing else that could hide a peak.
All methods run in eager torch; SCE-LITE-HQ stands there a second time on the product's ONNX Runtime, which runs no
baseline.
"""

import argparse
import hashlib
import json
import statistics
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from audit.explain import runners_up
from audit.lpips import LPIPS
from benchmarks.memory import MB, peak_rss, weight_bytes
from benchmarks.tables.case import TEST_SEED, Case, once
from benchmarks.tables.figures import Figure, Figures
from benchmarks.tables.plan import SPACES, Row
from engine.methods import METHODS, AnySettings, method_named
from engine.recipe import Recipe
from engine.runtime.artifact_folder import MANIFEST
from engine.runtime.onnx_runtime import OnnxRuntime
from engine.surrogate import GUIDE, serialise
from engine.surrogate_net import SurrogateNetwork
from export.artifact import Batches, write_artifact
from export.own_process import answer_of
from worlds import WORLDS, World
from worlds.store import open_classifier, open_prior

TIMING_RUNS = 3
TIMING_BATCH = 8
"""Some methods end as soon as the student is sure, so that a picture more or less turns the cost of a few."""
GRAPHS = "graphs"
ON_ONNX = "@onnxruntime"
"""What follows a row's name where it was timed on ONNX Runtime."""


@dataclass(frozen=True)
class Timing:
    """How cost is measured: pictures in a run, and the perceptual distance."""

    batch: int
    lpips: Path | None = None
    onnx: bool = False
    """On ONNX Runtime in place of eager torch."""


@dataclass(frozen=True)
class Clock:
    """One method whose cost is measured, in a folder that holds what its processes need and what they answered."""

    case: Case
    row: Row
    settings: AnySettings
    timing: Timing

    @property
    def name(self) -> str:
        """Of the row in Table 3."""
        return self.row.name + (ON_ONNX if self.timing.onnx else "")

    @property
    def part(self) -> str:
        """Where the record lies: every batch that was ever timed keeps its own."""
        return f"table3/batch-{self.timing.batch}"

    @property
    def of(self) -> dict[str, Any]:
        """What the cost is measured of."""
        return {
            **self.case.models(self.row),
            "settings": self.settings.model_dump(mode="json"),
            "batch": self.timing.batch,
            "runs": TIMING_RUNS,
            "threads": torch.get_num_threads(),
        }

    @cached_property
    def folder(self) -> Path:
        """Made with the settings, the guide and, for ONNX Runtime, the graphs."""
        case, row, settings, timing = self.case, self.row, self.settings, self.timing
        key = hashlib.sha256(json.dumps([self.of, case.surrogates.guide.weights_hash]).encode()).hexdigest()[:16]
        folder = case.cache / case.world.name / "timings" / f"{self.name}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        settings.save(folder / "settings.json")
        (folder / "guide.safetensors").write_bytes(serialise(case.surrogates.guide.network))
        if timing.onnx and not (folder / GRAPHS / MANIFEST).is_file():
            prior, size = case.prior(row.space), (case.world.size, case.world.size)
            assert isinstance(settings, Recipe)
            batches = Batches.parse(f"1-{timing.batch}")
            write_artifact(prior, case.surrogates.guide.network, settings, folder / GRAPHS, size=size, batches=batches)
        return folder

    def loaded(self) -> dict[str, Any]:
        """What a process answers that only loads the models."""
        file, world = self.folder / "load.json", self.case.world
        answer: dict[str, Any] = once(file, lambda: spawn(world, self.row, self.folder, self.timing, load_only=True))
        return answer

    def run(self, number: int) -> dict[str, Any]:
        """What the process of one run answers; each is started once."""
        file, world = self.folder / f"run-{number}.json", self.case.world
        answer: dict[str, Any] = once(file, lambda: spawn(world, self.row, self.folder, self.timing))
        return answer

    def figures(self) -> Figures:
        """Table 3's columns: medians over the runs.

        Peak memory is that of the process less that of one which only loads the same models, plus their weights.
        """
        base, answers = self.loaded(), [self.run(number) for number in range(TIMING_RUNS)]
        seconds = [answer["seconds"] for answer in answers]
        peaks = [(max(0, answer["peak_rss"] - base["peak_rss"]) + answer["weights"]) / MB for answer in answers]
        return {
            "seconds_per_sample": Figure(statistics.median(seconds), min(seconds), max(seconds), len(seconds)),
            "peak_mb": Figure(statistics.median(peaks), min(peaks), max(peaks), len(peaks)),
            "network_calls": Figure(statistics.median(a["network_calls"] for a in answers), n=len(answers)),
        }


def spawn(world: World, row: Row, folder: Path, timing: Timing, load_only: bool = False) -> Any:
    """What a fresh process measures with the settings and the guide of a folder."""
    options = ["--lpips", timing.lpips] if timing.lpips else []
    options += ["--onnx"] if timing.onnx else []
    options += ["--load-only"] if load_only else []
    return answer_of(row.name, "benchmarks.tables.cost", world.name, row.name, folder, timing.batch, *options)


def main(argv: list[str] | None = None) -> int:
    """Prints what this process sees of a method: seconds and network calls per sample for one counterfactual, peak."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables.cost", description=__doc__)
    parser.add_argument("world", choices=list(WORLDS))
    parser.add_argument("row")
    parser.add_argument("folder", type=Path)
    parser.add_argument("pictures", type=int)
    parser.add_argument("--lpips", type=Path)
    parser.add_argument("--onnx", action="store_true", help="run the graphs in the folder on ONNX Runtime")
    parser.add_argument("--load-only", action="store_true")
    arguments = parser.parse_args(argv)
    world, row = WORLDS[arguments.world], Row.of(arguments.row)
    prior, classifier = open_prior(world, part=SPACES[row.space]), open_classifier(world, "student")
    guide = SurrogateNetwork(len(classifier.labels), GUIDE.network).eval().requires_grad_(False)
    guide.load_state_dict(load_file(arguments.folder / "guide.safetensors"))
    perceptual = LPIPS.load(arguments.lpips) if arguments.lpips else None
    settings = method_named(row.method).load(arguments.folder / "settings.json").changed(k=1)
    x, n = world.sample(arguments.pictures, TEST_SEED).images, arguments.pictures
    targets = runners_up(classifier.probabilities(x))[1].tolist()
    with torch.no_grad():  # libraries set themselves up at the first call
        prior.predict(prior.encode(x[:1]), prior.path(2, 0.5, world.size, world.size).timesteps[0])
    answer = {"seconds": 0.0, "network_calls": 0.0}
    if not arguments.load_only:
        options: dict[str, Any] = {"perceptual": perceptual}
        if arguments.onnx:
            assert isinstance(settings, Recipe)
            options["runtime"] = OnnxRuntime(arguments.folder / GRAPHS, prior, guide, settings)
        start = time.perf_counter()
        found = METHODS[row.method](prior, classifier, guide, x, targets, settings, list(range(n)), **options)
        answer["seconds"] = (time.perf_counter() - start) / n
        answer["network_calls"] = sum(one.cost.network_calls for one in found) / n
    weights = weight_bytes(prior, classifier, guide)
    print(json.dumps({**answer, "peak_rss": peak_rss(), "weights": weights}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
