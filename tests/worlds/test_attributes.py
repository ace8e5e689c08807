"""Readers of attributes: circles are unrolled, lengths put them together again, and the shipped ones read."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from worlds import WORLDS
from worlds import attributes as reading
from worlds.attributes import (
    PERIODS,
    ReaderRecipe,
    attributes,
    by_factor,
    factors_of,
    legibility,
    read,
    roughened,
    standardised,
    train_reader,
    write_reader_card,
)
from worlds.store import open_reader


def test_a_factor_that_comes_back_to_its_beginning_is_read_as_a_point_on_a_circle() -> None:
    table = attributes(pd.DataFrame({"background_hue": [0.0, 0.25, 1.0], "x": [1.0, 2.0, 3.0], "hair_seed": [7, 8, 9]}))
    assert list(table.columns) == ["background_hue_cos", "background_hue_sin", "x"]
    assert np.allclose(table["background_hue_cos"], [1, 0, 1]) and np.allclose(table["background_hue_sin"], [0, 1, 0])
    assert PERIODS["fibre_angle"] == math.pi  # a fibre has no direction


def test_the_length_of_a_factor_is_that_of_its_attributes_together() -> None:
    names = ("label", "tilt_cos", "tilt_sin", "x")
    assert factors_of(names) == ["label", "tilt", "x"]
    assert by_factor(names, [[-1.0, 3.0, -4.0, 0.5]]).tolist() == [[1.0, 5.0, 0.5]]


@pytest.mark.parametrize("name", list(WORLDS))
def test_attributes_have_mean_0_and_variance_1_over_the_world(name: str) -> None:
    values = standardised(WORLDS[name], WORLDS[name].factors(20_000, seed=3))
    assert values.mean(0).abs().max() < 0.03 and (values.var(0) - 1).abs().max() < 0.03


def test_training_pictures_are_noisy_and_some_of_them_blurred(monkeypatch: pytest.MonkeyPatch) -> None:
    x = WORLDS["portraits"].sample(40, seed=0).images
    rough = roughened(x, torch.Generator().manual_seed(0))
    assert rough.min() >= 0 and rough.max() <= 1 and ((rough - x).std((1, 2, 3)) > 0).all()
    monkeypatch.setattr(reading, "NOISE", 0.0)
    soft = roughened(x, torch.Generator().manual_seed(0))
    changed = (soft != x).any(1).any(1).any(1)
    assert 0.1 < changed.float().mean() < 0.6
    assert (soft.diff(dim=-1).abs().mean((1, 2, 3)) < x.diff(dim=-1).abs().mean((1, 2, 3)))[changed].all()


def test_training_makes_a_reader_of_every_attribute(tmp_path: Path) -> None:
    world = WORLDS["histology"]
    model = train_reader(world, ReaderRecipe(images=64, steps=2), tmp_path / "reader.safetensors")
    told = model(pixel_values=world.sample(2, seed=0).images).logits
    assert told.shape == standardised(world, world.factors(2, seed=0)).shape


@pytest.mark.parametrize("name", list(WORLDS))
def test_the_shipped_reader_reads_label_and_confounder_off_pictures(name: str) -> None:
    world, reader = WORLDS[name], open_reader(WORLDS[name])
    share, error = legibility(world, reader, n=200)
    factors = factors_of(reader.labels)
    places = [factors.index("label"), factors.index("confounder")]
    assert (share[places] > 0.95).all() and (error[places] < 0.5).all()
    assert len(factors) == len(share) == len(error) and (share >= 0.5).mean() > 0.7
    data = world.sample(3, seed=1)
    alone = np.concatenate([read(reader, image[None]) for image in data.images])
    assert np.allclose(read(reader, data.images), alone, atol=1e-4)


def test_the_card_has_a_line_for_every_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, reader = WORLDS["portraits"], open_reader(WORLDS["portraits"])
    monkeypatch.setattr(reading, "open_reader", lambda world, weights: reader)
    (tmp_path / "portraits").mkdir()
    write_reader_card(world, tmp_path, n=50)
    card = (tmp_path / "portraits" / "attributes.md").read_text(encoding="utf-8")
    assert all(f"| {factor} | " in card for factor in factors_of(reader.labels))
