"""One entrance for every kind of classifier, and what lies in wait behind it: pickles, code, damaged weights."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from audit.classifier import Classifier, HuggingFaceClassifier, ModuleClassifier
from audit.onnx_classifier import OnnxClassifier
from audit.remote_classifier import RemoteClassifier
from audit.sources import open_classifier
from engine.errors import ClassifierError, ModelError, WeightsError
from engine.guidance import gradient_source
from engine.recipe import Recipe
from engine.tries import query
from tests.audit.test_remote_classifier import JSON, plain, serving

PREPROCESSING = {"size": 16, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


class Canary:
    """Leaves a file behind if it is ever unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Hugging Face classifier of two classes."""
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4],
        depths=[1],
        layer_type="basic",
        id2label={0: "cat", 1: "dog"},
        label2id={"cat": 0, "dog": 1},
    )
    ResNetForImageClassification(config).save_pretrained(tmp_path / "classifier")
    (tmp_path / "classifier" / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING))
    return tmp_path / "classifier"


def test_a_folder_is_a_hugging_face_classifier(folder: Path) -> None:
    classifier = open_classifier(str(folder))
    assert isinstance(classifier, HuggingFaceClassifier)
    assert classifier.labels == ("cat", "dog")
    assert classifier.differentiable
    with pytest.raises(ClassifierError, match="labels is for ONNX files"):
        open_classifier(folder, labels=["a", "b"])


def test_an_onnx_file_is_an_onnx_classifier(tmp_path: Path) -> None:
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Flatten", ["p"], ["c"])]
    graph = helper.make_graph(
        [*nodes, helper.make_node("MatMul", ["c", "w"], ["y"])],
        "colours",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 2])],
        [numpy_helper.from_array(np.array([[4, 0], [0, 4], [0, 0]], dtype=np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    file = tmp_path / "Model.ONNX"
    file.write_bytes(model.SerializeToString())
    classifier = open_classifier(file, labels=["red", "green"], mean=[0, 0, 0], std=[1, 1, 1])
    assert isinstance(classifier, OnnxClassifier)
    assert torch.allclose(classifier(torch.ones(1, 3, 8, 8)), torch.tensor([[4.0, 4.0]]))


@pytest.mark.parametrize("name", ["endpoint.yaml", "endpoint.yml", "endpoint.json"])
def test_an_endpoint_file_is_a_remote_classifier(tmp_path: Path, name: str) -> None:
    """JSON is YAML, so one text serves for both."""
    with serving(plain) as server:
        file = tmp_path / name
        file.write_text(json.dumps({**JSON, "url": server.url}))
        classifier = open_classifier(file, allowed_hosts=["127.0.0.1"], allow_private=True)
        assert isinstance(classifier, RemoteClassifier)
        with pytest.raises(ClassifierError, match="private, loopback or link-local"):
            open_classifier(file)


@pytest.mark.parametrize("text", ["- a list", "", "a: [", "1: 2", "!!python/object/apply:os.system ['true']", "\x00"])
def test_an_endpoint_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "endpoint.yaml"
    file.write_text(text)
    with pytest.raises(ClassifierError, match=r"endpoint\.yaml"):
        open_classifier(file)


def test_the_canary_sings(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Canary(tmp_path / "trace")))
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".bin", ".ckpt", ".PT"])
def test_a_pickle_is_never_opened(tmp_path: Path, suffix: str) -> None:
    file, trace = tmp_path / f"model{suffix}", tmp_path / "trace"
    file.write_bytes(pickle.dumps(Canary(trace)))
    with pytest.raises(WeightsError, match=r"never opened.*safe_serialization=True"):
        open_classifier(file)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_a_folder_is_never_opened(folder: Path, tmp_path: Path, name: str) -> None:
    trace = tmp_path / "trace"
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Canary(trace)}, folder / name)
    with pytest.raises(ModelError):
        open_classifier(folder)
    assert not trace.exists()


@pytest.mark.parametrize("shard", ["shard.bin", "../shard.safetensors", 7])
def test_an_index_can_name_nothing_but_safetensors_beside_it(folder: Path, tmp_path: Path, shard: object) -> None:
    trace = tmp_path / "trace"
    (folder / "model.safetensors").rename(folder.parent / "shard.safetensors")
    torch.save({"weight": Canary(trace)}, folder / "shard.bin")
    index = {"metadata": {}, "weight_map": {"classifier.1.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="only safetensors files beside it"):
        open_classifier(folder)
    assert not trace.exists()


def test_code_in_a_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nclass Own: ...\n")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own-network"
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForImageClassification": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClassifierError, match="not an image-classification folder"):
        open_classifier(folder)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        (2**60).to_bytes(8, "little") + b"{}",
        (10**8).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        b"",
        b"\x00" * 7,
        (64).to_bytes(8, "little") + b'{"w":{"dtype":"F32","shape":[99999999],"data_offsets":[0,4]}}   ',
    ],
)
def test_safetensors_with_an_absurd_header_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"classifier"):
        open_classifier(folder)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone", "There is no classifier"),
        ("model.safetensors", "name the Hugging Face folder"),
        ("model.h5", "is no classifier"),
        ("https://models.example/v2", "named by a file"),
        ("file:///etc/passwd", "named by a file"),
    ],
)
def test_anything_else_is_refused_with_what_to_do(tmp_path: Path, name: str, sentence: str) -> None:
    source: str | Path = name if "://" in name else tmp_path / name
    if isinstance(source, Path) and source.suffix:
        source.write_bytes(b"x")
    with pytest.raises(ClassifierError, match=sentence):
        open_classifier(source)


# Modules in this process


class Colours(nn.Module):
    """Four times the mean colour; in training mode, nonsense."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        return self.scale * x.mean((2, 3))


class Answering(nn.Module):
    """Answers whatever a function says."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(x)


def wrapped(module: nn.Module) -> ModuleClassifier:
    return ModuleClassifier(module, ["red", "green", "blue"], 8, [0.5, 0.5, 0.5], [0.25, 0.25, 0.25])


def test_a_module_is_normalised_for_and_given_back_as_it_was() -> None:
    module = Colours().train()
    classifier: Classifier = wrapped(module)
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    pooled = nn.functional.interpolate(images, size=(8, 8), mode="bilinear", antialias=True)
    expected = 4 * ((pooled - 0.5) / 0.25).mean((2, 3))
    assert torch.allclose(query(classifier, images), expected, atol=1e-5)
    assert torch.allclose(classifier.probabilities(images, batch=2), expected.softmax(1), atol=1e-5)
    assert module.training
    assert module.scale.requires_grad


def test_a_module_gives_its_own_gradient() -> None:
    classifier = wrapped(Colours())
    assert classifier.differentiable
    source = gradient_source(Recipe(gradient="vanilla", loss="target_logit"), classifier, classifier)
    gradient, _ = source(torch.rand(2, 3, 8, 8), torch.tensor([0, 2]))
    assert torch.allclose(gradient[0, 0], torch.full((8, 8), -4 / 0.25 / 64))
    assert not gradient[0, 1:].any()


def test_the_hash_of_a_module_follows_weights_and_settings() -> None:
    module = Colours()
    before = wrapped(module).content_hash
    assert wrapped(Colours()).content_hash == before
    module.scale.data.fill_(3.0)
    assert wrapped(module).content_hash != before
    other = ModuleClassifier(Colours(), ["a", "b", "c"], 8, [0.5, 0.5, 0.5], [0.25, 0.25, 0.25])
    assert other.content_hash != before


def broken(x: Tensor) -> Tensor:
    raise ZeroDivisionError("no colours today")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (broken, "raised ZeroDivisionError: no colours today"),
        (lambda x: x.mean((2, 3))[:1], r"answered \[1, 3\] for 2 images"),
        (lambda x: x.mean((1, 2, 3)), r"answered \[2\] for 2 images"),
        (lambda x: x.mean((1, 2, 3))[:, None], "A single logit"),
        (lambda x: x.mean((2, 3))[:, :2], "3 labels"),
        (lambda x: [1, 2, 3], "answered a list"),
    ],
)
def test_a_module_that_answers_wrongly_is_named(answer: Any, sentence: str) -> None:
    with pytest.raises(ClassifierError, match=sentence):
        wrapped(Answering(answer))(torch.rand(2, 3, 8, 8))


def test_a_module_that_answers_nan_is_refused_when_it_is_asked() -> None:
    with pytest.raises(ClassifierError, match="NaN"):
        query(wrapped(Answering(lambda x: x.mean((2, 3)) * float("nan"))), torch.rand(2, 3, 8, 8))
