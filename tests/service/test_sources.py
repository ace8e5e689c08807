"""Priors by name, with the recipe that goes with what is asked of them."""

from pathlib import Path

from engine.recipe import Recipe
from service.sources import open_source
from worlds import WORLDS
from worlds.store import open_audit_recipe, open_recipe


def test_an_embedded_prior_brings_the_recipe_for_its_use() -> None:
    world = WORLDS["histology"]
    assert open_source("histology").recipe == open_recipe(world)
    assert open_source("histology", for_audit=True).recipe == open_audit_recipe(world)


def test_a_recipe_that_was_given_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    Recipe(steps=7).save(file)
    assert open_source("histology", recipe=file, for_audit=True).recipe == Recipe(steps=7)
