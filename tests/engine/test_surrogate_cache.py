"""The cache of distilled surrogates: hits ask nothing, damage is noticed."""

import json
import logging
import pathlib

import pytest
import torch
from torch import Tensor

from engine.errors import ClassifierError
from engine.surrogate_cache import distil_cached
from tests.engine.test_surrogate import QUICK, colour_classifier, colour_images


class Counting:
    """The colour classifier, with a count of the images it was asked about."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.count += len(images)
        return colour_classifier(images)


def test_a_cache_hit_asks_nothing_and_returns_the_same_bits(tmp_path: pathlib.Path) -> None:
    query, images = Counting(), colour_images(40)
    first = distil_cached(query, images, QUICK, classifier_hash="f", folder=tmp_path)
    second = distil_cached(query, images, QUICK, classifier_hash="f", folder=tmp_path)
    assert query.count == 40
    assert second.weights_hash == first.weights_hash and second.agreement == first.agreement
    assert (second.recipe, second.queries, second.n_classes) == (first.recipe, first.queries, first.n_classes)
    fresh = colour_images(5, seed=1)
    assert torch.equal(first(fresh), second(fresh))
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_another_classifier_image_or_recipe_is_another_entry(tmp_path: pathlib.Path) -> None:
    query, images = Counting(), colour_images(40)
    distil_cached(query, images, QUICK, classifier_hash="f", folder=tmp_path)
    distil_cached(query, images, QUICK, classifier_hash="g", folder=tmp_path)
    distil_cached(query, images, QUICK.changed(noise=0.2), classifier_hash="f", folder=tmp_path)
    altered = images.clone()
    altered[3, 0, 0, 0] += 1e-3
    distil_cached(query, altered, QUICK, classifier_hash="f", folder=tmp_path)
    assert query.count == 160 and len(list(tmp_path.iterdir())) == 8


def test_images_that_are_known_by_another_hash_than_their_own_may_differ(tmp_path: pathlib.Path) -> None:
    query, images = Counting(), colour_images(40)
    here = {"classifier_hash": "f", "folder": tmp_path}
    first = distil_cached(query, images, QUICK, images_hash="seed 7", **here)
    second = distil_cached(query, images + 1e-3, QUICK, images_hash="seed 7", **here)
    assert query.count == 40 and second.weights_hash == first.weights_hash
    distil_cached(query, images, QUICK, images_hash="seed 8", **here)
    assert query.count == 80


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "altered card", "broken card", "no weights"])
def test_a_damaged_cache_entry_is_rebuilt(
    tmp_path: pathlib.Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    query, images = Counting(), colour_images(40)
    first = distil_cached(query, images, QUICK, classifier_hash="f", folder=tmp_path)
    (weights,), (card,) = tmp_path.glob("*.safetensors"), tmp_path.glob("*.json")
    content = bytearray(weights.read_bytes())
    if damage == "flipped bit":
        content[-5] ^= 1
        weights.write_bytes(content)
    elif damage == "cut short":
        weights.write_bytes(content[:-100])
    elif damage == "altered card":
        entry = json.loads(card.read_text())
        entry["agreement"]["rate"]["value"] = 1.0
        entry["agreement"]["mean_kl"] = 0.0
        card.write_text(json.dumps(entry))
    elif damage == "broken card":
        card.write_text("{")
    else:
        weights.unlink()
    with caplog.at_level(logging.WARNING):
        second = distil_cached(query, images, QUICK, classifier_hash="f", folder=tmp_path)
    assert query.count == 80
    assert second.weights_hash == first.weights_hash and second.agreement == first.agreement
    assert ("again" in caplog.text) == (damage != "no weights")
    distil_cached(query, images, QUICK, classifier_hash="f", folder=tmp_path)
    assert query.count == 80


def test_a_failed_distillation_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ClassifierError):
        distil_cached(lambda x: x, colour_images(40), QUICK, classifier_hash="f", folder=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
