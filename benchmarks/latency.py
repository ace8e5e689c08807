"""How long a counterfactual takes, trick by trick: `python -m benchmarks.latency --prior portraits`.

A cumulative waterfall: each row keeps what the rows before it have. Beside the time stand the peak memory, the cosine
of the guidance gradient with eager float32 (of the worst sample) and the flip rate, so that no row can be fast by being
wrong. A row that cannot run here says why. Rows take turns in every round, figures are medians over rounds, and ratios
are medians of ratios within a round: a machine that changes its pace hardly moves them.

    two decodes     eager torch as the reference code runs it: the mask decodes the estimate a second time
    one decode      the decode made for the gradient serves the mask too
    channels last   weights laid out by channels
    onnx runtime    exported graphs, gradient included
    early stop      samples that have flipped with margin leave the gradient's batch
    half precision  the same graphs in fp16
    tensorrt        engines built from those graphs
    cuda graph      whole passes captured and replayed

Peak memory is that of a process of its own for each row, less one that only loads the libraries and the models. Then
the growth of the cost with batch, steps and resolution, as a table and as a plot.

Shapes: B batch, H W image size.
"""

import argparse
import copy
import csv
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.memory import peak_rss, small_classifier, small_prior
from engine.errors import PfungstError
from engine.guidance import gradient_source
from engine.loop import counterfactuals
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.runtime.cuda_graph import CudaGraphRuntime
from engine.runtime.onnx_runtime import OnnxRuntime, open_session
from engine.runtime.tensorrt_runtime import TensorRtRuntime
from engine.runtime.torch_runtime import TorchRuntime
from engine.tries import query
from engine.writing import replacing, write_text
from export.artifact import Batches, write_artifact
from export.graphs import contracts, traced, write_graph
from export.pace import TwoDecodes, processor, ratio
from export.parity import Figures, fresh_inputs, in_session, second_classes
from export.subject import BATCH, Subject, find, open_subject, reopen

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 2, 4, 8, 16)
STEPS = (5, 10, 20, 40)
RESOLUTIONS = (64, 128, 256, 512, 1024)
COLOURS = ("#8a5a00", "#274d77")


@dataclass(frozen=True)
class Trick:
    """One row before it is measured."""

    name: str
    adds: str
    early_stop: bool
    make: Callable[[Subject, Recipe, Path], Runtime]
    """The runtime for a subject, a recipe and the folder that holds the exported folders."""


@dataclass
class Row:
    """One row of the waterfall."""

    row: str
    adds: str
    runs_here: bool
    reason: str = ""
    seconds_per_counterfactual: float | None = None
    over_two_decodes: float | None = None
    over_one_decode: float | None = None
    over_row_before: float | None = None
    peak_mb: float | None = None
    gradient_cosine: float | None = None
    flip_rate: float | None = None
    n: int = 0
    rounds: int = 0
    prior: str = ""
    recipe: str = ""
    device: str = ""
    machine: str = ""
    versions: str = ""
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())


@dataclass(frozen=True)
class Point:
    """The cost at one size: seconds of one step of one sample."""

    axis: str
    value: int
    runtime: str
    seconds: float
    prior: str


def device_name() -> str:
    """Where torch and the CUDA runtimes would run."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _copies(subject: Subject, device: torch.device) -> tuple[Prior, nn.Module, nn.Module]:
    prior, f, guide = (copy.deepcopy(model) for model in (subject.prior, subject.f, subject.guide))
    assert isinstance(prior, Prior)
    return prior.to(device), f.to(device), guide.to(device)


def _eager(
    subject: Subject, recipe: Recipe, kind: type[TorchRuntime] = TorchRuntime, channels_last: bool = False
) -> TorchRuntime:
    # A layout stays with the prior, and a device too: every row has its own copy.
    prior, f, guide = _copies(subject, _device())
    path = prior.path(recipe.steps, recipe.strength, *subject.size).to(_device())
    return kind(prior, path, gradient_source(recipe, f, guide), channels_last=channels_last)


def _onnx(subject: Subject, recipe: Recipe, folder: Path) -> Runtime:
    provider = "cuda" if torch.cuda.is_available() else "cpu"
    return OnnxRuntime(folder, subject.prior, subject.guide, recipe, provider=provider)


def _tensorrt(subject: Subject, recipe: Recipe, folders: Path) -> TensorRtRuntime:
    return TensorRtRuntime(folders / "fp16", subject.prior, subject.guide, recipe)


TRICKS = (
    Trick("two decodes", "the reference loop in eager torch", False, lambda s, r, d: _eager(s, r, TwoDecodes)),
    Trick("one decode", "the gradient's decode serves the mask", False, lambda s, r, d: _eager(s, r)),
    Trick("channels last", "memory layout", False, lambda s, r, d: _eager(s, r, channels_last=True)),
    Trick("onnx runtime", "exported graphs", False, lambda s, r, d: _onnx(s, r, d / "fp32")),
    Trick("early stop", "early stop and compaction", True, lambda s, r, d: _onnx(s, r, d / "fp32")),
    Trick("half precision", "fp16 graphs", True, lambda s, r, d: _onnx(s, r, d / "fp16")),
    Trick("tensorrt", "engines from the graphs", True, _tensorrt),
    Trick(
        "cuda graph", "captured passes", True, lambda s, r, d: CudaGraphRuntime(_tensorrt(s, r, d), r, device="cuda")
    ),
)
NAMES = tuple(trick.name for trick in TRICKS)


def one_pass(recipe: Recipe, early_stop: bool) -> Recipe:
    """One counterfactual by one pass of Algorithm 1: no escalation and nothing after it, for every row alike."""
    margin = (recipe.margin or 0.0) if early_stop else None
    return recipe.changed(
        k=1, escalation=(1.0,), prune=False, second_pass=False, redraw=0, harmonise=(), margin=margin, micro_batch=None
    )


def flips(subject: Subject, recipe: Recipe, runtime: Runtime) -> float:
    """Makes one counterfactual per picture; the share that flipped."""
    with torch.no_grad():
        targets = second_classes(query(subject.f, subject.x0))
    seeds = list(range(len(subject.x0)))
    found = counterfactuals(
        subject.prior, subject.f, subject.guide, subject.x0, targets, recipe, seeds, runtime=runtime
    )
    return sum(one.flipped[0] for one in found) / len(found)


def placed(subject: Subject) -> Subject:
    """The subject on the GPU, if there is one; models are copied, the subject stays where it is."""
    if not torch.cuda.is_available():
        return subject
    prior, f, guide = _copies(subject, torch.device("cuda"))
    return Subject(prior, f, guide, subject.agreement, subject.recipe, subject.x0.to("cuda"))


def cosine(subject: Subject, runtime: Runtime) -> float:
    """Of the worst sample's gradient with eager float32 on the CPU, at latents that the prior has walked to."""
    z = fresh_inputs(subject.prior, len(subject.x0), *subject.size).inputs["z_hat"]
    y = torch.arange(len(z)) % 2
    source = gradient_source(subject.recipe, subject.f, subject.guide)
    reference = TorchRuntime(subject.prior, subject.prior.path(2, 1.0, *subject.size), source)
    found = runtime.guidance(z.to(_device()), y.to(_device()))[0]
    return Figures.of(found.cpu(), reference.guidance(z, y)[0]).cosine


def waterfall(
    subject: Subject, name: str, folders: Path, rounds: int, tell: Callable[[str], None], memory: bool = True
) -> list[Row]:
    """All rows, measured in turns."""
    rows = {trick.name: Row(trick.name, trick.adds, True) for trick in TRICKS}
    runtimes: dict[str, Runtime] = {}
    for trick in TRICKS:
        try:
            runtimes[trick.name] = trick.make(subject, one_pass(subject.recipe, trick.early_stop), folders)
        except (PfungstError, RuntimeError) as error:
            rows[trick.name].runs_here = False
            rows[trick.name].reason = str(error).splitlines()[0]
    recipes = {trick.name: one_pass(subject.recipe, trick.early_stop) for trick in TRICKS}
    here = placed(subject)
    seconds: dict[str, list[float]] = {kind: [] for kind in runtimes}
    for turn in range(rounds + 1):  # the first round does not count
        for kind, runtime in runtimes.items():
            tell(f"round {turn} of {rounds}: {kind}")
            synchronise()
            start = time.perf_counter()
            share = flips(here, recipes[kind], runtime)
            synchronise()
            if turn:
                seconds[kind].append((time.perf_counter() - start) / len(subject.x0))
            rows[kind].flip_rate = share
    before = None
    for kind, runtime in runtimes.items():
        row = rows[kind]
        row.seconds_per_counterfactual = statistics.median(seconds[kind])
        row.over_two_decodes = ratio(seconds, kind, "two decodes")
        row.over_one_decode = ratio(seconds, kind, "one decode")
        row.over_row_before = None if before is None else ratio(seconds, kind, before)
        row.gradient_cosine = cosine(subject, runtime)
        row.n, row.rounds = len(subject.x0), rounds
        before = kind
    if memory:
        base = spawn("load", name, folders)
        for kind in runtimes:
            tell(f"memory: {kind}")
            rows[kind].peak_mb = (spawn(kind, name, folders) - base) / 1e6
    for row in rows.values():
        row.prior, row.recipe = name, subject.recipe.digest[:12]
        row.device, row.machine, row.versions = device_name(), machine(), versions()
    return list(rows.values())


def synchronise() -> None:
    """Waits for the device, so that the clock sees its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> str:
    """The processor and its threads."""
    return f"{processor()}, {torch.get_num_threads()} threads, {platform.system()}"


def versions() -> str:
    """Of what the figures depend on."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "onnxruntime", "diffusers"))


def child(kind: str, name: str, folders: Path) -> int:
    """What a process of its own needs at its peak, in bytes, to load the models and run one row."""
    prior, classifier, _ = find(name)
    subject = reopen(prior, classifier, folders)
    import_module("onnxruntime")  # in every row: its code is no part of what a loop needs
    if kind != "load":
        trick = TRICKS[NAMES.index(kind)]
        settings = one_pass(subject.recipe, trick.early_stop)
        flips(placed(subject), settings, trick.make(subject, settings, folders))
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free  # allocators keep what they once took
    return peak_rss()


def spawn(kind: str, name: str, folders: Path) -> int:
    """The answer of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.latency", "--prior", name, "--child", kind, str(folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} failed in a process of its own: {done.stderr.strip()[-800:]}")
    return int(done.stdout.split()[-1])


def write_folders(subject: Subject, folders: Path, largest: int) -> None:
    """Exported graphs in both precisions, and what a child process needs to do the same work."""
    for precision in ("fp32", "fp16"):
        write_artifact(
            subject.prior,
            subject.guide,
            subject.recipe,
            folders / precision,
            size=subject.size,
            batches=Batches.parse(f"1-{largest}"),
            precision=precision,
        )
    subject.save(folders)


def growth(
    subject: Subject,
    name: str,
    folders: Path,
    tell: Callable[[str], None],
    batches: Sequence[int] = BATCHES,
    steps: Sequence[int] = STEPS,
    resolutions: Sequence[int] = RESOLUTIONS,
    rounds: int = 3,
) -> list[Point]:
    """The cost per sample with batch and steps, on the subject, and with resolution, on a prior that takes 1024."""
    points = []
    plain = one_pass(subject.recipe, early_stop=False)
    for batch in batches:
        tell(f"growth: batch {batch}")
        x0 = subject.x0.repeat(-(-batch // len(subject.x0)), 1, 1, 1)[:batch]
        part = Subject(subject.prior, subject.f, subject.guide, subject.agreement, subject.recipe, x0)
        points += _compare("batch", batch, name, part, plain, folders, rounds)
    for count in steps:
        tell(f"growth: {count} steps")
        points += _compare("steps", count, name, subject, plain.changed(steps=count), folders, rounds)
    for side in resolutions:
        tell(f"growth: {side} pixels")
        points += _by_resolution(side, rounds)
    return points


def _compare(
    axis: str, value: int, name: str, subject: Subject, recipe: Recipe, folders: Path, rounds: int
) -> list[Point]:
    runtimes = {"eager": _eager(subject, recipe), "onnx runtime": _onnx(subject, recipe, folders / "fp32")}
    here = placed(subject)
    seconds: dict[str, list[float]] = {kind: [] for kind in runtimes}
    for turn in range(rounds + 1):
        for kind, runtime in runtimes.items():
            synchronise()
            start = time.perf_counter()
            flips(here, recipe, runtime)
            synchronise()
            if turn:
                seconds[kind].append((time.perf_counter() - start) / len(subject.x0))
    return [Point(axis, value, kind, statistics.median(each), name) for kind, each in seconds.items()]


def _by_resolution(side: int, rounds: int) -> list[Point]:
    """One guided step of one sample: the network's call and the gradient, on random weights built as SD3 is."""
    prior, guide = small_prior(), small_classifier(2)
    recipe = Recipe()
    made = contracts(prior, guide, recipe, side, side)
    z = torch.randn(1, *prior.latent_shape(side, side), generator=torch.Generator().manual_seed(0))
    y, scale, t = torch.zeros(1, dtype=torch.long), torch.ones(()), torch.tensor(500.0)
    works: dict[str, Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        sessions = {}
        for name in ("velocity", "guidance"):
            file = Path(scratch) / f"{name}.onnx"
            write_graph(made[name], traced(made[name], 1), file, 1)
            content = file.read_bytes()
            sessions[name] = in_session(made[name], open_session(content, threads=torch.get_num_threads()))

    def eager() -> None:
        with torch.no_grad():
            made["velocity"].function(z, t)
        made["guidance"].function(z, y, scale)

    def exported() -> None:
        sessions["velocity"](z, t)
        sessions["guidance"](z, y, scale)

    works = {"eager": eager, "onnx runtime": exported}
    seconds: dict[str, list[float]] = {kind: [] for kind in works}
    for turn in range(rounds + 1):
        for kind, work in works.items():
            start = time.perf_counter()
            work()
            if turn:
                seconds[kind].append(time.perf_counter() - start)
    label = "SD3 build, random weights"
    return [Point("resolution", side, kind, statistics.median(each), label) for kind, each in seconds.items()]


def plot(points: Sequence[Point]) -> str:
    """The growth as one SVG: a panel for each axis, both scales logarithmic."""
    from math import floor, log10

    width, height, left, top, right, bottom = 340.0, 260.0, 52.0, 34.0, 18.0, 40.0
    titles = {
        "batch": "seconds per counterfactual by batch",
        "steps": "… by steps of the schedule",
        "resolution": "seconds per guided step by pixels",
    }
    axes = [axis for axis in titles if any(point.axis == axis for point in points)]
    panels = []
    for place, axis in enumerate(axes):
        chosen = [point for point in points if point.axis == axis]
        low, high = min(p.value for p in chosen), max(p.value for p in chosen)
        bottom_power = floor(log10(min(p.seconds for p in chosen)))
        top_power = floor(log10(max(p.seconds for p in chosen))) + 1
        offset = place * width

        def x(value: float, low: int = low, high: int = high, offset: float = offset) -> float:
            share = (log10(value) - log10(low)) / max(log10(high) - log10(low), 1e-9)
            return offset + left + (width - left - right) * share

        def y(seconds: float, low: int = bottom_power, high: int = top_power) -> float:
            return top + (height - top - bottom) * (1 - (log10(seconds) - low) / (high - low))

        lines = [f'<text x="{offset + left}" y="18" font-weight="600">{titles[axis]}</text>']
        for power in range(bottom_power, top_power + 1):
            level = y(10.0**power)
            lines.append(f'<text x="{offset + left - 6}" y="{level + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
            lines.append(
                f'<line x1="{offset + left}" x2="{offset + width - right}" y1="{level:.1f}" y2="{level:.1f}" '
                'stroke="#e3e6eb"/>'
            )
        for value in sorted({point.value for point in chosen}):
            lines.append(f'<text x="{x(value):.1f}" y="{height - 22}" text-anchor="middle">{value}</text>')
        for colour, kind in zip(COLOURS, ("eager", "onnx runtime"), strict=True):
            curve = sorted((p.value, p.seconds) for p in chosen if p.runtime == kind)
            path = " ".join(f"{x(value):.1f},{y(each):.1f}" for value, each in curve)
            lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            lines += [f'<circle cx="{x(v):.1f}" cy="{y(s):.1f}" r="3" fill="{colour}"/>' for v, s in curve]
        panels.append("".join(lines))
    legend = "".join(
        f'<rect x="{left + 130 * i}" y="{height - 12}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{left + 130 * i + 15}" y="{height - 3}">{kind}</text>'
        for i, (colour, kind) in enumerate(zip(COLOURS, ("eager torch", "ONNX Runtime"), strict=True))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * max(1, len(axes)):.0f} {height:.0f}" '
        'font-size="11" font-family="system-ui, sans-serif" fill="#1d2430">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(panels)}{legend}</svg>\n'
    )


def write_csv(file: Path, kind: type, rows: Sequence[Any]) -> None:
    """Dataclasses as CSV; an empty cell was not measured."""
    with replacing(file) as partial, partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [one.name for one in fields(kind)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            cells = asdict(row)
            writer.writerow(
                {k: f"{v:.6g}" if isinstance(v, float) else "" if v is None else v for k, v in cells.items()}
            )


def show(rows: Sequence[Row]) -> str:
    """The waterfall as text."""
    lines = [f"{'row':16} {'s each':>8} {'/two':>6} {'/before':>8} {'peak MB':>8} {'cosine':>9} {'flips':>6}"]
    for row in rows:
        if not row.runs_here:
            lines.append(f"{row.row:16} not run here: {row.reason}")
            continue
        numbers = (row.seconds_per_counterfactual, row.over_two_decodes, row.over_row_before, row.peak_mb)
        each, two, before, peak = (
            "" if n is None else f"{n:.{digits}f}" for n, digits in zip(numbers, (3, 3, 3, 0), strict=True)
        )
        lines.append(
            f"{row.row:16} {each:>8} {two:>6} {before:>8} {peak:>8} {row.gradient_cosine:9.6f} {row.flip_rate:6.2f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures the waterfall and the growth, prints them and writes CSV and plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__.splitlines()[0])
    parser.add_argument("--prior", default="portraits", help="portraits, histology, or a prior's folder")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for CSV and plot (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--steps", type=int, nargs="*", default=list(STEPS))
    parser.add_argument("--resolutions", type=int, nargs="*", default=list(RESOLUTIONS))
    parser.add_argument("--json", type=Path, help="write rows and points to this file too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(child(args.child[0], args.prior, Path(args.child[1])))
        return 0

    def tell(what: str) -> None:
        print(f"[{what}]", file=sys.stderr, flush=True)

    try:
        subject = open_subject(args.prior, tell)
        with tempfile.TemporaryDirectory() as scratch:
            folders = Path(scratch)
            tell("exporting")
            write_folders(subject, folders, max(BATCH, *args.batches, 1))
            rows = waterfall(subject, args.prior, folders, max(1, args.rounds), tell)
            print(show(rows), flush=True)
            points = growth(subject, args.prior, folders, tell, args.batches, args.steps, args.resolutions)
    except PfungstError as error:
        print("latency:", error, file=sys.stderr)
        return 2
    stem = Path(args.prior).name
    write_csv(args.out / f"latency-{stem}.csv", Row, rows)
    write_csv(args.out / f"latency-growth-{stem}.csv", Point, points)
    if points:
        write_text(args.out / f"latency-growth-{stem}.svg", plot(points))
    if args.json is not None:
        content = {"rows": [asdict(row) for row in rows], "points": [asdict(point) for point in points]}
        write_text(args.json, json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
