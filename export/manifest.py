"""The manifest of an exported folder: content hashes, contract, sources, versions and parity figures.

The folder's form and its checks at load time belong to the engine (engine.runtime.artifact_folder), which knows no
other room; what is written here is what is read there.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.errors import InputError
from engine.runtime.artifact_folder import FORMAT, MANIFEST, GraphFile, Manifest, Source, read_graph, read_manifest
from engine.writing import write_text
from export.graphs import Contract
from export.translate import OPSET

RECORDED = ("torch", "onnx", "onnxscript", "onnxruntime", "diffusers", "transformers")


def graph_file(contract: Contract, file: Path, *, fixed_batch: bool, largest_batch: int) -> GraphFile:
    """The entry of one ONNX file."""
    data = file.with_name(file.name + ".data")
    return GraphFile(
        file=file.name,
        sha256=sha256(file),
        data=data.name if data.is_file() else None,
        data_sha256=sha256(data) if data.is_file() else None,
        fixed_batch=fixed_batch,
        largest_batch=largest_batch,
        inputs=contract.inputs,
        outputs=contract.outputs,
    )


def write_manifest(
    folder: Path,
    *,
    source: Source,
    precision: str,
    size: tuple[int, int],
    cotangent_scale: float,
    graphs: dict[str, tuple[GraphFile, ...]],
    parity: dict[str, Any],
) -> Manifest:
    """Writes the manifest, which makes the folder count."""
    manifest = Manifest(
        format=FORMAT,
        pfungst=version("pfungst"),
        versions={name: version(name) for name in RECORDED},
        opset=OPSET,
        precision=precision,  # type: ignore[arg-type]
        height=size[0],
        width=size[1],
        cotangent_scale=cotangent_scale,
        source=source,
        graphs=graphs,
        parity=parity,
    ).sealed()
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
    return manifest


def verify(folder: Path | str) -> Manifest:
    """The manifest of a folder all of whose files are what was exported."""
    manifest = read_manifest(folder)
    for files in manifest.graphs.values():
        for graph in files:
            read_graph(Path(folder), graph)
    return manifest


@contextmanager
def replaced_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `out` when all went well, and vanishes otherwise.

    An `out` that is neither empty nor an export is somebody's: it is left alone.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST).is_file())):
        raise InputError(f"--out {out} exists and is no exported folder; name another.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        old = out.with_name(out.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            os.replace(out, old)
        os.replace(partial, out)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sha256(file: Path) -> str:
    """The hash of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
