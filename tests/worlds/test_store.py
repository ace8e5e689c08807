"""Embedded weights: what is shipped opens, and what is damaged is named together with the command that rebuilds it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.errors import WeightsError
from engine.recipe import Recipe
from worlds import WORLDS
from worlds.classifiers import network, preprocessing
from worlds.pixel import BUDGET_MB
from worlds.store import (
    LATENT,
    PIXEL,
    READER,
    RECIPES,
    WEIGHTS,
    embedded_prior,
    open_audit_recipe,
    open_classifier,
    open_prior,
    open_reader,
    open_recipe,
    prior_name,
    weights_megabytes,
    write_classifier,
)

WORLD = WORLDS["portraits"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A copy of the shipped weights of one world."""
    shutil.copytree(WEIGHTS / WORLD.name, tmp_path / WORLD.name)
    return tmp_path


def test_a_missing_file_is_named_with_the_command_that_rebuilds_it(weights: Path) -> None:
    file = weights / "portraits" / "prior" / "vae" / "diffusion_pytorch_model.safetensors"
    file.unlink()
    with pytest.raises(WeightsError, match=r"vae/diffusion_pytorch_model.safetensors is missing.*train portraits"):
        open_prior(WORLD, weights)


def test_a_cut_file_is_named_with_the_command_that_rebuilds_it(weights: Path) -> None:
    file = weights / "portraits" / "student" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(WeightsError, match=r"student/model.safetensors is cut short.*worlds.train classifiers"):
        open_classifier(WORLD, "student", weights)


def test_one_altered_bit_is_noticed(weights: Path) -> None:
    file = weights / "portraits" / "oracle" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="cut short or altered"):
        open_classifier(WORLD, "oracle", weights)


def test_a_missing_reader_is_named_with_the_command_that_rebuilds_it(weights: Path) -> None:
    shutil.rmtree(weights / "portraits" / READER)
    with pytest.raises(WeightsError, match=r"attributes/.* is missing.*worlds.train attributes"):
        open_reader(WORLD, weights)


def test_a_world_without_weights_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"lack .*checksums.json.*python -m worlds.train portraits"):
        open_prior(WORLD, tmp_path)


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="student, twin, oracle"):
        open_classifier(WORLD, "teacher")


def test_what_is_written_opens_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = network(WORLD.labels).eval()
    write_classifier(WORLD, "twin", model, preprocessing(WORLD), tmp_path)
    opened = open_classifier(WORLD, "twin", tmp_path)
    assert opened.labels == WORLD.labels
    images = WORLD.sample(2, seed=0).images
    expected = model(pixel_values=(images - 0.5) / 0.25).logits
    assert torch.allclose(opened(images), expected, atol=1e-6)
    assert not (tmp_path / "portraits" / "twin.partial").exists()


@pytest.mark.parametrize("name", list(WORLDS))
def test_the_shipped_folders_are_plain_diffusers_and_transformers_folders(name: str) -> None:
    folder = WEIGHTS / name
    index = json.loads((folder / "prior" / "model_index.json").read_text())
    for part, (library, kind) in ((k, v) for k, v in index.items() if not k.startswith("_")):
        assert library == "diffusers"
        config = "scheduler_config.json" if part == "scheduler" else "config.json"
        assert json.loads((folder / "prior" / part / config).read_text())["_class_name"] == kind
    for role in ("student", "twin", "oracle"):
        assert json.loads((folder / role / "config.json").read_text())["architectures"] == [
            "ResNetForImageClassification"
        ]


def test_the_weights_stay_within_their_budget() -> None:
    assert weights_megabytes() <= 30
    assert weights_megabytes(parts=[PIXEL, READER]) <= BUDGET_MB


def test_a_pixel_space_prior_has_a_name_a_recipe_and_the_command_that_rebuilds_it(weights: Path) -> None:
    assert embedded_prior("portraits") == (WORLD, LATENT)
    assert embedded_prior("portraits-pixel") == (WORLD, PIXEL)
    assert embedded_prior("portraits-prior") is None
    assert prior_name(WORLDS["histology"], PIXEL) == "histology-pixel"
    assert open_recipe(WORLD, PIXEL) == Recipe() or (RECIPES / "portraits-pixel.json").is_file()
    shutil.rmtree(weights / "portraits" / "pixel", ignore_errors=True)
    with pytest.raises(WeightsError, match=r"portraits/pixel.*`python -m worlds.train pixel`"):
        open_prior(WORLD, weights, part=PIXEL)
    with pytest.raises(ValueError, match="neither 'prior' nor 'pixel'"):
        open_prior(WORLD, weights, part="vae")


def test_an_audit_asks_for_more_where_its_world_says_so() -> None:
    plain, audited = open_recipe(WORLDS["histology"]), open_audit_recipe(WORLDS["histology"])
    changes = json.loads((RECIPES / "histology.audit.json").read_text())
    assert audited == plain.changed(**changes) != plain
    assert audited.margin is not None and plain.margin is not None and audited.margin > plain.margin
    assert open_audit_recipe(WORLDS["portraits"]) == open_recipe(WORLDS["portraits"])
