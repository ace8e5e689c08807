"""ONNX classifiers: right answers from tiny graphs, and every graph that cannot be trusted refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from audit.onnx_classifier import OnnxClassifier
from engine.errors import ClassifierError, WeightsError
from engine.guidance import gradient_source
from engine.recipe import Recipe
from engine.tries import query

WEIGHTS = np.array([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]], dtype=np.float32)
SETTINGS: dict[str, Any] = {
    "labels": ["red", "green", "blue"],
    "size": [8, 8],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.25, 0.5],
}


def save(
    file: Path,
    nodes: list[onnx.NodeProto] | None = None,
    *,
    image: list[Any] | None = None,
    answer: list[Any] | None = None,
    weights: np.ndarray = WEIGHTS,
    settings: dict[str, Any] | None = SETTINGS,
    domains: tuple[str, ...] = (),
    functions: tuple[onnx.FunctionProto, ...] = (),
) -> Path:
    """A graph whose logits are weights · mean colour, unless other nodes are given, and its settings beside it."""
    nodes = nodes or [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["colour"]),
        helper.make_node("MatMul", ["colour", "weights"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image or ["B", 3, "H", "W"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, answer or ["B", weights.shape[1]])],
        [numpy_helper.from_array(weights, "weights")],
    )
    opsets = [helper.make_opsetid("", 18), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=9)
    file.write_bytes(model.SerializeToString())
    if settings is not None:
        file.with_suffix(".json").write_text(json.dumps(settings))
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def expected(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(SETTINGS[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return ((images - mean) / std).mean((2, 3)) @ torch.from_numpy(WEIGHTS)


def test_logits_are_those_of_the_graph_on_normalised_images(file: Path, images: torch.Tensor) -> None:
    classifier = OnnxClassifier.open(save(file))
    assert classifier.labels == ("red", "green", "blue")
    assert classifier.size == (8, 8)
    assert torch.allclose(classifier(images), expected(images), atol=1e-5)
    assert torch.allclose(query(classifier, images), expected(images), atol=1e-5)
    assert torch.allclose(classifier.probabilities(images, batch=2), expected(images).softmax(1), atol=1e-5)


def test_images_of_any_size_are_brought_to_the_classifiers_own(file: Path) -> None:
    classifier = OnnxClassifier.open(save(file))
    flat, large = torch.full((1, 3, 8, 8), 0.3), torch.full((1, 3, 30, 21), 0.3)
    assert torch.allclose(classifier(flat), classifier(large), atol=1e-5)


def test_settings_come_from_arguments_then_the_json_file_then_the_metadata(file: Path) -> None:
    save(file, settings=None)
    model = onnx.load(file)
    stored = {**SETTINGS, "labels": ["a", "b", "c"], "size": [6, 6]}
    helper.set_model_props(model, {**{key: json.dumps(value) for key, value in stored.items()}, "resample": "bicubic"})
    onnx.save(model, file)
    assert OnnxClassifier.open(file).settings.model_dump() == {
        "labels": ("a", "b", "c"),
        "size": (6, 6),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.25, 0.5),
        "resample": "bicubic",
        "output": "logits",
    }
    file.with_suffix(".json").write_text(json.dumps({"labels": ["d", "e", "f"]}))
    assert OnnxClassifier.open(file).labels == ("d", "e", "f")
    assert OnnxClassifier.open(file, labels=["g", "h", "i"]).labels == ("g", "h", "i")


def test_a_static_batch_is_filled_up(file: Path, images: torch.Tensor) -> None:
    classifier = OnnxClassifier.open(save(file, image=[4, 3, 8, 8], answer=[4, 3]))
    assert classifier.batch == 4
    assert torch.allclose(classifier(images), expected(images), atol=1e-5)
    assert classifier(images[:0]).shape == (0, 3)


def test_a_graph_that_ends_in_a_softmax_gives_log_probabilities(file: Path, images: torch.Tensor) -> None:
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["colour"]),
        helper.make_node("MatMul", ["colour", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["y"]),
    ]
    classifier = OnnxClassifier.open(save(file, nodes), output="probabilities")
    assert torch.allclose(classifier(images), expected(images).log_softmax(1), atol=1e-5)
    with pytest.raises(ClassifierError, match="say output: probabilities"):
        OnnxClassifier.open(file)


def test_logits_that_are_called_probabilities_are_refused(file: Path) -> None:
    with pytest.raises(ClassifierError, match="no probabilities"):
        OnnxClassifier.open(save(file), output="probabilities")


def test_the_hash_follows_weights_and_settings(file: Path) -> None:
    before = OnnxClassifier.open(save(file)).content_hash
    assert OnnxClassifier.open(file).content_hash == before
    assert OnnxClassifier.open(file, mean=[0.4, 0.5, 0.5]).content_hash != before
    assert OnnxClassifier.open(save(file, weights=WEIGHTS * 2)).content_hash != before


def test_gradient_sources_that_need_the_classifiers_own_gradient_are_refused(file: Path, images: torch.Tensor) -> None:
    classifier = OnnxClassifier.open(save(file))
    assert not classifier.differentiable
    targets = torch.zeros(len(images), dtype=torch.long)
    for name in ("vanilla", "smoothgrad", "ig"):
        with pytest.raises(ClassifierError, match="'surrogate'"):
            gradient_source(Recipe(gradient=name), classifier, classifier)(images, targets)
    with pytest.raises(ClassifierError, match="SmoothDiff"):
        gradient_source(Recipe(gradient="smoothdiff"), classifier, classifier)(images, targets)


@pytest.mark.parametrize("missing", ["labels", "mean", "std"])
def test_what_is_not_said_is_asked_for(file: Path, missing: str) -> None:
    save(file, settings={key: value for key, value in SETTINGS.items() if key != missing})
    with pytest.raises(ClassifierError, match=rf"does not say its .*{missing}.*model\.json"):
        OnnxClassifier.open(file)


def test_a_size_is_taken_from_the_graph_or_asked_for(file: Path) -> None:
    settings = {key: value for key, value in SETTINGS.items() if key != "size"}
    assert OnnxClassifier.open(save(file, image=["B", 3, 8, 10], settings=settings)).size == (8, 10)
    with pytest.raises(ClassifierError, match="does not say its size"):
        OnnxClassifier.open(save(file, settings=settings))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"labels": ["red", "green"]}, "3 classes apart, but its settings name 2 labels"),
        ({"labels": ["red"]}, "'labels' is wrong"),
        ({"labels": "red"}, "'labels' is wrong"),
        ({"std": [1, 1, 0]}, "std has to be above 0"),
        ({"mean": [0, 0]}, "mean"),
        ({"mean": [float("nan")] * 3}, "finite"),
        ({"size": [0, 8]}, "'size.0' is wrong"),
        ({"size": [10**6, 8]}, "'size.0' is wrong"),
        ({"resample": "magic"}, "'resample' is wrong"),
        ({"colour": "grey"}, "has no setting 'colour'"),
    ],
)
def test_wrong_settings_are_named(file: Path, changed: dict[str, Any], sentence: str) -> None:
    save(file, settings={**SETTINGS, **changed})
    with pytest.raises(ClassifierError, match=sentence):
        OnnxClassifier.open(file)


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000])
def test_a_broken_json_file_is_named(file: Path, text: str) -> None:
    save(file).with_suffix(".json").write_text(text)
    with pytest.raises(ClassifierError, match=r"model\.json"):
        OnnxClassifier.open(file)


def test_a_size_that_the_graph_does_not_take_is_refused(file: Path) -> None:
    with pytest.raises(ClassifierError, match=r"takes images of \[16, 16\]"):
        OnnxClassifier.open(save(file, image=["B", 3, 16, 16]))


@pytest.mark.parametrize("content", [b"", b"no protobuf at all", b"\x80\x04cos\nsystem\n"])
def test_a_file_that_is_no_onnx_is_refused(file: Path, content: bytes) -> None:
    save(file).write_bytes(content)
    with pytest.raises(WeightsError, match="no ONNX file"):
        OnnxClassifier.open(file)


def test_a_cut_file_is_refused(file: Path) -> None:
    content = save(file).read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match="cut short"):
        OnnxClassifier.open(file)


def test_a_custom_operator_is_refused(file: Path) -> None:
    nodes = [helper.make_node("Steal", ["x"], ["y"], domain="evil.ops")]
    with pytest.raises(ClassifierError, match=r"custom operator 'Steal' of 'evil\.ops'"):
        OnnxClassifier.open(save(file, nodes, domains=("evil.ops",)))


def test_a_custom_operator_inside_a_branch_is_refused(file: Path) -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Steal", ["x"], [name], domain="evil.ops")],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 3])],
        )
        for name in ("then", "else")
    }
    true = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    nodes = [true, helper.make_node("If", ["c"], ["y"], **branches)]
    with pytest.raises(ClassifierError, match="custom operator 'Steal'"):
        OnnxClassifier.open(save(file, nodes, domains=("evil.ops",)))


def test_functions_of_the_model_itself_are_run_unless_they_call_themselves(file: Path, images: torch.Tensor) -> None:
    def function(*nodes: onnx.NodeProto) -> onnx.FunctionProto:
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
        return helper.make_function("own", "Colour", ["a"], ["b"], list(nodes), opsets)

    nodes = [
        helper.make_node("Colour", ["x"], ["colour"], domain="own"),
        helper.make_node("MatMul", ["colour", "weights"], ["y"]),
    ]
    good = function(helper.make_node("GlobalAveragePool", ["a"], ["p"]), helper.make_node("Flatten", ["p"], ["b"]))
    classifier = OnnxClassifier.open(save(file, nodes, domains=("own",), functions=(good,)))
    assert torch.allclose(classifier(images), expected(images), atol=1e-5)
    endless = function(helper.make_node("Colour", ["a"], ["b"], domain="own"))
    with pytest.raises(ClassifierError, match="'Colour' calls itself"):
        OnnxClassifier.open(save(file, nodes, domains=("own",), functions=(endless,)))


def external(file: Path, location: str) -> Path:
    """The same model with its weights named in another file."""
    model = onnx.load(save(file))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(WEIGHTS.nbytes))):
        tensor.external_data.add(key=key, value=value)
    file.write_bytes(model.SerializeToString())
    return file


def test_external_weights_beside_the_file_are_read_and_hashed(file: Path, images: torch.Tensor) -> None:
    external(file, "weights.bin")
    (file.parent / "weights.bin").write_bytes(WEIGHTS.tobytes())
    classifier = OnnxClassifier.open(file)
    assert torch.allclose(classifier(images), expected(images), atol=1e-5)
    (file.parent / "weights.bin").write_bytes((WEIGHTS * 2).tobytes())
    assert OnnxClassifier.open(file).content_hash != classifier.content_hash


@pytest.mark.parametrize("location", ["../outside.bin", "{absolute}", "link.bin", "", "a/../../outside.bin"])
def test_external_weights_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    outside = tmp_path / "outside.bin"
    outside.write_bytes(WEIGHTS.tobytes())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(outside)
    file = external(folder / "model.onnx", location.format(absolute=outside))
    with pytest.raises(WeightsError, match=r"outside its folder|missing from its folder"):
        OnnxClassifier.open(file)


@pytest.mark.parametrize("location", ["gone.bin", "*/_ORT_MEM_ADDR_/*"])
def test_external_weights_that_are_no_file_are_refused(file: Path, location: str) -> None:
    with pytest.raises(WeightsError, match="missing from its folder"):
        OnnxClassifier.open(external(file, location))


def test_external_weights_of_a_constant_are_seen_too(file: Path) -> None:
    tensor = numpy_helper.from_array(WEIGHTS, "c")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../outside.bin")
    nodes = [helper.make_node("Constant", [], ["y"], value=tensor)]
    with pytest.raises(WeightsError, match="outside its folder"):
        OnnxClassifier.open(save(file, nodes))


def test_cut_external_weights_are_refused(file: Path) -> None:
    external(file, "weights.bin")
    (file.parent / "weights.bin").write_bytes(WEIGHTS.tobytes()[:8])
    with pytest.raises(ClassifierError, match="cannot open"):
        OnnxClassifier.open(file)


def test_an_input_of_wrong_rank_is_refused(file: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "weights"], ["y"])]
    with pytest.raises(ClassifierError, match=r"has to be images \[B, 3, H, W\]"):
        OnnxClassifier.open(save(file, nodes, image=["B", 3]))


def test_an_output_of_wrong_rank_is_refused(file: Path) -> None:
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["y"])]
    with pytest.raises(ClassifierError, match=r"output has to be \[B, classes\]"):
        OnnxClassifier.open(save(file, nodes, answer=["B", 3, 1, 1]))


def test_one_logit_is_refused(file: Path) -> None:
    with pytest.raises(ClassifierError, match="gives one logit"):
        OnnxClassifier.open(save(file, weights=WEIGHTS[:, :1]))


def test_a_wrong_batch_is_refused(file: Path) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["colour"], keepdims=0, axes=[0, 2, 3]),
        helper.make_node("Constant", [], ["rows"], value=helper.make_tensor("r", TensorProto.INT64, [1], [0])),
        helper.make_node("Unsqueeze", ["colour", "rows"], ["y"]),
    ]
    save(file, nodes)
    model = onnx.load(file)
    model.opset_import[0].version = 17  # there axes is an attribute
    onnx.save(model, file)
    with pytest.raises(ClassifierError, match=r"answered \[1, 3\] for 2 images"):
        OnnxClassifier.open(file)


def test_nan_is_refused(file: Path) -> None:
    with pytest.raises(ClassifierError, match="NaN"):
        OnnxClassifier.open(save(file, weights=np.full_like(WEIGHTS, np.nan)))


def test_a_graph_that_fails_says_so(file: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["s"], value=helper.make_tensor("s", TensorProto.INT64, [2], [7, 3])),
        helper.make_node("Reshape", ["x", "s"], ["y"]),
    ]
    with pytest.raises(ClassifierError, match="failed in ONNX Runtime"):
        OnnxClassifier.open(save(file, nodes))


def test_a_graph_that_never_ends_is_stopped(file: Path) -> None:
    """A loop of 2^62 rounds over the answer; another classifier works afterwards."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["state", "state"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, ["B", 3]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, ["B", 3]),
        ],
    )
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["colour"]),
        helper.make_node("Constant", [], ["n"], value=helper.make_tensor("n", TensorProto.INT64, [], [2**62])),
        helper.make_node("Constant", [], ["go"], value=helper.make_tensor("g", TensorProto.BOOL, [], [True])),
        helper.make_node("Loop", ["n", "go", "colour"], ["y"], body=body),
    ]
    with pytest.raises(ClassifierError, match=r"did not answer within 0\.3 s"):
        OnnxClassifier.open(save(file, nodes), timeout=0.3)
    OnnxClassifier.open(save(file))
