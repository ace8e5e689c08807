"""One entrance for every kind of classifier: what the word after --classifier means.

folder                  Hugging Face image classification, safetensors weights
*.onnx                  ONNX file, with *.json beside it or metadata inside
*.yaml, *.yml, *.json   a remote endpoint, described as in `audit.remote_classifier`
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from audit.classifier import Classifier, first_line, load_classifier
from audit.onnx_classifier import OnnxClassifier
from audit.remote_classifier import RemoteClassifier, RemoteEndpoint
from engine.errors import ClassifierError, WeightsError

PICKLED = frozenset({".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib"})
ENDPOINTS = frozenset({".yaml", ".yml", ".json"})
MAX_ENDPOINT_BYTES = 4 * 2**20


def open_classifier(
    source: str | Path,
    *,
    labels: Sequence[str] | None = None,
    size: int | tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    output: str | None = None,
    allowed_hosts: Sequence[str] | None = None,
    allow_private: bool | None = None,
) -> Classifier:
    """The classifier at `source`.

    `labels`, `size`, `mean`, `std` and `output` are for ONNX files that do not say them. `allowed_hosts` and
    `allow_private` are the operator's word on remote endpoints and take the place of what an endpoint's file says.
    """
    if "://" in str(source):
        raise ClassifierError(
            "A remote classifier is named by a file with its url, labels and preprocessing, not by an address alone."
        )
    path = Path(source)
    kind = path.suffix.lower()
    if not path.exists():
        raise ClassifierError(f"There is no classifier at {path}.")
    given = {"labels": labels, "size": size, "mean": mean, "std": std, "output": output}
    stated = {name: value for name, value in given.items() if value is not None}
    if kind == ".onnx" and path.is_file():
        return OnnxClassifier.open(path, **stated)  # type: ignore[arg-type]
    if stated:
        raise ClassifierError(f"{next(iter(stated))} is for ONNX files; {path} brings its own.")
    if path.is_dir():
        return load_classifier(path)
    if kind in PICKLED:
        raise WeightsError(
            f"{path} is a pickle, which could run any code and is never opened. Save the model with "
            "save_pretrained(..., safe_serialization=True) as a Hugging Face folder of safetensors, or as ONNX."
        )
    if kind in ENDPOINTS:
        endpoint = RemoteEndpoint(**_endpoint(path))
        return RemoteClassifier(endpoint, allowed_hosts=allowed_hosts, allow_private=allow_private)
    if kind == ".safetensors":
        raise ClassifierError(f"{path} holds weights alone; name the Hugging Face folder that it lies in.")
    raise ClassifierError(
        f"{path} is no classifier; name a Hugging Face folder, an .onnx file, or a .yaml file of a remote endpoint."
    )


def _endpoint(file: Path) -> dict[str, Any]:
    """The settings in an endpoint's file."""
    try:
        if file.stat().st_size > MAX_ENDPOINT_BYTES:
            raise ClassifierError(f"{file} is too large for the description of an endpoint.")
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if file.suffix.lower() == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ClassifierError(f"{file} cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ClassifierError(f"{file} has to hold the settings of an endpoint by name.")
    return content
