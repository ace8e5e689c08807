"""Recipes: frozen, validated with clear sentences, kept as JSON."""

import pathlib

import pytest
from pydantic import ValidationError

from engine.errors import RecipeError
from engine.recipe import Recipe


def test_a_recipe_survives_its_file(tmp_path: pathlib.Path) -> None:
    recipe = Recipe(steps=20, strength=0.5, clip=2.0, escalation=(1.0, 2.0), margin=None, gradient="smoothdiff_ig")
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == recipe
    assert Recipe.load(tmp_path / "recipe.json").digest == recipe.digest != Recipe().digest


def test_a_recipe_is_frozen_and_is_changed_by_copying() -> None:
    recipe = Recipe()
    with pytest.raises(ValidationError):
        recipe.steps = 3  # type: ignore[misc]
    assert recipe.changed(steps=3).steps == 3
    with pytest.raises(RecipeError, match="steps"):
        recipe.changed(steps=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "'steps'.*greater than or equal to 1.*0"),
        ({"steps": 10**6}, "'steps'"),
        ({"steps": 2.5}, "'steps'"),
        ({"strength": 1.5}, "'strength'"),
        ({"tau": float("nan")}, "'tau'.*finite"),
        ({"seed": 2**63}, "'seed'"),
        ({"k": 0}, "'k'"),
        ({"redraw": -1}, "'redraw'"),
        ({"redraw_regions": ()}, "'redraw_regions'"),
        ({"redraw_regions": (0.3, 0.5)}, "'redraw_regions'.*fall"),
        ({"surprise_limit": 0.0}, "'surprise_limit'"),
        ({"clip": 0.0}, "'clip'"),
        ({"margin": 1.0}, "'margin'"),
        ({"loss": "hinge"}, "'loss'"),
        ({"escalation": ()}, "'escalation'"),
        ({"escalation": (2.0, 1.0)}, "'escalation' should grow"),
        ({"guidance": 3}, "no setting 'guidance'"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Recipe(**settings)


def test_a_file_that_is_no_recipe_is_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "recipe.json"
    for text in ("{", "[1, 2]", '{"steps": "many"}'):
        file.write_text(text)
        with pytest.raises(RecipeError):
            Recipe.load(file)
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.load(tmp_path / "none.json")
