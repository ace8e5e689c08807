"""The guided loop's networks on ONNX Runtime, from a folder of graphs that `pfungst export` wrote.

Shapes: B batch, C latent channels, h w latent size, H W image size, K classes.

A folder holds ONNX files and `manifest.json`. Before anything runs, the manifest's own digest, the hash of every file,
the version that wrote it and the hashes of prior and guide are compared: graphs of other weights would run just as
well and be wrong. A provider that is not the one asked for is an error too, because ONNX Runtime would fall back to the
CPU without a word.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path as FilePath
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from torch import Tensor, nn

from engine.errors import ClassifierError, InputError, ModelError, RecipeError, WeightsError
from engine.guidance import Model
from engine.path import Path
from engine.prior import Prior, content_hash
from engine.recipe import Recipe

MANIFEST = "manifest.json"
FORMAT = 1
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
EXPORTABLE = ("surrogate", "vanilla")
GRAPHS = ("encoder", "decoder", "velocity", "surrogate", "guidance")
DTYPES = {"float32": (torch.float32, np.float32), "int64": (torch.int64, np.int64)}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Port(_Record):
    """An input or output of a graph; a size of None is the batch."""

    name: str
    dtype: Literal["float32", "int64"]
    shape: tuple[int | None, ...]


class GraphFile(_Record):
    """One ONNX file: for a fixed batch, or for every batch up to the largest."""

    file: str
    sha256: str
    data: str | None = None  # external weights of graphs beyond 2 GB
    data_sha256: str | None = None
    fixed_batch: bool
    largest_batch: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @field_validator("file", "data")
    @classmethod
    def _plain_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f"{name!r} is no plain file name")
        return name


class Source(_Record):
    """What the graphs were made from; anything else in its place makes them wrong."""

    prior: str
    guide: str
    gradient: str
    loss: str
    temperature: float

    @classmethod
    def of(cls, prior: Prior, guide: Model, recipe: Recipe) -> "Source":
        """The source that a run with these models and settings needs."""
        check_gradient(recipe)
        return cls(
            prior=prior.content_hash,
            guide=guide_hash(guide),
            gradient=recipe.gradient,
            loss=recipe.loss,
            temperature=recipe.temperature,
        )


class Manifest(_Record):
    """What an exported folder holds, of what, and how far it was proven."""

    format: int
    pfungst: str
    versions: dict[str, str]
    opset: int
    precision: Literal["fp32", "fp16", "bf16"]
    height: int
    width: int
    cotangent_scale: float
    source: Source
    graphs: dict[str, tuple[GraphFile, ...]]
    parity: dict[str, Any]
    digest: str = ""

    def sealed(self) -> "Manifest":
        """The manifest with the digest of everything else in it."""
        return self.model_copy(update={"digest": self.content_digest()})

    def content_digest(self) -> str:
        """SHA-256 over all fields but the digest."""
        content = self.model_dump(mode="json", exclude={"digest"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_gradient(recipe: Recipe) -> None:
    """A RecipeError for gradient sources that are more than one backward pass."""
    if recipe.gradient not in EXPORTABLE:
        raise RecipeError(
            f"The gradient source {recipe.gradient!r} cannot be exported, only {' and '.join(EXPORTABLE)}; run it in "
            "torch."
        )


def network_of(guide: Any) -> nn.Module:
    """The torch module behind a guide: the guide itself, or the network of a distilled surrogate."""
    network = guide if isinstance(guide, nn.Module) else getattr(guide, "network", None)
    if not isinstance(network, nn.Module):
        raise ClassifierError("Only a guide that is a torch module can be exported; distil a surrogate of this one.")
    return network


def guide_hash(guide: Any) -> str:
    """SHA-256 of a guide: its own, or that of its weights."""
    network = network_of(guide)
    own = getattr(network, "content_hash", None)
    return own if isinstance(own, str) else content_hash(network)


def read_manifest(folder: FilePath | str) -> Manifest:
    """The manifest of an exported folder; a WeightsError if it is missing, altered or of another version."""
    file = FilePath(folder) / MANIFEST
    try:
        manifest = Manifest.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise WeightsError(f"{folder} holds no exported graphs: {MANIFEST} is missing. Run `pfungst export`.") from None
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(f"{file} cannot be read as a manifest ({reason}). Run `pfungst export` again.") from None
    if manifest.digest != manifest.content_digest():
        raise WeightsError(f"{file} was altered after the export. Run `pfungst export` again.")
    if manifest.format != FORMAT or manifest.pfungst != _version():
        raise WeightsError(
            f"{folder} was exported by pfungst {manifest.pfungst} (format {manifest.format}); this is {_version()} "
            f"(format {FORMAT}). Run `pfungst export` again."
        )
    return manifest


def read_graph(folder: FilePath, graph: GraphFile) -> bytes:
    """The verified content of an ONNX file; its external weights, if any, are verified in place."""
    if graph.data is not None:
        _verify(folder / graph.data, graph.data_sha256)
    return _verify(folder / graph.file, graph.sha256, keep=True)


def _verify(file: FilePath, sha256: str | None, keep: bool = False) -> bytes:
    try:
        if keep:
            content = file.read_bytes()
            found = hashlib.sha256(content).hexdigest()
        else:
            content = b""
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        raise WeightsError(f"The exported file {file} is missing. Run `pfungst export` again.") from None
    if found != sha256:
        raise WeightsError(f"The exported file {file} is cut short or altered. Run `pfungst export` again.")
    return content


class OnnxRuntime:
    """A prior and a guide as ONNX graphs, bound to a recipe's path.

    `provider` is cpu, cuda or tensorrt. On the CPU, threads do not spin while they wait: torch works between the calls
    on the same cores. A batch that no graph was exported for is padded up to the next fixed size, and refused beyond
    the largest.
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
        self._path = prior.path(recipe.steps, recipe.strength, self.manifest.height, self.manifest.width)
        self._device = torch.device("cpu") if provider == "cpu" else torch.device("cuda", device_id)
        self._path.to(self._device)
        self._scale = torch.tensor(self.manifest.cotangent_scale, device=self._device)
        self._sessions: dict[str, Any] = {}
        for name in GRAPHS:
            if name != "surrogate":  # the loop never asks for it alone
                for graph in self._files(name):
                    self._session(graph)

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

    def _files(self, name: str) -> tuple[GraphFile, ...]:
        files = self.manifest.graphs.get(name)
        if not files:
            raise WeightsError(f"{self.folder} lacks the graph {name!r}. Run `pfungst export` again.")
        return files

    def _run(self, name: str, inputs: list[Tensor]) -> list[Tensor]:
        batch = len(inputs[0])
        graph = pick_graph(name, self._files(name), batch)
        check_shapes(name, graph, inputs)
        missing = graph.largest_batch - batch if graph.fixed_batch else 0
        tensors = [
            _padded(x.detach().to(DTYPES[port.dtype][0]), missing if None in port.shape else 0).contiguous()
            for x, port in zip(inputs, graph.inputs, strict=True)
        ]
        session = self._session(graph)
        outputs = (
            self._run_host(session, graph, tensors)
            if self.provider == "cpu"
            else self._run_device(session, graph, tensors)
        )
        return [x[:batch] for x in outputs] if missing else outputs

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

    def _session(self, graph: GraphFile) -> Any:
        if graph.file not in self._sessions:
            content: bytes | str = read_graph(self.folder, graph)
            if graph.data is not None:
                content = str(self.folder / graph.file)  # external weights are found beside the file only
            self._sessions[graph.file] = open_session(
                content, provider=self.provider, threads=self.threads, device_id=self.device_id
            )
        return self._sessions[graph.file]


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
    settings: Mapping[str, Any] = {} if provider == "cpu" else {"device_id": device_id}
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
    return session


def check_source(folder: FilePath, manifest: Manifest, wanted: Source) -> None:
    """The graphs were made from these very models and this loss."""
    for name in Source.model_fields:
        exported, asked = getattr(manifest.source, name), getattr(wanted, name)
        if exported != asked:
            raise WeightsError(
                f"The graphs in {folder} were exported for another {name} ({exported!s:.16} is not {asked!s:.16}). Run "
                "`pfungst export` for this one."
            )


def pick_graph(name: str, files: tuple[GraphFile, ...], batch: int) -> GraphFile:
    """The smallest graph that takes a batch."""
    fitting = [graph for graph in files if batch <= graph.largest_batch]
    if batch < 1 or not fitting:
        largest = max(graph.largest_batch for graph in files)
        raise InputError(
            f"A batch of {batch} is outside what {name} was exported for, 1 to {largest}. Send fewer images at once, "
            "or export again with a larger --batch."
        )
    return min(fitting, key=lambda graph: graph.largest_batch)


def check_shapes(name: str, graph: GraphFile, inputs: list[Tensor]) -> None:
    """Everything but the batch has the size that the graph was exported for."""
    for port, x in zip(graph.inputs, inputs, strict=True):
        if list(port.shape[1:]) != list(x.shape[1:]) or len(port.shape) != x.ndim:
            expected = ["B" if size is None else size for size in port.shape]
            raise InputError(
                f"{name} was exported for {port.name} {expected}; this is {list(x.shape)}. Resize the images, or "
                "export for their resolution."
            )


def _padded(x: Tensor, missing: int) -> Tensor:
    """The last sample again, so that padding holds values that a network knows."""
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing else x


@cache
def _version() -> str:
    return version("pfungst")
