"""A folder of graphs that `pfungst export` wrote, read for every runtime that executes such graphs.

Shapes: B batch.

A folder holds ONNX files and `manifest.json`. Before anything runs, the manifest's own digest, the hash of every file,
the version that wrote it and the hashes of prior and guide are compared: graphs of other weights would run just as
well and be wrong.
"""

import hashlib
import json
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path as FilePath
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from torch import Tensor, nn

from engine.errors import ClassifierError, InputError, RecipeError, WeightsError
from engine.guidance import Model
from engine.prior import Prior, content_hash
from engine.recipe import Recipe

MANIFEST = "manifest.json"
FORMAT = 1
EXPORTABLE = ("surrogate", "vanilla")
GRAPHS = ("encoder", "decoder", "velocity", "surrogate", "guidance")
IN_THE_LOOP = ("encoder", "decoder", "velocity", "guidance")
"""The surrogate alone is a graph too, but the loop never asks for it."""
DTYPES = {"float32": (torch.float32, np.float32), "int64": (torch.int64, np.int64)}
LARGEST_ERROR = 1e-4
"""Relative error that a sample of a float32 graph may have against eager torch."""
SMALLEST_COSINE = 0.999
"""Cosine with eager torch in float32 that a sample of a graph in lower precision has to reach."""


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


def check_source(folder: FilePath, manifest: Manifest, wanted: Source) -> None:
    """The graphs were made from these very models and this loss."""
    for name in Source.model_fields:
        exported, asked = getattr(manifest.source, name), getattr(wanted, name)
        if exported != asked:
            raise WeightsError(
                f"The graphs in {folder} were exported for another {name} ({exported!s:.16} is not {asked!s:.16}). Run "
                "`pfungst export` for this one."
            )


def check_parity(folder: FilePath, manifest: Manifest) -> None:
    """A WeightsError unless every graph was proven against eager torch when it was exported."""
    proven = manifest.parity.get("graphs", {})
    for files in manifest.graphs.values():
        for graph in files:
            outputs = proven.get(FilePath(graph.file).stem)
            if not outputs:
                raise WeightsError(
                    f"{folder} holds no parity figures for {graph.file}. Run `pfungst export` again, which proves it."
                )
            for name, worst in outputs.items():
                if not close_enough(manifest.precision, float(worst["error"]), float(worst["cosine"])):
                    raise WeightsError(
                        f"{graph.file} in {folder} missed the parity threshold: {name} has a relative error of "
                        f"{worst['error']:.1e} and a cosine of {worst['cosine']:.5f}. Run `pfungst export` again."
                    )


def close_enough(precision: str, error: float, cosine: float) -> bool:
    """Whether a sample's worst figures count as parity; NaN never does."""
    return error <= LARGEST_ERROR if precision == "fp32" else cosine >= SMALLEST_COSINE


def graph_files(folder: FilePath, manifest: Manifest, name: str) -> tuple[GraphFile, ...]:
    """The files of one graph."""
    files = manifest.graphs.get(name)
    if not files:
        raise WeightsError(f"{folder} lacks the graph {name!r}. Run `pfungst export` again.")
    return files


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


def padded(x: Tensor, missing: int) -> Tensor:
    """The last sample again, so that padding holds values that a network knows."""
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing else x


@cache
def _version() -> str:
    return version("pfungst")
