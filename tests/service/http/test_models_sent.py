"""Models from strangers: an ONNX file or a folder of safetensors is opened and asked; a pickle never is."""

import io
import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from tests.audit.test_onnx_classifier import SETTINGS, external, save
from tests.service.http.conftest import Service, as_, zip_of
from worlds.store import WEIGHTS

STUDENT = WEIGHTS / "portraits" / "student"
UPLOAD = "/v1/classifiers/upload"


class Canary:
    """Leaves a file behind if it is ever unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (subprocess.check_call, ([sys.executable, "-c", f"open({str(self.file)!r}, 'w')"],))


def folder(**changed: bytes | None) -> dict[str, bytes]:
    """The embedded student's files, some replaced or left out."""
    files: dict[str, bytes | None] = {file.name: file.read_bytes() for file in STUDENT.iterdir()}
    files.update({name.replace("__", "."): content for name, content in changed.items()})
    return {name: content for name, content in files.items() if content is not None}


def sent(content: bytes, **data: str) -> dict[str, Any]:
    return {"files": {"file": ("model", content)}, "data": data}


@pytest.fixture
def onnx(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def test_an_onnx_file_is_taken_listed_audited_and_deleted(service: Service, onnx: Path) -> None:
    content = save(onnx).read_bytes()
    answer = service.client.post(UPLOAD, **sent(content, settings=json.dumps(SETTINGS), name="colours"))
    assert answer.status_code == 201, answer.text
    entry = answer.json()
    assert (entry["kind"], entry["name"], entry["labels"]) == ("uploaded", "colours", ["red", "green", "blue"])
    assert entry["size"] == [8, 8] and len(entry["sha256"]) == 64
    assert entry in service.client.get("/v1/classifiers").json()["classifiers"]
    audit = {"classifier": entry["id"], "dataset": "portraits"}
    assert service.client.post("/v1/audits", json=audit).status_code == 202
    assert service.client.delete(f"/v1/classifiers/{entry['id']}").status_code == 204
    service.refuses(404, "not_found", "DELETE", f"/v1/classifiers/{entry['id']}")
    service.refuses(422, "unknown_classifier", "POST", "/v1/audits", json=audit, field="classifier")
    assert not list(service.backend.registry.home("classifiers").iterdir())


def test_a_safetensors_folder_is_taken(service: Service) -> None:
    answer = service.client.post(UPLOAD, **sent(zip_of(folder())))
    assert answer.status_code == 201, answer.text
    assert answer.json()["labels"] == ["dark", "blond"]
    inside = zip_of({f"student/{name}": content for name, content in folder().items()})
    again = service.client.post(UPLOAD, **sent(inside))
    assert again.json()["sha256"] == answer.json()["sha256"]


def test_a_pickle_is_never_opened(service: Service, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        service.refuses(422, "pickle", "POST", UPLOAD, **sent(pickle.dumps(Canary(canary), protocol)))
    for protocol in (0, 1):
        service.refuses(422, "bad_model", "POST", UPLOAD, **sent(pickle.dumps(Canary(canary), protocol)))
    stream = io.BytesIO()
    torch.save({"weights": Canary(canary)}, stream)
    service.refuses(422, "pickle", "POST", UPLOAD, **sent(stream.getvalue()))
    hidden = zip_of(folder(pytorch_model__bin=pickle.dumps(Canary(canary))))
    service.refuses(422, "pickle", "POST", UPLOAD, **sent(hidden))
    index = json.dumps({"metadata": {}, "weight_map": {"a": "weights.json"}}).encode()
    sharded = folder(model__safetensors=None, weights__json=pickle.dumps(Canary(canary)))
    sharded["model.safetensors.index.json"] = index
    service.refuses(422, "bad_model", "POST", UPLOAD, **sent(zip_of(sharded)))
    assert not canary.exists()


@pytest.mark.parametrize(
    "files",
    [
        folder(config__json=None),
        folder(preprocessor_config__json=None),
        folder(model__safetensors=None),
        folder(model__safetensors=struct.pack("<Q", 2**60) + b"{}"),
        folder(model__safetensors=struct.pack("<Q", 8) + b"{}      "),
        folder(model__safetensors=b""),
        folder(config__json=b"[]"),
        folder(config__json=b"{" * 5000),
        folder(config__json=b'{"model_type": "nothing", "id2label": {"0": "a", "1": "b"}}'),
        folder(config__json=b'{"model_type": 7, "id2label": {"0": "a", "x": "b"}}'),
        folder(preprocessor_config__json=b'{"size": "large"}'),
    ],
)
def test_a_folder_that_is_no_classifier_is_refused(service: Service, files: dict[str, bytes]) -> None:
    message = service.refuses(422, "bad_model", "POST", UPLOAD, **sent(zip_of(files)))
    assert str(service.folder) not in message


@pytest.mark.parametrize(
    "content", [b"", b"\x08\x07", b"GIF89a", struct.pack("<Q", 2) + b"{}", b"\0" * 100, b"PK\x03\x04", b"x" * 5000]
)
def test_a_file_that_is_no_model_is_refused(service: Service, content: bytes) -> None:
    service.refuses(422, None, "POST", UPLOAD, **sent(content))


def graphs(onnx: Path) -> dict[str, bytes]:
    """ONNX files that cannot be trusted."""
    pooled = helper.make_node("GlobalAveragePool", ["x"], ["pooled"])
    flat = helper.make_node("Flatten", ["pooled"], ["colour"])
    found = {"weights outside": external(onnx, "../outside.bin").read_bytes()}
    custom = [pooled, flat, helper.make_node("Evil", ["colour"], ["y"], domain="evil")]
    found["custom operator"] = save(onnx, custom, domains=("evil",)).read_bytes()
    found["wrong rank"] = save(onnx, image=["B", "pixels"]).read_bytes()
    found["one logit"] = save(onnx, weights=np.ones((3, 1), np.float32)).read_bytes()
    nan = [
        pooled,
        flat,
        helper.make_node("MatMul", ["colour", "weights"], ["z"]),
        helper.make_node("Log", ["z"], ["y"]),
    ]
    found["NaN"] = save(onnx, nan, weights=-np.eye(3, dtype=np.float32)).read_bytes()
    first = helper.make_node("Constant", [], ["n"], value=helper.make_tensor("n", TensorProto.INT64, [1], [0]))
    one = [pooled, flat, first, helper.make_node("Gather", ["colour", "n"], ["y"], axis=0)]
    found["wrong batch"] = save(onnx, one).read_bytes()
    return found


def test_untrustworthy_graphs_are_refused(service: Service, onnx: Path) -> None:
    settings = json.dumps(SETTINGS | {"mean": [0, 0, 0], "std": [1, 1, 1]})
    for name, content in graphs(onnx).items():
        message = service.refuses(422, "bad_model", "POST", UPLOAD, **sent(content, settings=settings))
        assert str(service.folder) not in message, name
    whole = save(onnx).read_bytes()
    service.refuses(422, "bad_model", "POST", UPLOAD, **sent(whole))  # it does not say its labels
    for wrong in ("[]", "{", '{"labels": ["a"], "labels": ["b"]}', "NaN"):
        service.refuses(422, None, "POST", UPLOAD, field="settings", **sent(whole, settings=wrong))
    service.refuses(422, "bad_model", "POST", UPLOAD, **sent(whole, settings='{"unknown": 1}'))
    service.refuses(422, None, "POST", UPLOAD, **sent(zip_of(folder()), settings="{}"))
    service.refuses(422, "invalid", "POST", UPLOAD, **sent(whole, name="a\nb"))


def test_a_graph_that_never_ends_is_stopped(service: Service, onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.registry.CHECK_SECONDS", 0.3)
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Sigmoid", ["v"], ["v2"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("c2", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v2", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["colour"]),
        helper.make_node("Constant", [], ["n"], value=helper.make_tensor("n", TensorProto.INT64, [], [2**62])),
        helper.make_node("Constant", [], ["go"], value=helper.make_tensor("g", TensorProto.BOOL, [], [True])),
        helper.make_node("Loop", ["n", "go", "colour"], ["y"], body=body),
    ]
    content = save(onnx, nodes).read_bytes()
    assert "did not answer" in service.refuses(
        422, "bad_model", "POST", UPLOAD, **sent(content, settings=json.dumps(SETTINGS))
    )


def test_an_upload_is_its_owners(guarded: Service, onnx: Path) -> None:
    content = save(onnx).read_bytes()
    uploaded = guarded.client.post(UPLOAD, headers=as_("alice"), **sent(content, settings=json.dumps(SETTINGS)))
    id = uploaded.json()["id"]
    assert id in guarded.client.get("/v1/classifiers", headers=as_("alice")).text
    assert id not in guarded.client.get("/v1/classifiers", headers=as_("bob")).text
    audit = {"classifier": id, "dataset": "portraits"}
    assert guarded.client.post("/v1/audits", headers=as_("bob"), json=audit).status_code == 422
    assert guarded.client.delete(f"/v1/classifiers/{id}", headers=as_("bob")).status_code == 404
    assert guarded.client.delete(f"/v1/classifiers/{id}", headers=as_("root")).status_code == 204


def test_a_configured_classifier_is_opened_when_it_is_registered(service: Service) -> None:
    answer = service.client.post("/v1/classifiers", json={"source": "portraits/twin"})
    assert answer.status_code == 201
    assert answer.json()["labels"] == ["dark", "blond"]
    assert answer.json() in service.client.get("/v1/classifiers").json()["classifiers"]
    service.refuses(422, "unknown_classifier", "POST", "/v1/classifiers", json={"source": "nobody"}, field="source")
