"""The guided loop's networks on ONNX Runtime, from a folder of graphs that `pfungst export` wrote.

Shapes: B batch, C latent channels, h w latent size, H W image size, K classes.

The folder is verified as engine.runtime.artifact_folder says. A provider that is not the one asked for is an error too,
because ONNX Runtime would fall back to the CPU without a word.
"""

import copy
import ctypes
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import cache
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from engine.errors import InputError, ModelError
from engine.guidance import Model
from engine.path import Path
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime.artifact_folder import (
    DTYPES,
    FORMAT,
    GRAPHS,
    IN_THE_LOOP,
    MANIFEST,
    GraphFile,
    Manifest,
    Port,
    Source,
    check_gradient,
    check_shapes,
    check_source,
    graph_files,
    guide_hash,
    network_of,
    padded,
    pick_graph,
    read_graph,
    read_manifest,
)
from engine.runtime.threads import lonely_pool, one_thread, release_idle_threads
from engine.trajectory import Originals, Trajectory, trajectory

# The folder's form is read under this name as well.
__all__ = [
    "DTYPES",
    "FORMAT",
    "GRAPHS",
    "MANIFEST",
    "PROVIDERS",
    "GraphFile",
    "Manifest",
    "OnnxRuntime",
    "Port",
    "Source",
    "check_gradient",
    "check_shapes",
    "check_source",
    "guide_hash",
    "network_of",
    "open_session",
    "pick_graph",
    "read_graph",
    "read_manifest",
]

SMALL_BYTES = 64_000_000
"""Up to this size a graph is opened on the CPU for one thread, of which several share a batch. A batch of one, which
cannot be shared, opens it again for all threads."""
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}


class _Ended(Exception):
    """Another share of the pass has failed or was cancelled."""


class OnnxRuntime:
    """A prior and a guide as ONNX graphs, bound to a recipe's path.

    `provider` is cpu, cuda or tensorrt. On the CPU, threads do not spin while they wait: torch works between the calls
    on the same cores, and its threads are sent away before a call, because they would spin into it for milliseconds.
    The samples of a batch are shared out, and each thread runs the whole graph on its own, so that none is woken for
    every small operator; measured, this is faster than all threads in each operator. A guided pass is shared out as a
    whole: its threads meet once, at its end. A batch that no graph was exported for is padded up to the next fixed
    size, and refused beyond the largest. Results lie where the inputs came from.
    """

    def __init__(
        self,
        folder: FilePath | str,
        prior: Prior,
        guide: Model,
        recipe: Recipe,
        *,
        provider: str = "cpu",
        threads: int | None = None,
        device_id: int = 0,
    ) -> None:
        self.folder = FilePath(folder)
        self.manifest = read_manifest(self.folder)
        self.provider, self.device_id = provider, device_id
        self.threads = threads or torch.get_num_threads()
        check_source(self.folder, self.manifest, Source.of(prior, guide, recipe))
        # The tables stay on the host: their entries go with latents of either device.
        self._path = prior.path(recipe.steps, recipe.strength, self.manifest.height, self.manifest.width)
        self._device = torch.device("cpu") if provider == "cpu" else torch.device("cuda", device_id)
        self._scale = torch.tensor(self.manifest.cotangent_scale, device=self._device)
        self._sessions: dict[tuple[str, int], Any] = {}
        self._sizes: dict[str, int] = {}
        self._pool = lonely_pool(self.threads if provider == "cpu" and self.threads > 1 else 0)
        self._alone = False
        for name in IN_THE_LOOP:
            for graph in self._files(name):
                self._session(graph, 1 if self._is_shared_out(graph) else self.threads)

    @property
    def path(self) -> Path:
        """The path whose steps `velocity` counts."""
        return self._path

    def encode(self, images: Tensor) -> Tensor:
        """z0 of images in [0, 1]."""
        return self._run("encoder", [images])[0]

    def decode(self, z: Tensor) -> Tensor:
        """Images by the full decoder."""
        return self._run("decoder", [z])[0]

    def velocity(self, z: Tensor, i: int) -> Tensor:
        """The network's output at state z in step i."""
        return self._run("velocity", [z, self._path.timesteps[i]])[0]

    def guidance(self, z_hat: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradient, image, logits) from one graph."""
        gradient, image, logits = self._run("guidance", [z_hat, y, self._scale])
        return gradient, image, logits

    def surrogate(self, images: Tensor) -> Tensor:
        """The guide's logits."""
        return self._run("surrogate", [images])[0]

    def trajectory(
        self,
        originals: Originals,
        eps: Tensor,
        m_excl: Tensor,
        recipe: Recipe,
        *,
        factor: float = 1.0,
        margin: float | None = None,
        watch: Callable[[int], None] = lambda step: None,
    ) -> Trajectory:
        """One pass of Algorithm 1; each thread walks its share of the samples to the end, this one the first.

        `watch` is called here, in the caller's thread; what it raises ends the other shares at their next step.
        """
        in_shares = all(self._is_shared_out(graph) for name in IN_THE_LOOP for graph in self._files(name))
        shares = torch.arange(len(eps)).tensor_split(min(self.threads, len(eps)) if in_shares else 1)
        runtime = copy.copy(self)
        runtime._alone = len(shares) > 1
        ended = threading.Event()

        def follow(step: int) -> None:
            if ended.is_set():
                raise _Ended

        def walk(rows: Tensor, look: Callable[[int], None]) -> Trajectory:
            with torch.no_grad():
                some = (originals.pick(rows), eps[rows], m_excl[rows])
                return trajectory(runtime, *some, recipe, factor=factor, margin=margin, watch=look)

        if len(shares) == 1:
            return walk(shares[0], watch)
        release_idle_threads()
        with one_thread():
            others = [self._pool.submit(walk, rows, follow) for rows in shares[1:]]
            try:
                ends = [walk(shares[0], watch), *(other.result() for other in others)]
            finally:
                ended.set()
                wait(others)
        parts = zip(*((end.z, end.kept, end.guided_steps) for end in ends), strict=True)
        return Trajectory(*(torch.cat(part) for part in parts))

    def _files(self, name: str) -> tuple[GraphFile, ...]:
        return graph_files(self.folder, self.manifest, name)

    def _run(self, name: str, inputs: list[Tensor]) -> list[Tensor]:
        batch = len(inputs[0])
        graph = pick_graph(name, self._files(name), batch)
        check_shapes(name, graph, inputs)
        missing = graph.largest_batch - batch if graph.fixed_batch else 0
        tensors = [
            padded(
                x.detach().to(self._device, DTYPES[port.dtype][0]), missing if None in port.shape else 0
            ).contiguous()
            for x, port in zip(inputs, graph.inputs, strict=True)
        ]
        if self.provider == "cpu" and self.threads > 1 and not self._alone:
            release_idle_threads()
        if self._alone:
            outputs = self._run_host(self._session(graph, 1), graph, tensors)
        elif self.provider != "cpu":
            outputs = self._run_device(self._session(graph, self.threads), graph, tensors)
        elif batch > 1 and self._is_shared_out(graph):
            outputs = self._run_shares(graph, tensors)
        else:
            outputs = self._run_host(self._session(graph, self.threads), graph, tensors)
        outputs = [x.to(inputs[0].device) for x in outputs]
        return [x[:batch] for x in outputs] if missing else outputs

    def _is_shared_out(self, graph: GraphFile) -> bool:
        """Whether the samples of a batch are run by threads of their own: graphs that are small and take any batch."""
        if self.provider != "cpu" or self.threads == 1 or graph.fixed_batch or graph.data is not None:
            return False
        if graph.file not in self._sizes:
            self._sizes[graph.file] = (self.folder / graph.file).stat().st_size
        return self._sizes[graph.file] <= SMALL_BYTES

    def _run_shares(self, graph: GraphFile, tensors: list[Tensor]) -> list[Tensor]:
        session, parts = self._session(graph, 1), min(self.threads, len(tensors[0]))
        shares = zip(
            *(
                x.tensor_split(parts) if None in port.shape else (x,) * parts
                for x, port in zip(tensors, graph.inputs, strict=True)
            ),
            strict=True,
        )
        found = self._pool.map(lambda share: self._run_host(session, graph, list(share)), shares)
        return [torch.cat(outputs) for outputs in zip(*found, strict=True)]

    def _run_host(self, session: Any, graph: GraphFile, tensors: list[Tensor]) -> list[Tensor]:
        feed = {port.name: x.numpy() for port, x in zip(graph.inputs, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run([port.name for port in graph.outputs], feed)]

    def _run_device(self, session: Any, graph: GraphFile, tensors: list[Tensor]) -> list[Tensor]:
        """Inputs and outputs stay where they are on the device; nothing is copied through the host."""
        binding = session.io_binding()
        batch = len(tensors[0])
        outputs = []
        for port, x in zip(graph.inputs, tensors, strict=True):
            binding.bind_input(port.name, "cuda", self.device_id, DTYPES[port.dtype][1], list(x.shape), x.data_ptr())
        for port in graph.outputs:
            shape = [batch if size is None else size for size in port.shape]
            x = torch.empty(shape, dtype=DTYPES[port.dtype][0], device=self._device)
            binding.bind_output(port.name, "cuda", self.device_id, DTYPES[port.dtype][1], shape, x.data_ptr())
            outputs.append(x)
        # Inputs were written on torch's stream, the session runs on its own.
        torch.cuda.current_stream(self._device).synchronize()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return outputs

    def _session(self, graph: GraphFile, threads: int) -> Any:
        if (graph.file, threads) not in self._sessions:
            content: bytes | str = read_graph(self.folder, graph)
            if graph.data is not None:
                content = str(self.folder / graph.file)  # external weights are found beside the file only
            self._sessions[graph.file, threads] = open_session(
                content, provider=self.provider, threads=threads, device_id=self.device_id
            )
        return self._sessions[graph.file, threads]


def open_session(content: bytes | str, *, provider: str = "cpu", threads: int = 1, device_id: int = 0) -> Any:
    """A session that really runs on the provider asked for."""
    import onnxruntime as ort

    if provider not in PROVIDERS:
        raise InputError(f"The provider {provider!r} is unknown; choose one of {', '.join(PROVIDERS)}.")
    wanted = PROVIDERS[provider]
    if wanted not in ort.get_available_providers():
        raise ModelError(
            f"ONNX Runtime has no {wanted} here, only {', '.join(ort.get_available_providers())}. Install "
            "onnxruntime-gpu in place of onnxruntime, or choose the provider cpu."
        )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if provider == "cpu":
        # Sessions take turns, so one store of memory does for all; each would keep its own, planned for its peak.
        _one_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.enable_mem_pattern = False
    settings: Mapping[str, Any] = {} if provider == "cpu" else {"device_id": device_id}
    if provider == "cuda":
        settings = {**settings, "use_tf32": "0"}  # its 10 bits of mantissa would miss the bound on float32 gradients
    try:
        session = ort.InferenceSession(content, options, providers=[(wanted, settings)])
    except Exception as error:  # ONNX Runtime's errors share no base class that is public
        reason = str(error).strip().splitlines()[0][:300]
        raise ModelError(f"ONNX Runtime cannot open the graph: {reason}. Run `pfungst export` again.") from None
    if session.get_providers()[0] != wanted:
        raise ModelError(
            f"ONNX Runtime fell back from {wanted} to {session.get_providers()[0]}; check its installation."
        )
    session.disable_fallback()
    if isinstance(content, bytes):
        session._model_bytes = None  # kept only to fall back with, which is off
    _return_freed_memory()
    return session


def _return_freed_memory() -> None:
    """Gives back what reading and optimising a graph took, where the C library can; it would keep it for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def _one_arena() -> None:
    """One store of host memory for all sessions of the process that ask for it, growing by what is needed."""
    import onnxruntime as ort

    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    growth = {"max_mem": 0, "arena_extend_strategy": 1, "initial_chunk_size_bytes": -1, "max_dead_bytes_per_chunk": -1}
    ort.create_and_register_allocator(place, ort.OrtArenaCfg(growth))
