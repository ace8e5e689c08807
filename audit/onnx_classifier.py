"""Classifiers in ONNX files, run by ONNX Runtime on the CPU.

A file is parsed and judged before a session is made of it: only operators that ONNX Runtime brings along, only
weights inside the file or beside it, one image input, one answer per class. Labels and preprocessing stand in a JSON
file of the same name (model.onnx, model.json) or in the model's metadata:

    {"labels": ["cat", "dog"], "size": [224, 224], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
     "resample": "bilinear", "output": "logits"}

Shapes: images [B, 3, H, W] in [0, 1] of any size, logits [B, classes].
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from audit.classifier import ClassifierSettings, Output, QueriedClassifier, first_line
from engine.errors import ClassifierError, WeightsError

DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
"""Operator sets that are part of ONNX Runtime; any other would need a library that is loaded as code."""
IMAGE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
ANSWER_TYPES = {"tensor(float)", "tensor(float16)", "tensor(double)"}
MAX_BYTES = 2**31
"""What one protobuf message can hold; larger weights lie in files beside it."""
BATCH = 64
TIMEOUT = 300.0


class OnnxClassifier(QueriedClassifier):
    """An ONNX graph from normalised images to logits or probabilities, with what belongs to it."""

    def __init__(
        self, session: onnxruntime.InferenceSession, settings: ClassifierSettings, weights_hash: str, timeout: float
    ) -> None:
        self.session = session
        self.timeout = timeout
        image = _only(session.get_inputs(), "input")
        answer = _only(session.get_outputs(), "output")
        batch = _check_image(image, settings)
        _check_answer(answer, settings)
        super().__init__(settings, batch or BATCH, fixed_batch=batch is not None)
        self._input, self._output, self._type = image.name, answer.name, IMAGE_TYPES[image.type]
        self._weights_hash = weights_hash
        self._probe()

    @classmethod
    def open(
        cls,
        file: Path | str,
        *,
        labels: Sequence[str] | None = None,
        size: int | tuple[int, int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        resample: str | None = None,
        output: str | None = None,
        timeout: float = TIMEOUT,
    ) -> Self:
        """The classifier in a file; what is given here goes before the JSON file, and that before the metadata.

        `timeout` is in seconds for one batch: a graph may hold a loop that never ends.
        """
        file = Path(file)
        content = _read(file)
        model = _parse(file, content)
        _check_operators(model)
        external = _external_files(model, file.parent)
        given = {"labels": labels, "size": size, "mean": mean, "std": std, "resample": resample, "output": output}
        settings = _settings(file, model, {key: value for key, value in given.items() if value is not None})
        session = _session(file, content)
        return cls(session, settings, _hash(content, external), timeout)

    @property
    def content_hash(self) -> str:
        """SHA-256 over the file, the weight files beside it, the labels and the preprocessing."""
        settings = json.dumps(self.settings.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(f"{self._weights_hash}{settings}".encode()).hexdigest()

    def _ask(self, images: Tensor) -> tuple[Tensor, Output]:
        x = self.settings.prepare(images).numpy().astype(self._type)
        options = onnxruntime.RunOptions()
        stop = threading.Timer(self.timeout, setattr, (options, "terminate", True))
        stop.daemon = True
        stop.start()
        try:
            (answer,) = self.session.run([self._output], {self._input: x}, options)
        except Exception as error:  # ONNX Runtime's errors have no common base of their own
            if options.terminate:
                raise ClassifierError(f"The classifier did not answer within {self.timeout:g} s.") from None
            raise ClassifierError(f"The classifier failed in ONNX Runtime: {first_line(error)}") from None
        finally:
            stop.cancel()
        return torch.from_numpy(np.asarray(answer, dtype=np.float32)), self.settings.output


def _read(file: Path) -> bytes:
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise WeightsError(f"{file} has {size / 2**30:.1f} GiB; keep large weights as external data beside it.")
        return file.read_bytes()
    except OSError as error:
        raise ClassifierError(f"{file} cannot be read: {error.strerror}.") from None


def _parse(file: Path, content: bytes) -> onnx.ModelProto:
    """The model, with external data left where it is."""
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception:  # protobuf's DecodeError; protobuf belongs to onnx and is no dependency of ours
        raise WeightsError(f"{file} is no ONNX file, or it is cut short.") from None
    if not model.graph.node:
        raise WeightsError(f"{file} is no ONNX file: it holds no graph.")
    return model


def _nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes and those of the graphs inside them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _nodes(graph.node)


def _all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    yield from _nodes(model.graph.node)
    for function in model.functions:
        yield from _nodes(function.node)


def _check_operators(model: onnx.ModelProto) -> None:
    """Every operator is built in, or a function that the model itself defines out of such operators."""
    own = {(function.domain, function.name) for function in model.functions}
    for node in _all_nodes(model):
        if node.domain not in DOMAINS and (node.domain, node.op_type) not in own:
            raise ClassifierError(
                f"The ONNX file uses the custom operator {node.op_type!r:.60} of {node.domain!r:.60}; only operators "
                "that are built into ONNX Runtime are run."
            )
    _check_functions(model)


def _check_functions(model: onnx.ModelProto) -> None:
    """No function calls itself, through others or not: it would be unfolded without end."""
    calls = {
        (function.domain, function.name): {(node.domain, node.op_type) for node in _nodes(function.node)}
        for function in model.functions
    }
    # Functions that call none but settled ones are settled; what is left over when nothing changes goes in circles.
    left = dict(calls)
    while left:
        settled = [name for name, called in left.items() if not called & left.keys()]
        if not settled:
            raise ClassifierError(f"The ONNX file's function {next(iter(left))[1]!r:.60} calls itself.")
        for name in settled:
            del left[name]


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that a model stores, in whatever corner."""
    yield from _graph_tensors(model.graph)
    for node in _all_nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sparse in (
                *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
                *attribute.sparse_tensors,
            ):
                yield from (sparse.values, sparse.indices)
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graph_tensors(graph)


def _external_files(model: onnx.ModelProto, folder: Path) -> list[Path]:
    """The weight files that a model names, all of them real files inside its folder."""
    home = folder.resolve()
    files: set[Path] = set()
    for tensor in _tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if not location or "\0" in location or not (home / location).resolve().is_relative_to(home):
            raise WeightsError(f"The ONNX file names weights outside its folder: {location!r:.80}.")
        file = (home / location).resolve()
        if not file.is_file():
            raise WeightsError(f"The ONNX file's weights {location!r:.80} are missing from its folder.")
        files.add(file)
    return sorted(files)


def _hash(content: bytes, external: list[Path]) -> str:
    digest = hashlib.sha256(content)
    for file in external:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _settings(file: Path, model: onnx.ModelProto, given: dict[str, Any]) -> ClassifierSettings:
    """Labels and preprocessing: as given, else from the JSON file, else from the metadata."""
    found = {**_metadata(model), **_sidecar(file.with_suffix(".json")), **given}
    size = _graph_size(model)
    if found.get("size") is None and size is not None:
        found["size"] = size
    for name, example in (("labels", '["cat", "dog"]'), ("size", "[224, 224]")):
        if found.get(name) is None:
            raise ClassifierError(
                f"{file} does not say its {name}; write them into {file.with_suffix('.json').name} as "
                f'{{"{name}": {example}}}.'
            )
    if found.get("mean") is None or found.get("std") is None:
        # A guess here would be a silent wrong answer.
        raise ClassifierError(
            f"{file} does not say its mean and std; write them into {file.with_suffix('.json').name} (mean [0, 0, 0] "
            "and std [1, 1, 1] if the graph normalises images in [0, 1] itself)."
        )
    return ClassifierSettings(**found)


def _sidecar(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ClassifierError(f"{file} cannot be read as JSON: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ClassifierError(f"{file} has to hold one JSON object.")
    return content


def _metadata(model: onnx.ModelProto) -> dict[str, Any]:
    """The settings among the model's metadata: JSON values, or bare words for resample and output."""
    found: dict[str, Any] = {}
    for entry in model.metadata_props:
        if entry.key in ("resample", "output"):
            found[entry.key] = entry.value.strip('"')
        elif entry.key in ClassifierSettings.model_fields:
            try:
                found[entry.key] = json.loads(entry.value)
            except (ValueError, RecursionError):
                raise ClassifierError(f"The ONNX file's metadata {entry.key!r} is no JSON.") from None
    return found


def _graph_size(model: onnx.ModelProto) -> tuple[int, int] | None:
    """(height, width) if the graph fixes them."""
    stored = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in stored and len(dims) == 4 and dims[2].dim_value > 0 and dims[3].dim_value > 0:
            return dims[2].dim_value, dims[3].dim_value
    return None


def _session(file: Path, content: bytes) -> onnxruntime.InferenceSession:
    """A session on the CPU, made of the very bytes that were checked."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised; nothing is printed
    options.intra_op_num_threads = torch.get_num_threads()
    # Spinning threads of ONNX Runtime would take the cores from torch between queries.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(file.parent.resolve()))
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors have no common base of their own
        raise ClassifierError(f"ONNX Runtime cannot open {file}: {first_line(error)}") from None


def _only(values: list[Any], kind: str) -> Any:
    if len(values) != 1:
        raise ClassifierError(f"The ONNX file has to have one {kind}; it has {len(values)}.")
    return values[0]


def _check_image(image: Any, settings: ClassifierSettings) -> int | None:
    """The number of images that the graph insists on, or None; its input has to be images of the stated size."""
    if image.type not in IMAGE_TYPES:
        raise ClassifierError(f"The ONNX file's input has to hold floats; it is a {image.type}.")
    shape = list(image.shape)
    if len(shape) != 4 or (isinstance(shape[1], int) and shape[1] != 3):
        raise ClassifierError(f"The ONNX file's input has to be images [B, 3, H, W]; it is {shape}.")
    for stated, fixed in zip(settings.size or (), shape[2:], strict=False):
        if isinstance(fixed, int) and stated != fixed:
            raise ClassifierError(f"The ONNX file takes images of {shape[2:]}, but its settings say {settings.size}.")
    return shape[0] if isinstance(shape[0], int) and shape[0] > 0 else None


def _check_answer(answer: Any, settings: ClassifierSettings) -> None:
    """The output has to be one number per class, as far as the graph says; the first answer shows the rest."""
    if answer.type not in ANSWER_TYPES:
        raise ClassifierError(f"The ONNX file's output has to hold floats; it is a {answer.type}.")
    shape = list(answer.shape or [])
    if shape and len(shape) != 2:
        raise ClassifierError(f"The ONNX file's output has to be [B, classes]; it is {shape}.")
    if shape and shape[1] == 1:
        raise ClassifierError("The ONNX file gives one logit; it has to give two, one for each class.")
    if shape and isinstance(shape[1], int) and shape[1] != len(settings.labels):
        raise ClassifierError(
            f"The ONNX file tells {shape[1]} classes apart, but its settings name {len(settings.labels)} labels."
        )
