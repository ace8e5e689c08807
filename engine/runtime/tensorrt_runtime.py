"""The guided loop's networks on TensorRT, built from a folder of graphs that `pfungst export` wrote.

Shapes: B batch, C latent channels, h w latent size, H W image size, K classes.

The folder is verified as engine.runtime.artifact_folder says. Networks are strongly typed: the precision is what the
graph says. An engine is built once and kept in a file whose first line tells what it was built from; if graph,
TensorRT, GPU or the range of batches is another, it is built anew. A build tries kernels, and the times it measures are
kept too.

All engines work in one block of device memory, for they run one after the other. Inputs and outputs lie at fixed
addresses, and each batch size has an execution context of its own, whose shapes never change: so that calls can be
captured in a CUDA graph (engine.runtime.cuda_graph).
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError, WeightsError
from engine.guidance import Model
from engine.path import Path
from engine.prior import Prior
from engine.recipe import Recipe
from engine.runtime.artifact_folder import (
    DTYPES,
    IN_THE_LOOP,
    GraphFile,
    Manifest,
    Source,
    check_shapes,
    check_source,
    graph_files,
    padded,
    pick_graph,
    read_graph,
    read_manifest,
)

log = logging.getLogger(__name__)
MODULE = "tensorrt"
CACHE = "engines"
GUIDED = "guidance"
"""The one graph that holds the guide."""
ENGINE_FORMAT = 1


def load_tensorrt() -> Any:
    """The module `tensorrt`; a ModelError where it is missing."""
    try:
        return import_module(MODULE)
    except (ImportError, OSError) as error:
        raise ModelError(
            f"TensorRT cannot be loaded ({error}); install the extra `gpu`: pip install 'pfungst[gpu]', or choose "
            "another runtime."
        ) from None


class TensorRtRuntime:
    """A prior and a guide as TensorRT engines, bound to a recipe's path.

    `cache` is the folder for engines and timings, by default inside the exported folder. If `refittable`, the guide can
    be swapped without a build, at some cost in speed. A batch that no graph was exported for is padded up
    to the next fixed size, and refused beyond the largest. Results lie where the inputs came from.
    """

    def __init__(
        self,
        folder: FilePath | str,
        prior: Prior,
        guide: Model,
        recipe: Recipe,
        *,
        cache: FilePath | str | None = None,
        refittable: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        self.folder = FilePath(folder)
        self.manifest = read_manifest(self.folder)
        check_source(self.folder, self.manifest, Source.of(prior, guide, recipe))
        self._trt = load_tensorrt()
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ModelError("TensorRT needs a CUDA device and torch sees none; choose the runtime onnx or torch.")
        self.refittable, self._prior, self._recipe = refittable, prior, recipe
        self.generation = 0
        """Grows when weights are swapped: CUDA graphs captured before are void."""
        # The tables stay on the host: their entries go with latents of either device.
        self._path = prior.path(recipe.steps, recipe.strength, self.manifest.height, self.manifest.width)
        self._scale = torch.tensor(self.manifest.cotangent_scale, device=self.device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._builder = _Builder(self._trt, FilePath(cache or self.folder / CACHE), gpu_name(self.device))
        self._engines: dict[str, _Engine] = {
            graph.file: _Engine(
                graph, self._builder.engine(self.folder, graph, refittable and name == GUIDED), self._trt, self.device
            )
            for name in IN_THE_LOOP
            for graph in graph_files(self.folder, self.manifest, name)
        }
        needs = [engine.memory for engine in self._engines.values()]
        self._memory = torch.empty(max(*needs, 1), dtype=torch.uint8, device=self.device)

    @property
    def path(self) -> Path:
        """The path whose steps `velocity` counts."""
        return self._path

    @property
    def shared_bytes(self) -> int:
        """The size of the memory block that all engines work in: the largest need of one."""
        return len(self._memory)

    def encode(self, images: Tensor) -> Tensor:
        """z0 of images in [0, 1]."""
        return self._run("encoder", [images])[0]

    def decode(self, z: Tensor) -> Tensor:
        """Images by the full decoder."""
        return self._run("decoder", [z])[0]

    def velocity(self, z: Tensor, i: int) -> Tensor:
        """The network's output at state z in step i."""
        return self.velocity_at(z, self._path.timesteps[i])

    def velocity_at(self, z: Tensor, timestep: Tensor) -> Tensor:
        """The network's output at state z, told a timestep that is a tensor without dimensions."""
        return self._run("velocity", [z, timestep])[0]

    def guidance(self, z_hat: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradient, image, logits) from one engine."""
        gradient, image, logits = self._run("guidance", [z_hat, y, self._scale])
        return gradient, image, logits

    def swap_guide(self, folder: FilePath | str, guide: Model) -> None:
        """Another guide's weights take the place of this one's, from the folder that was exported for it.

        It has to be of the same build, with the same prior, precision, resolution and batches. Nothing is changed
        unless all of it fits.
        """
        if not self.refittable:
            raise ModelError("These engines cannot take other weights; open the runtime with refittable=True.")
        other = FilePath(folder)
        manifest = read_manifest(other)
        check_source(other, manifest, Source.of(self._prior, guide, self._recipe))
        refits = []
        for old, new in self._paired(other, manifest, GUIDED):
            form, _ = form_and_weights(self.folder, old)
            new_form, weights = form_and_weights(other, new)
            if form != new_form:
                raise ModelError(
                    f"The graph {new.file} in {other} has another form than the engine; open a runtime of its own."
                )
            refits.append((self._engines[old.file], weights))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no engine may be at work while its weights change
        try:
            for engine, weights in refits:
                engine.refit(weights, self._trt)
        except ModelError:
            self._engines.clear()
            raise
        self._scale.fill_(manifest.cotangent_scale)
        self.generation += 1

    def _paired(self, folder: FilePath, manifest: Manifest, name: str) -> list[tuple[GraphFile, GraphFile]]:
        """This runtime's files of a graph, each with its counterpart in another folder."""
        mine, theirs = graph_files(self.folder, self.manifest, name), graph_files(folder, manifest, name)
        ranges = [[(graph.file, graph.fixed_batch, graph.largest_batch) for graph in files] for files in (mine, theirs)]
        same = all(getattr(manifest, key) == getattr(self.manifest, key) for key in ("precision", "height", "width"))
        if not same or ranges[0] != ranges[1]:
            raise ModelError(
                f"The graphs in {folder} are of another precision, resolution or batch than these engines; export them "
                "alike, or open a runtime of their own."
            )
        return list(zip(mine, theirs, strict=True))

    def _run(self, name: str, inputs: list[Tensor]) -> list[Tensor]:
        batch = len(inputs[0])
        graph = pick_graph(name, graph_files(self.folder, self.manifest, name), batch)
        check_shapes(name, graph, inputs)
        if graph.file not in self._engines:
            raise ModelError("A swap of guides failed and left these engines unusable; open the runtime again.")
        engine = self._engines[graph.file]
        rows = graph.largest_batch if graph.fixed_batch else batch
        with self._ordered() as stream:
            engine.fill(inputs, rows)
            if not engine.context(rows, self._memory, stream).execute_async_v3(stream):
                raise ModelError(f"TensorRT could not run {graph.file} for a batch of {batch}.")
            # The next call overwrites the buffers.
            outputs = [buffer[:batch].clone() for buffer in engine.outputs]
        return [x.to(inputs[0].device) for x in outputs]

    @contextmanager
    def _ordered(self) -> Iterator[int]:
        """The handle of a stream on which work follows what the caller has started, and the caller's next follows it.

        TensorRT waits for the whole device on the default stream, so that one is left for a stream of our own.
        """
        if self._stream is None:
            yield 0
            return
        current = torch.cuda.current_stream(self.device)
        if current != torch.cuda.default_stream(self.device):
            yield current.cuda_stream
            return
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield self._stream.cuda_stream
        current.wait_stream(self._stream)


@dataclass
class _Engine:
    """One engine with its buffers and, for each batch size that was asked for, an execution context."""

    graph: GraphFile
    engine: Any
    trt: Any
    device: torch.device
    inputs: list[Tensor] = field(init=False)
    outputs: list[Tensor] = field(init=False)
    contexts: dict[int, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs, self.outputs = (
            [
                torch.empty(
                    [self.graph.largest_batch if size is None else size for size in port.shape],
                    dtype=DTYPES[port.dtype][0],
                    device=self.device,
                )
                for port in ports
            ]
            for ports in (self.graph.inputs, self.graph.outputs)
        )

    @property
    def memory(self) -> int:
        """Bytes of scratch memory that any context of the engine needs."""
        return int(self.engine.device_memory_size_v2)

    def fill(self, values: Sequence[Tensor], rows: int) -> None:
        """Writes inputs into the buffers, the last sample again up to `rows`."""
        for port, buffer, x in zip(self.graph.inputs, self.inputs, values, strict=True):
            if None in port.shape:
                buffer[:rows].copy_(padded(x.detach(), rows - len(x)))
            else:
                buffer.copy_(x.detach())

    def context(self, rows: int, memory: Tensor, stream: int) -> Any:
        """The context for a batch of `rows`; its shapes and addresses are set once."""
        if rows not in self.contexts:
            context = self.engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if context is None:
                raise ModelError(f"TensorRT gives no execution context for {self.graph.file}; free device memory.")
            ranges = batch_ranges(self.graph)
            profile = next((n for n, (low, high) in enumerate(ranges) if low <= rows <= high), 0)
            accepted = bool(context.set_optimization_profile_async(profile, stream))
            context.set_device_memory(memory.data_ptr(), len(memory))
            for port, buffer in zip(self.graph.inputs, self.inputs, strict=True):
                shape = tuple(rows if size is None else size for size in port.shape)
                accepted = accepted and context.set_input_shape(port.name, shape)
                accepted = accepted and context.set_tensor_address(port.name, buffer.data_ptr())
            for port, buffer in zip(self.graph.outputs, self.outputs, strict=True):
                accepted = accepted and context.set_tensor_address(port.name, buffer.data_ptr())
            if not accepted:
                raise ModelError(f"TensorRT refuses {self.graph.file} for a batch of {rows}; export it again.")
            self.contexts[rows] = context
        return self.contexts[rows]

    def refit(self, weights: dict[str, Any], trt: Any) -> None:
        """Puts weights into the engine by their names; a ModelError if they do not suffice."""
        messages: list[str] = []
        refitter = trt.Refitter(self.engine, keeping_logger(trt, messages))
        arrays = {name: _array(tensor) for name, tensor in weights.items()}  # alive until the refit is done
        for name in refitter.get_all_weights():
            if name in weights:
                kind = getattr(trt.DataType, _data_type(weights[name]))
                given = trt.Weights(kind, arrays[name].ctypes.data, arrays[name].size)
                if not refitter.set_named_weights(name, given):
                    raise ModelError(f"TensorRT does not take the new weights {name!r} of {self.graph.file}.")
        missing = list(refitter.get_missing_weights())
        if missing or not refitter.refit_cuda_engine():
            reason = f"{missing[0]!r} is missing" if missing else (messages or ["no reason given"])[-1]
            raise ModelError(f"TensorRT could not swap the weights of {self.graph.file}: {reason}.")


@dataclass
class _Builder:
    """Builds engines, or finds them in the cache."""

    trt: Any
    cache: FilePath
    gpu: str
    runtime: Any = field(init=False)  # engines live no longer than it does

    def __post_init__(self) -> None:
        self.runtime = self.trt.Runtime(keeping_logger(self.trt, []))

    def engine(self, folder: FilePath, graph: GraphFile, refittable: bool) -> Any:
        """The engine of a verified graph."""
        content = read_graph(folder, graph)
        stem = f"{FilePath(graph.file).stem}-{hashlib.sha256(self.gpu.encode()).hexdigest()[:8]}"
        file, key = self.cache / f"{stem}.engine", self.key(graph, refittable)
        stored = read_engine(file, key)
        if stored is not None:
            engine = self.runtime.deserialize_cuda_engine(stored)
            if engine is not None:
                return engine
            log.info("%s is not taken by this TensorRT and is built again", file)
        log.info("building the TensorRT engine of %s for %s; this can take minutes", graph.file, self.gpu)
        built = self.build(folder, graph, content, refittable)
        write_engine(file, key, built)
        engine = self.runtime.deserialize_cuda_engine(built)
        if engine is None:
            raise ModelError(f"TensorRT built an engine of {graph.file} that it cannot open; check its installation.")
        return engine

    def key(self, graph: GraphFile, refittable: bool) -> dict[str, Any]:
        """All that an engine depends on."""
        return {
            "format": ENGINE_FORMAT,
            "graph": graph.sha256,
            "weights": graph.data_sha256,
            "tensorrt": str(self.trt.__version__),
            "gpu": self.gpu,
            "batches": [list(pair) for pair in batch_ranges(graph)],
            "refittable": refittable,
        }

    def build(self, folder: FilePath, graph: GraphFile, content: bytes, refittable: bool) -> bytes:
        """A serialised engine."""
        trt, messages = self.trt, list[str]()
        logger = keeping_logger(trt, messages)
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        # External weights are found beside the file only.
        parsed = parser.parse(content) if graph.data is None else parser.parse_from_file(str(folder / graph.file))
        if not parsed:
            errors = [str(parser.get_error(i).desc()) for i in range(parser.num_errors)]
            raise ModelError(f"TensorRT cannot read {graph.file}: {'; '.join(errors) or 'no reason given'}.")
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)  # float32 in the graph means float32
        if refittable:
            config.set_flag(trt.BuilderFlag.REFIT)
        for low, high in batch_ranges(graph):
            profile = builder.create_optimization_profile()
            for port in graph.inputs:
                if None in port.shape:
                    least, most = (tuple(n if size is None else size for size in port.shape) for n in (low, high))
                    profile.set_shape(port.name, least, most, most)
            config.add_optimization_profile(profile)
        times = self.cache / f"timing-{hashlib.sha256(self.gpu.encode()).hexdigest()[:8]}.cache"
        _use_timings(config, times)
        built = builder.build_serialized_network(network, config)
        if built is None:
            reason = messages[-1] if messages else "no reason given"
            raise ModelError(f"TensorRT cannot build {graph.file}: {reason}. Choose the runtime onnx-cuda or torch.")
        measured = config.get_timing_cache()
        if measured is not None:
            _write(times, bytes(measured.serialize()))
        return bytes(built)


def batch_ranges(graph: GraphFile) -> tuple[tuple[int, int], ...]:
    """The optimisation profiles of a free batch: one for a single image, one for all others, tuned for the largest."""
    if graph.fixed_batch:
        return ()
    return ((1, 1), (2, graph.largest_batch))[: 1 if graph.largest_batch == 1 else 2]


def gpu_name(device: torch.device) -> str:
    """What an engine is built for."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} SM{major}{minor}"


def read_engine(file: FilePath, key: dict[str, Any]) -> bytes | None:
    """A stored engine that was built from exactly this; None, with a line in the log, for any other."""
    try:
        head, _, engine = file.read_bytes().partition(b"\n")
        told = json.loads(head)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        told, engine = None, b""
    if told != {**key, "sha256": hashlib.sha256(engine).hexdigest()}:
        log.info("%s was built from something else or is damaged, and is built again", file)
        return None
    return engine


def write_engine(file: FilePath, key: dict[str, Any], engine: bytes) -> None:
    """Stores an engine behind a line that says what it was built from."""
    head = json.dumps({**key, "sha256": hashlib.sha256(engine).hexdigest()}, sort_keys=True)
    _write(file, head.encode() + b"\n" + engine)


def form_and_weights(folder: FilePath, graph: GraphFile) -> tuple[bytes, dict[str, Any]]:
    """An ONNX graph without the values of its weights, and the weights by name."""
    import onnx

    content = read_graph(folder, graph)
    # A graph with external weights is read from its file, where they are found.
    model = onnx.load_model_from_string(content) if graph.data is None else onnx.load(str(folder / graph.file))
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    shapes = sorted((name, list(tensor.dims), tensor.data_type) for name, tensor in weights.items())
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.initializer[:]
    return json.dumps(shapes).encode() + bare.SerializeToString(deterministic=True), weights


def _use_timings(config: Any, file: FilePath) -> None:
    """A build starts with the times that earlier ones measured, if they are of this GPU and version."""
    try:
        stored = file.read_bytes()
    except OSError:
        stored = b""
    for content in (stored, b"") if stored else (b"",):
        times = config.create_timing_cache(content)
        if times is not None and config.set_timing_cache(times, False):
            return
        log.info("the timing cache %s is of another GPU or TensorRT, and is begun anew", file)


def _write(file: FilePath, content: bytes) -> None:
    """A cache that cannot be written costs the next start a build, and nothing else."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")  # two processes may build at once
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(file)
    except OSError as error:
        log.warning("%s cannot be written (%s): the next start builds again", file, error)


def _data_type(tensor: Any) -> str:
    """TensorRT's name for the type of an ONNX tensor."""
    import onnx

    names = {
        "FLOAT": "FLOAT",
        "FLOAT16": "HALF",
        "BFLOAT16": "BF16",
        "INT64": "INT64",
        "INT32": "INT32",
        "BOOL": "BOOL",
    }
    name = onnx.TensorProto.DataType.Name(tensor.data_type)
    if name not in names:
        raise WeightsError(f"The weights {tensor.name!r} are of type {name}, which cannot be swapped.")
    return names[name]


def _array(tensor: Any) -> Any:
    from onnx import numpy_helper

    return numpy_helper.to_array(tensor).copy()


def keeping_logger(trt: Any, messages: list[str]) -> Any:
    """A logger of TensorRT or TensorRT-RTX that appends errors to `messages`."""

    class Keeping(trt.ILogger):
        """Keeps errors, so that a failed build can say why."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                messages.append(message)
            log.debug("TensorRT: %s", message)

    return Keeping()
