"""Hugging Face classifier folders: opened with their own preprocessing, refused with one clear sentence."""

import json
from pathlib import Path

import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification

from audit.classifier import load_classifier
from engine.errors import ClassifierError, WeightsError

PREPROCESSING = {
    "do_resize": True,
    "size": {"height": 32, "width": 32},
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.2, 0.25, 0.3],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny ResNet of three classes, saved."""
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        layer_type="basic",
        id2label={0: "cat", 1: "dog", 2: "horse"},
        label2id={"cat": 0, "dog": 1, "horse": 2},
    )
    ResNetForImageClassification(config).save_pretrained(tmp_path / "classifier")
    (tmp_path / "classifier" / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING))
    return tmp_path / "classifier"


def test_preprocessing_belongs_to_the_classifier(folder: Path) -> None:
    classifier = load_classifier(folder)
    plain = ResNetForImageClassification.from_pretrained(folder).eval()
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(PREPROCESSING[key]).view(1, 3, 1, 1) for key in ("image_mean", "image_std"))
    assert torch.allclose(classifier(images), plain((images - mean) / std).logits, atol=1e-6)
    assert classifier.labels == ("cat", "dog", "horse")


def test_images_of_any_size_are_brought_to_the_classifiers_own(folder: Path) -> None:
    classifier = load_classifier(folder)
    flat = torch.full((1, 3, 32, 32), 0.3)
    large = torch.full((1, 3, 100, 70), 0.3)
    assert torch.allclose(classifier(flat), classifier(large), atol=1e-5)


def test_probabilities_and_features_come_from_the_same_forward(folder: Path) -> None:
    classifier = load_classifier(folder)
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(classifier.probabilities(images, batch=2).sum(1), torch.ones(5))
    features = classifier.features(images)
    assert features.shape == (5, 8)
    last = [m for m in classifier.model.modules() if isinstance(m, torch.nn.Linear)][-1]
    assert torch.allclose(last(features), classifier(images), atol=1e-5)


def test_the_hash_follows_weights_labels_and_preprocessing(folder: Path) -> None:
    before = load_classifier(folder).content_hash
    assert load_classifier(folder).content_hash == before
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSING, "image_mean": [0.5, 0.5, 0.5]}))
    assert load_classifier(folder).content_hash != before


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_missing_part_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ClassifierError, match=name):
        load_classifier(folder)


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="Only safetensors"):
        load_classifier(folder)


def test_cut_weights_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(WeightsError, match=r"model.safetensors"):
        load_classifier(folder)


def test_weights_that_do_not_fit_the_config_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["depths"] = [2, 1]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="does not fit"):
        load_classifier(folder)


def test_a_grey_image_is_refused(folder: Path) -> None:
    with pytest.raises(ClassifierError, match=r"\[B, 3, H, W\]"):
        load_classifier(folder)(torch.rand(1, 1, 32, 32))
