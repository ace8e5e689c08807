"""Which runtime runs the loop: the one that was named, or the fastest that is proven here.

    tensorrt    engines built from exported graphs, passes captured as CUDA graphs
    onnx-cuda   ONNX Runtime with the CUDA provider
    onnx        ONNX Runtime on the CPU
    torch       eager torch, the reference: needs no export and always runs
    auto        the first of these, fastest first, that is proven on this machine

Proven means three things. An exported folder holds parity figures within the thresholds, for this very prior, guide and
loss. The provider loads and takes the graphs. And on fresh inputs it gives, here and now, what eager torch gives:
figures of another machine say nothing about this one's GPU, driver and libraries.

Every candidate that `auto` passes over leaves a line in the log with the reason. A runtime that was named and cannot
run is an error.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch
from torch import Tensor

from engine.errors import InputError, ModelError, PfungstError, RecipeError
from engine.guidance import Model, frozen_model, gradient_source
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.runtime.artifact_folder import (
    IN_THE_LOOP,
    MANIFEST,
    Manifest,
    Source,
    check_parity,
    check_source,
    close_enough,
    graph_files,
    network_of,
    pick_graph,
    read_manifest,
)
from engine.runtime.cuda_graph import BUCKETS, CapturableRuntime, CudaGraphRuntime
from engine.runtime.onnx_runtime import PROVIDERS, OnnxRuntime
from engine.runtime.tensorrt_runtime import TensorRtRuntime, load_tensorrt
from engine.runtime.torch_runtime import TorchRuntime
from engine.sampling import walk
from engine.trajectory import Originals, trajectory

log = logging.getLogger(__name__)
NAMES = ("auto", "torch", "onnx", "onnx-cuda", "tensorrt")
PRECISIONS = {"tensorrt": ("fp16", "bf16", "fp32"), "onnx-cuda": ("fp16", "fp32"), "onnx": ("fp32",)}
"""What each runs, fastest first. ONNX Runtime computes half precision on a CPU in detours, slower than float32."""
PROOF_SEED = 90_002
PROOF_STEPS = 10


@dataclass(frozen=True)
class Chosen:
    """A runtime that runs, and why no faster one does."""

    name: str
    runtime: Runtime
    folder: FilePath | None
    """Of the exported graphs; None for torch."""
    rejected: tuple[str, ...]
    batch: int


@dataclass(frozen=True)
class _Run:
    """What has to be run."""

    prior: Prior
    f: Model
    guide: Model
    recipe: Recipe
    size: tuple[int, int]
    batch: int


def check_choice(name: str, artifacts: FilePath | None = None) -> None:
    """An error for a name that is unknown or cannot run here, as far as can be told without models."""
    if name not in NAMES:
        raise InputError(f"The runtime {name!r} is unknown; choose one of {', '.join(NAMES)}.")
    if artifacts is not None:
        exported_folders(artifacts)
    elif name not in ("auto", "torch"):
        raise InputError(f"The runtime {name} runs exported graphs; name their folder (--artifacts DIR).")
    check_provider(name)


def check_provider(name: str) -> None:
    """A ModelError if what a runtime rests on is not installed, or finds no device."""
    if name == "tensorrt":
        load_tensorrt()
    if name == "onnx-cuda":
        import onnxruntime as ort

        if PROVIDERS["cuda"] not in ort.get_available_providers():
            raise ModelError(
                "ONNX Runtime has no CUDA provider here; install onnxruntime-gpu in place of onnxruntime, or choose "
                "the runtime onnx."
            )
    if name in ("tensorrt", "onnx-cuda") and not torch.cuda.is_available():
        raise ModelError(f"The runtime {name} needs a CUDA device and torch sees none; choose onnx or torch.")


def choose_runtime(
    name: str,
    prior: Prior,
    f: Model,
    f_hat: Model | None,
    recipe: Recipe,
    size: tuple[int, int],
    *,
    batch: int = 1,
    artifacts: FilePath | str | None = None,
) -> Chosen:
    """The named runtime, or the fastest proven one, for images of a size (H, W) in batches of up to `batch`.

    `artifacts` is a folder that `pfungst export` wrote, or one that holds several.
    """
    folder = None if artifacts is None else FilePath(artifacts)
    check_choice(name, folder)
    if recipe.gradient == "surrogate" and f_hat is None:
        raise RecipeError("The gradient source 'surrogate' needs a surrogate; give one or choose another source.")
    guide = f if recipe.gradient != "surrogate" or f_hat is None else f_hat
    run = _Run(prior, f, guide, recipe, size, batch)
    errors: list[Exception] = []
    rejected: list[str] = []
    for candidate in speed_order(prior) if name == "auto" else (name,):
        for open_candidate, found in _candidates(candidate, run, folder):
            label = candidate if found is None else f"{candidate} from {found}"
            try:
                runtime = open_candidate()
            except (PfungstError, RuntimeError) as error:  # torch and providers raise RuntimeError, out of memory too
                errors.append(error)
                rejected.append(f"{label}: {_first_line(error)}")
                log.info("runtime %s is passed over: %s", label, _first_line(error))
                continue
            log.info("runtime %s is chosen", label)
            return Chosen(candidate, runtime, found, tuple(rejected), batch)
    if len(errors) == 1 and isinstance(errors[0], PfungstError):
        raise errors[0]
    raise ModelError(f"The runtime {name} cannot run. {' '.join(rejected)}")


class RuntimeChoice:
    """`choose_runtime` as a factory for whoever explains images; a choice is kept for as long as it fits."""

    def __init__(
        self, name: str, prior: Prior, f: Model, f_hat: Model | None, *, artifacts: FilePath | str | None = None
    ) -> None:
        self.name, self.artifacts = name, None if artifacts is None else FilePath(artifacts)
        check_choice(name, self.artifacts)
        self._models = (prior, f, f_hat)
        self._chosen: dict[tuple[str, tuple[int, int]], Chosen] = {}

    def __call__(self, recipe: Recipe, size: tuple[int, int], batch: int) -> Runtime:
        """The runtime for a recipe, an image size and batches of up to `batch`."""
        return self.chosen(recipe, size, batch).runtime

    def chosen(self, recipe: Recipe, size: tuple[int, int], batch: int) -> Chosen:
        """The same, with its name and with what was passed over."""
        key = (recipe.digest, size)
        if key not in self._chosen or self._chosen[key].batch < batch:
            self._chosen[key] = choose_runtime(
                self.name, *self._models, recipe, size, batch=batch, artifacts=self.artifacts
            )
        return self._chosen[key]


def speed_order(prior: Prior) -> tuple[str, ...]:
    """Runtimes, fastest first: torch on a GPU is faster than anything on a CPU."""
    if device_of(prior).type == "cuda":
        return ("tensorrt", "onnx-cuda", "torch", "onnx")
    return ("tensorrt", "onnx-cuda", "onnx", "torch")


def device_of(prior: Prior) -> torch.device:
    """Where a prior's weights lie."""
    return next((tensor.device for tensor in (*prior.parameters(), *prior.buffers())), torch.device("cpu"))


def exported_folders(artifacts: FilePath) -> list[FilePath]:
    """The exported folders in `artifacts`: itself, or the folders right inside it."""
    if (artifacts / MANIFEST).is_file():
        return [artifacts]
    found = sorted(file.parent for file in artifacts.glob(f"*/{MANIFEST}")) if artifacts.is_dir() else []
    if not found:
        raise InputError(f"{artifacts} holds no exported graphs; run `pfungst export --out {artifacts}` first.")
    return found


def _candidates(
    name: str, run: _Run, artifacts: FilePath | None
) -> Iterator[tuple[Callable[[], Runtime], FilePath | None]]:
    """What can be tried under a name: torch itself, or each exported folder, fastest precision first."""
    if name == "torch":
        yield lambda: eager(run), None
        return
    reason = _unfit(name, run, artifacts)
    if reason is not None:
        yield _refusing(reason), None
        return
    manifests: dict[FilePath, Manifest] = {}
    for folder in exported_folders(artifacts) if artifacts is not None else ():
        try:
            manifests[folder] = read_manifest(folder)
        except PfungstError as error:
            yield _refusing(error), folder
    ranks = PRECISIONS[name]
    for folder, manifest in manifests.items():
        if manifest.precision not in ranks:
            yield _refusing(ModelError(f"{manifest.precision} is not run by {name}, only {', '.join(ranks)}.")), folder
    for precision in ranks:
        for folder, manifest in manifests.items():
            if manifest.precision == precision:
                yield lambda folder=folder, manifest=manifest: _proven(name, run, folder, manifest), folder  # type: ignore[misc]


def _unfit(name: str, run: _Run, artifacts: FilePath | None) -> PfungstError | None:
    """Why no exported graph would do, whatever the folder."""
    try:
        if artifacts is None:
            raise InputError("no exported graphs were named (--artifacts DIR).")
        if run.recipe.micro_batch is not None or run.recipe.checkpoint:
            raise RecipeError(
                "micro_batch and checkpoint bound the memory of torch alone; leave them and --max-memory out, or "
                "choose the runtime torch."
            )
        check_provider(name)
        Source.of(run.prior, run.guide, run.recipe)
    except PfungstError as error:
        return error
    return None


def _refusing(error: PfungstError) -> Callable[[], Runtime]:
    def refuse() -> Runtime:
        raise error

    return refuse


def _proven(name: str, run: _Run, folder: FilePath, manifest: Manifest) -> Runtime:
    """The runtime on one exported folder, or an error that says what is wrong with it."""
    check_source(folder, manifest, Source.of(run.prior, run.guide, run.recipe))
    check_parity(folder, manifest)
    if (manifest.height, manifest.width) != run.size:
        raise ModelError(
            f"its graphs are for {manifest.height}x{manifest.width} pixels, the images have "
            f"{run.size[0]}x{run.size[1]}; run `pfungst export` for their resolution."
        )
    for graph in IN_THE_LOOP:
        pick_graph(graph, graph_files(folder, manifest, graph), run.batch)
    if name == "tensorrt":
        inner = TensorRtRuntime(folder, run.prior, run.guide, run.recipe)
        prove_here(inner, run, manifest.precision)
        return captured(inner, run, max(graph.largest_batch for graph in graph_files(folder, manifest, "guidance")))
    runtime = OnnxRuntime(folder, run.prior, run.guide, run.recipe, provider="cuda" if name == "onnx-cuda" else "cpu")
    prove_here(runtime, run, manifest.precision)
    return runtime


def eager(run: _Run) -> TorchRuntime:
    """The reference."""
    path = run.prior.path(run.recipe.steps, run.recipe.strength, *run.size).to(device_of(run.prior))
    return TorchRuntime(
        run.prior,
        path,
        gradient_source(run.recipe, run.f, run.guide),
        micro_batch=run.recipe.micro_batch,
        checkpointed=run.recipe.checkpoint,
    )


@torch.no_grad()
def prove_here(runtime: Runtime, run: _Run, precision: str) -> None:
    """A ModelError unless the runtime gives what eager torch gives on denoised latents that no export has seen."""
    count = min(2, run.batch)
    device = device_of(run.prior)
    shape = run.prior.latent_shape(*run.size)
    noise = torch.randn(count, *shape, generator=torch.Generator().manual_seed(PROOF_SEED)).to(device)
    y = torch.arange(count, device=device)
    reference = eager(run)
    # Convolutions on a GPU would be rounded to ten bits otherwise, and the reference would be the one that is wrong.
    exact = torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False)
    with exact, frozen_model(run.f), frozen_model(network_of(run.guide)):
        z_hat = walk(run.prior, run.prior.path(PROOF_STEPS, 1.0, *run.size).to(device), noise)
        expected, found = (
            {
                "encoder": (one.encode(reference.decode(z_hat).clamp(0.0, 1.0)),),
                "decoder": (one.decode(z_hat),),
                "velocity": (one.velocity(noise, 0),),
                "guidance": one.guidance(z_hat, y),
            }
            for one in (reference, runtime)
        )
    for graph, outputs in expected.items():
        for theirs, ours in zip(outputs, found[graph], strict=True):
            error, cosine = worst_figures(ours, theirs)
            if not close_enough(precision, error, cosine):
                raise ModelError(
                    f"its {graph} differs from torch on this machine: relative error {error:.1e}, cosine {cosine:.5f}."
                )


def worst_figures(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """(largest relative error, smallest cosine) of a batch's samples; infinite and -1 where values are not finite."""
    a, b = found.double().flatten(1), expected.to(found.device).double().flatten(1)
    if not bool(torch.isfinite(a).all()):
        return float("inf"), -1.0
    tiny = torch.finfo(torch.float64).tiny
    errors = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(tiny)
    cosines = (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1)).clamp_min(tiny)
    return float(errors.max()), float(cosines.min())


def captured(inner: CapturableRuntime, run: _Run, largest: int, device: str = "cuda") -> Runtime:
    """The runtime with its passes as CUDA graphs, if a captured pass ends where an uncaptured one does.

    A capture that fails takes speed away and nothing else: the log says so, and the runtime is used as it is.
    """
    buckets = sorted({size for size in BUCKETS if size < largest} | {largest})
    try:
        looped = CudaGraphRuntime(inner, run.recipe, device=device, buckets=buckets)
        shape = run.prior.latent_shape(*run.size)
        draw = torch.Generator().manual_seed(PROOF_SEED)
        z0, eps = (torch.randn(1, *shape, generator=draw).to(device) for _ in range(2))
        x0 = inner.decode(z0).clamp(0.0, 1.0)
        originals = Originals(x0, z0, torch.zeros(1, dtype=torch.long, device=device), x0)
        everywhere = torch.ones_like(x0[:, :1])
        with torch.no_grad():
            plain = trajectory(inner, originals, eps, everywhere, run.recipe)
            replayed = looped.trajectory(originals, eps, everywhere, run.recipe)
        error, cosine = worst_figures(replayed.z, plain.z)
        if not close_enough("fp32", error, cosine):
            raise ModelError(f"a captured pass ends elsewhere: relative error {error:.1e}, cosine {cosine:.5f}.")
    except (PfungstError, RuntimeError) as error:
        log.warning("the loop is not captured as a CUDA graph: %s", _first_line(error))
        return inner
    return looped


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
