"""Explaining one image with the embedded portraits models: files, JSON, targets, and settings found by calibration."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from audit.calibration import calibrate
from audit.explain import Explainer, choose_target, distil_pair, write_explanation
from audit.images import read_image
from engine.errors import InputError, RecipeError, TargetError
from engine.memory import footprint
from engine.methods import METHODS
from engine.surrogate import EVALUATOR, GUIDE
from worlds import WORLDS
from worlds.store import open_classifier, open_prior, open_recipe

WORLD = WORLDS["portraits"]


@pytest.fixture(scope="module")
def explainer(tmp_path_factory: pytest.TempPathFactory) -> Explainer:
    """The poisoned student with quickly distilled surrogates."""
    student = open_classifier(WORLD, "student")
    images = WORLD.sample(400, seed=77).images
    pair = distil_pair(
        student,
        images,
        tmp_path_factory.mktemp("cache"),
        guide=GUIDE.changed(steps=60),
        evaluator=EVALUATOR.changed(steps=60),
    )
    return Explainer(open_prior(WORLD), student, pair, open_recipe(WORLD).changed(steps=6, k=2, escalation=(1.0,)))


def test_files_and_json_tell_one_story(explainer: Explainer, tmp_path: Path) -> None:
    image = WORLD.sample(1, seed=5).images
    target = choose_target(explainer.classifier, image[0], None)
    found = explainer(image, [target])[0]
    picture = write_explanation(explainer, found, tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    numbered = {f"{kind}-{k}.png" for kind in ("counterfactual", "mask") for k in (1, 2)}
    assert names == {"original.png", "explanation.png", "explanation.json", *numbered}
    with Image.open(picture) as sheet:
        assert sheet.width > 5 * 256
    told = json.loads((tmp_path / "out" / "explanation.json").read_text())
    assert (told["source"], told["target"]) == (WORLD.labels[1 - target], WORLD.labels[target])
    assert len(told["counterfactuals"]) == 2
    assert told["plan"] is None
    assert told["method"] == "sce-lite-hq"
    assert set(told["hashes"]) == {"prior", "classifier", "guide", "evaluator", "recipe", "image"}
    original = read_image(tmp_path / "out" / "original.png")
    changed = [(read_image(tmp_path / "out" / f"counterfactual-{k}.png") - original).abs().amax(0) > 0 for k in (1, 2)]
    assert not (changed[0] & changed[1]).any()


def test_a_stated_budget_is_planned_kept_and_told(explainer: Explainer, tmp_path: Path) -> None:
    images = WORLD.sample(3, seed=5).images
    targets = [choose_target(explainer.classifier, image, None) for image in images]
    models = {"f": explainer.classifier, "f_hat": explainer.surrogates.guide}
    need = footprint(explainer.prior, explainer.recipe, (64, 64), **models)
    careful = replace(explainer, max_memory=need.peak(1, 1, True))
    plan = careful.plan(images)
    assert plan is not None and (plan.batch, plan.micro_batch, plan.checkpoint) == (1, 1, True)
    assert explainer.plan(images) is None
    free, planned = explainer(images, targets, [7, 8, 9]), careful(images, targets, [7, 8, 9])
    assert [found.seed for found in planned] == [7, 8, 9]
    for one, other in zip(free, planned, strict=True):
        torch.testing.assert_close(one.logits, other.logits, atol=0.05, rtol=0.05)
        assert other.recipe.checkpoint and other.recipe.micro_batch == 1
    write_explanation(careful, planned[0], tmp_path, plan)
    told = json.loads((tmp_path / "explanation.json").read_text())["plan"]
    assert told["peak"] <= told["budget"] == careful.max_memory
    assert (told["batch"], told["micro_batch"], told["checkpoint"]) == (1, 1, True)


def test_the_target_is_a_known_other_class(explainer: Explainer) -> None:
    image = WORLD.sample(1, seed=5).images[0]
    predicted = explainer.classifier.labels[1 - choose_target(explainer.classifier, image, None)]
    with pytest.raises(TargetError, match="already"):
        choose_target(explainer.classifier, image, predicted)
    with pytest.raises(TargetError, match="knows: dark, blond"):
        choose_target(explainer.classifier, image, "grey")


def test_surrogates_come_from_the_cache_the_second_time(explainer: Explainer, tmp_path: Path) -> None:
    images = WORLD.sample(40, seed=1).images
    recipes = {"guide": GUIDE.changed(steps=2), "evaluator": EVALUATOR.changed(steps=2)}
    first = distil_pair(explainer.classifier, images, tmp_path, **recipes)
    steps: list[int] = []
    second = distil_pair(
        explainer.classifier, images, tmp_path, **recipes, progress=lambda role, done, total: steps.append(done)
    )
    assert not steps
    assert second.guide.weights_hash == first.guide.weights_hash


def test_calibration_keeps_the_label_and_picks_the_best_trial(explainer: Explainer) -> None:
    images = WORLD.sample(6, seed=9).images
    found = calibrate(explainer, images, strengths=(0.9, 0.3), guidance=(0.0, 0.5), taus=(0.2,))
    assert found.label_kept[0.3] >= found.label_kept[0.9]
    assert len(found.trials) == 2
    best = max(found.trials, key=lambda trial: trial.score)
    assert (found.recipe.eta, found.recipe.tau) == (best.eta, best.tau)
    assert found.trials[0].flip_rate == 0  # without guidance nothing flips
    json.dumps(found.as_dict(), allow_nan=False)
    assert found.recipe.micro_batch is None
    with pytest.raises(RecipeError, match="needs at least"):
        calibrate(replace(explainer, max_memory=1), images)


def test_another_method_explains_in_the_same_way(explainer: Explainer, tmp_path: Path) -> None:
    image = WORLD.sample(1, seed=5).images
    target = choose_target(explainer.classifier, image[0], None)
    settings = METHODS["diffeocf"].defaults.changed(iterations=(3,), k=2)

    def never(*_: object) -> None:
        raise AssertionError("a baseline asks for no runtime")

    other = replace(explainer, recipe=settings, method="diffeocf", runtime=never)
    found = other(image, [target], [3])[0]
    assert found.recipe == settings
    assert found.cost.network_calls == 0
    write_explanation(other, found, tmp_path)
    told = json.loads((tmp_path / "explanation.json").read_text())
    assert told["method"] == told["recipe"]["method"] == "diffeocf"
    assert told["hashes"]["recipe"] == settings.digest


def test_methods_and_settings_that_do_not_go_together_are_refused_at_once(explainer: Explainer) -> None:
    with pytest.raises(RecipeError, match="no method 'time'; there are sce-lite-hq"):
        replace(explainer, method="time")
    with pytest.raises(RecipeError, match="ace takes AceSettings, not Recipe"):
        replace(explainer, method="ace")
    with pytest.raises(RecipeError, match="variant '1'; that of the method fastdime-2 is '2'"):
        replace(explainer, method="fastdime-2", recipe=METHODS["fastdime"].defaults)
    with pytest.raises(RecipeError, match="memory budget can be planned for the method sce-lite-hq alone"):
        replace(explainer, method="ace", recipe=METHODS["ace"].defaults, max_memory=10**9)
    with pytest.raises(InputError, match="the method ace has none"):
        calibrate(replace(explainer, method="ace", recipe=METHODS["ace"].defaults), torch.rand(4, 3, 64, 64))


def test_calibration_needs_some_images(explainer: Explainer) -> None:
    with pytest.raises(InputError, match="at least 4"):
        calibrate(explainer, torch.rand(2, 3, 64, 64))
