"""The tables: equal budgets, exact round trips, finished parts that are not done twice, and marks that are right."""

import argparse
import csv
import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from audit.metrics import mean_of, sparsity
from benchmarks.tables import __main__ as command
from benchmarks.tables import cost as costs
from benchmarks.tables import figures as judged
from benchmarks.tables import filling, network
from benchmarks.tables.__main__ import changes_of, others
from benchmarks.tables.attributes import ENCODINGS, Attributes, controls, share_above, worth
from benchmarks.tables.calibration import calibrate
from benchmarks.tables.case import (
    CHECK_SEED,
    TEST_SEED,
    Case,
    change,
    hash_of_causes,
    open_case,
    run_of,
)
from benchmarks.tables.cost import Timing
from benchmarks.tables.counterfactuals import contents, make_sets, name_of, read_sets, write_sets
from benchmarks.tables.figures import Figure, measured, noisy, on_same_pictures
from benchmarks.tables.filling import compare_cost, fill
from benchmarks.tables.network import QuickPrior, Recorded, halves
from benchmarks.tables.paper import PAPER1, PAPER2, PAPER3
from benchmarks.tables.plan import CANDIDATES, IN_PIXELS, ROWS, SHORT, SOURCES, TRIALS, K, Row
from benchmarks.tables.printing import COLUMNS1, COLUMNS2, COLUMNS3, ENCODED, LABEL_WIDTH, MOVED, Column, Table, grid
from benchmarks.tables.records import Records, as_figures, as_found
from engine.errors import InputError, PriorError, RecipeError, WeightsError
from engine.methods import METHODS, Method
from engine.recipe import Recipe
from engine.surrogate import EVALUATOR, GUIDE, SurrogatePair, distil, serialise
from engine.surrogate_net import SurrogateNetwork
from worlds import WORLDS, World
from worlds.store import PIXEL, open_classifier, open_prior, open_reader
from worlds.world import Sample


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The portraits student with two barely trained surrogates: the tables do not ask how good they are."""
    world = WORLDS["portraits"]
    student = open_classifier(world, "student")
    pictures = world.sample(64, 1).images
    few = {"steps": 20, "extra_queries": 0, "adversarial_weight": 0.0}
    guide, evaluator = (distil(student.probabilities, pictures, r.changed(**few)) for r in (GUIDE, EVALUATOR))
    oracle = open_classifier(world, "oracle")
    changes = {"diffeocf": {"iterations": (60,), "confidence": 0.9}}
    cache = tmp_path_factory.mktemp("tables")
    return Case(world, student, SurrogatePair(guide, evaluator), oracle, cache, batch=2, changes=changes)


def asked_for(records: Path, **changes: object) -> argparse.Namespace:
    given = {
        "world": "portraits",
        "n": 4,
        "seed": TEST_SEED,
        "methods": ["diffeocf"],
        "tables": [1],
        "trials": 2,
        "calibration_images": 2,
        "repairs": 0,
        "timing_batch": [2],
        "short": False,
        "settings": None,
        "lpips": None,
        "records": records,
        "json": None,
        **changes,
    }
    return argparse.Namespace(**given)


# The plan --------------------------------------------------------------------------------------------------------


def test_every_method_has_the_same_budget_and_begins_with_its_own_defaults() -> None:
    assert set(CANDIDATES) == set(METHODS)
    for name, candidates in CANDIDATES.items():
        assert len(candidates) == TRIALS and candidates[0] == {}
        assert len({json.dumps(changes) for changes in candidates}) == TRIALS
        shortened = {json.dumps({**changes, **SHORT.get(name, {})}, sort_keys=True) for changes in candidates}
        assert len(shortened) == TRIALS  # --short leaves no two candidates alike
        for changes in (*candidates, SHORT.get(name, {})):
            METHODS[name].defaults.changed(**changes)  # refuses what is no setting of the method


def test_rows_are_named_by_method_and_by_prior_where_it_is_not_the_methods_own() -> None:
    assert Row.of("dime") == Row("dime", "pixel") and Row.of("dime").name == "dime"
    assert Row.of("dime@latent").name == "dime@latent" and Row.of("dime@latent").title == "DiME (latent)"
    assert Row.of("dive@latent").name == "dive" and Row.of("sce-lite-hq").space == "latent"
    assert len(ROWS) == len(METHODS) + len(IN_PIXELS) and len({Row.of(name) for name in ROWS}) == len(ROWS)
    with pytest.raises(RecipeError, match="no method 'time'"):
        Row.of("time")
    with pytest.raises(InputError, match="@latent or @pixel"):
        Row.of("dime@gpu")


def test_the_papers_numbers_have_the_tables_columns() -> None:
    keys1, keys2, keys3 = ({column.key for column in columns} for columns in (COLUMNS1, COLUMNS2, COLUMNS3))
    five = {"ace", "dime", "fastdime", "sce", "sce-lite-hq"}
    assert all(set(PAPER1[world]) == five for world in WORLDS) and set(PAPER3) == five
    assert all(set(row) < keys1 for world in PAPER1.values() for row in world.values())
    assert all(set(row) < keys2 for row in PAPER2.values()) and set(PAPER2) < set(SOURCES)
    assert all(set(row) < keys3 for row in PAPER3.values())
    # The ratios that the paper claims.
    ours = PAPER3["sce-lite-hq"]["seconds_per_sample"]
    ratios = {name: round(PAPER3[name]["seconds_per_sample"] / ours, 1) for name in five}
    assert ratios == {"sce-lite-hq": 1.0, "fastdime": 2.7, "dime": 41.0, "ace": 38.0, "sce": 49.1}


def test_pictures_that_are_not_the_tables_own_are_named() -> None:
    assert others(TEST_SEED) == []
    assert others(7) == ["The pictures are those of seed 7, not the tables' own."]
    assert others(CHECK_SEED)[0].endswith("were fixed before any method had explained them.")


def test_settings_can_be_shortened_and_given(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"dime": {"l1": 0.0}, "ace": {"iterations": [7]}}))
    assert changes_of(asked_for(tmp_path)) == {}
    changes = changes_of(asked_for(tmp_path, short=True, settings=file))
    assert changes["dime"] == {"steps": 50, "l1": 0.0} and changes["ace"] == {"iterations": [7], "step_size": 2 / 255}
    assert SHORT["dime"] == {"steps": 50}
    file.write_text(json.dumps({"time": {}}))
    with pytest.raises(RecipeError, match="no method 'time'"):
        changes_of(asked_for(tmp_path, settings=file))
    with pytest.raises(InputError, match="cannot be read"):
        changes_of(asked_for(tmp_path, settings=tmp_path / "none.json"))


def test_sparsity_is_compared_on_pictures_that_both_flip() -> None:
    ours, theirs = [0.9, 0.6, 0.8, None], [0.8, None, 0.75, 0.9]
    figures = on_same_pictures(ours, theirs)  # by the means alone theirs would be ahead
    assert figures["pictures"].value == 2 and figures["lead"].n == 2
    assert figures["ours"].value == pytest.approx(0.85) and figures["theirs"].value == pytest.approx(0.775)
    assert figures["lead"].value == pytest.approx(0.075)
    assert math.isnan(on_same_pictures([None], [0.5])["lead"].value)


def test_a_table_prints_what_stands_beside_it() -> None:
    beside = Table(
        "beside", (Column("lead", "difference", ranked=False),), {}, rows={"ace": {"lead": Figure(0.5, -0.1, 0.9)}}
    )
    table = Table("above", (Column("na", "NA"),), {}, rows={"ace": {"na": Figure(0.5)}}, beside=beside)
    assert table.markdown().endswith("|  | difference |\n|---|---|\n| ace | 50.0 <sub>-10.0 to 90.0</sub> |\n")
    assert [record["table"] for record in table.records()] == ["above", "beside"]
    assert beside.records()[0]["place"] is None


def test_by_attributes_turning_one_thing_over_is_sparser_than_anything_else(case: Case) -> None:
    attributes = Attributes.of(case.world)
    shown = controls(case, attributes, case.world.sample(24, 7))
    told = {name: control.figures(attributes) for name, control in shown.items()}
    spurious, label, *others = (figures["sparsity"] for figures in told.values())
    assert min(spurious.lower, label.lower) > 0.88 > 0.8 > max(other.upper for other in others)
    turned, noise, another = told["control: label turned over in the world"], *list(told.values())[2::2]
    assert turned["label"].value == 1 and turned["confounder"].value < 0.2
    assert noise["changed"].value < 1 < turned["changed"].value < 5 < another["changed"].value


@pytest.mark.parametrize("name", list(WORLDS))
def test_sparsity_is_measured_where_a_perfect_edit_is_told_from_none(case: Case, name: str) -> None:
    world = WORLDS[name]
    case = dataclasses.replace(case, world=world, oracle=open_classifier(world, "oracle"), _priors={})
    attributes, data = Attributes.of(world), world.sample(40, 1)
    assert torch.equal(noisy(data), noisy(data))  # the same noise every time
    shown = controls(case, attributes, data)
    told = worth(attributes, shown)
    assert list(told) == list(ENCODINGS.values())
    assert all(set(row) == {one for one, control in shown.items() if not control.perfect} for row in told.values())
    own, deviations, oracle = ([figure.value for figure in row.values()] for row in told.values())
    assert all(value > 0.99 for value in own) and all(a >= b for a, b in zip(own, deviations, strict=True))
    # The oracle's features know the label alone: no edit at all is sparser there than half of the perfect ones.
    assert max(oracle[:2]) < 0.5


def test_a_share_above_is_that_of_all_pairs_and_a_tie_counts_half() -> None:
    assert share_above(np.array([1.0, 2.0]), np.array([0.0, 1.0, 3.0])) == pytest.approx((1.5 + 2) / 6)


def test_attributes_that_moved_are_counted_in_units_of_what_the_reader_errs_by(case: Case) -> None:
    reader = open_reader(case.world)
    names = reader.labels
    attributes = Attributes(reader, ("label", "confounder", "x", "background_hue"), np.array([0.1, 0.1, 0.5, 0.5]))
    change = np.zeros((3, len(names)))
    change[0, names.index("confounder")] = -2.0
    change[0, [names.index("background_hue_cos"), names.index("background_hue_sin")]] = 0.3, 0.4
    change[1, names.index("x")], change[1, names.index("label")] = 1.0, 0.05
    valid = np.array([True, False, True])
    figures = attributes.figures(change, valid)  # the third picture is as it was
    assert figures["changed"] == Figure.of(mean_of(np.array([1, 1])))  # 0.5 of the hue is no more than the error
    assert figures["nuisances"].value == figures["confounder"].value == 0.5 and figures["label"].value == 0
    assert figures["sparsity"].value == pytest.approx(((1 - 21 / 4 / 20) + (1 - 2.5 / 4 / 2)) / 2)
    assert figures["sparsity_valid"] == Figure.of(mean_of(np.array([1 - 21 / 4 / 20])))
    assert figures["sparsity_deviations"].value == pytest.approx(((1 - 2.5 / 4 / 2) + (1 - 1.05 / 4)) / 2)
    assert figures["sparsity"].n == 2 and math.isnan(attributes.sparsities(change)[2])


def test_directions_are_compared_in_the_units_that_lengths_are_measured_in(case: Case) -> None:
    reader = open_reader(case.world)
    attributes = Attributes(reader, ("background_hue", "label"), np.array([0.5, 0.1]))
    change = np.random.default_rng(5).normal(size=(3, 2, len(reader.labels)))
    encoded = attributes.encoded(change)
    assert encoded.shape == (3, 2, 3)  # a hue is an angle, which is two attributes
    lengths = attributes.moved(change.reshape(6, -1)) / attributes.error
    assert np.allclose(np.linalg.norm(encoded, axis=2).ravel(), np.linalg.norm(lengths, axis=1))


def test_what_a_row_lacks_is_measured_of_what_was_kept_and_without_it_made_again(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = asked_for(tmp_path, trials=0)
    first = fill(case, arguments)[0][1].chain()
    records = [tmp_path / "portraits" / part / "diffeocf.json" for part in ("attributes", "pairs", "gain")]
    kept = [json.loads(record.read_text()) for record in records]
    valid = json.loads((tmp_path / "portraits" / "table1" / "diffeocf.json").read_text())["found"]["valid"]
    calls = counted(monkeypatch, "diffeocf")
    for record in records:
        record.unlink()
    assert len(fill(case, asked_for(tmp_path, methods=[], trials=0))[0][1].chain()) == 1  # it only shows
    assert not any(record.exists() for record in records)
    fill(case, arguments)
    assert not calls and [json.loads(record.read_text()) for record in records] == kept  # batches were kept
    batches = tmp_path / "portraits" / "counterfactuals"
    for record in records:
        record.unlink()
    shutil.rmtree(batches)
    fill(case, arguments)
    assert calls == [2, 2] and json.loads(records[0].read_text()) == kept[0]  # one whole row for all that it lacks
    records[1].unlink()
    shutil.rmtree(batches)
    calls.clear()
    second = fill(case, arguments)[0][1].chain()
    assert calls == [2] * (sum(valid) // 2) + [1] * (sum(valid) % 2)  # of pictures with a valid first one
    found = np.array(json.loads(records[1].read_text())["found"]["change"])
    assert found.size and np.allclose(found, kept[1]["found"]["change"], atol=1e-3)  # the same seeds in other batches
    records[0].unlink()
    fill(case, arguments)
    assert sum(calls) == 4 and json.loads(records[0].read_text()) == kept[0]  # the others join those that were kept
    assert [table.key for table in second] == ["", "encodings", "worth", "attributes"] == [one.key for one in first]
    assert second[1].rows["diffeocf"].keys() == {column.key for column in ENCODED} and len(second[1].controls) == 5
    assert second[3].rows == first[3].rows


def test_counterfactuals_at_hand_have_the_figures_of_their_records(case: Case, tmp_path: Path) -> None:
    row, table = Row.of("diffeocf"), fill(case, asked_for(tmp_path, trials=0))[0][1]
    data = case.world.sample(4, TEST_SEED)
    run = run_of(case, row, data, make_sets(case, row, case.start(row), data))
    found = Attributes.of(case.world).figures_of_run(run) | measured(case, row, data, run.sets)
    found["gain"] = judged.gained(case, run, repairs=0)
    shown = table.rows["diffeocf"] | table.chain()[1].rows["diffeocf"]
    assert {column.key for column in COLUMNS2} < shown.keys() <= found.keys()
    for name, figure in shown.items():
        assert dataclasses.astuple(found[name]) == pytest.approx(dataclasses.astuple(figure), abs=1e-3, nan_ok=True)


def test_other_pictures_have_rows_of_their_own_and_the_same_calibration(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fill(case, asked_for(tmp_path, trials=0))[0][1]
    monkeypatch.setattr(filling, "calibrate", lambda *_: pytest.fail("it is calibrated"))
    check = fill(case, asked_for(tmp_path, trials=0, seed=CHECK_SEED))[0][1]
    home = tmp_path / "portraits"
    for part in ("table1", "attributes", "pairs", "gain"):
        assert all((folder / part / "diffeocf.json").is_file() for folder in (home, home / str(CHECK_SEED)))
    assert not (home / str(CHECK_SEED) / "calibration").exists()
    assert own.rows["diffeocf"]["sparsity"] != check.rows["diffeocf"]["sparsity"]
    for seed, table in ((TEST_SEED, own), (CHECK_SEED, check)):
        shown = fill(case, asked_for(tmp_path, trials=0, methods=[], seed=seed))[0][1]
        assert shown.markdown() == table.markdown()


# Counterfactuals -------------------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The batch sizes that a method is called with from now on."""
    calls: list[int] = []
    real = METHODS[name]

    def call(*arguments: object, **options: object) -> object:
        calls.append(len(arguments[3]))  # type: ignore[arg-type]
        return real.function(*arguments, **options)

    monkeypatch.setitem(METHODS, name, Method(name, real.title, real.defaults, call))  # type: ignore[arg-type]
    return calls


def test_finished_counterfactuals_are_read_back_to_the_bit_and_only_missing_ones_are_made(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row.of("diffeocf")
    settings, data = case.start(row), case.world.sample(5, 5)
    calls = counted(monkeypatch, "diffeocf")
    first = make_sets(case, row, settings, data.pick(slice(4)))
    assert calls == [2, 2]
    kept = contents(case.trials / case.place(row, settings))
    files = [kept[name_of(data, place, place)] for place in range(4)]
    assert [place for _, place in files] == [0, 1, 0, 1] and files[0][0] == files[1][0] != files[2][0] == files[3][0]
    files[2][0].unlink()  # as if the run had been killed there
    again = make_sets(case, row, settings, data.pick(slice(4)))
    assert calls == [2, 2, 2]
    some = make_sets(case, row, settings, data.pick([3, 4, 0]), seeds=[3, 4, 0])  # one of them was never made
    assert calls == [2, 2, 2, 1] and [one.seed for one in some] == [3, 4, 0]
    for one, other in zip([*first, first[3], first[0]], [*again, some[0], some[2]], strict=True):
        assert torch.equal(one.images, other.images) and torch.equal(one.edit_masks, other.edit_masks)
        assert torch.equal(one.x0, other.x0) and one.edit_masks.dtype == torch.bool
        assert (one.flipped, one.seed, one.hashes, one.factors) == (
            other.flipped,
            other.seed,
            other.hashes,
            other.factors,
        )
    make_sets(case, row, settings, data.pick([0]), seeds=[1])  # another seed is another counterfactual
    make_sets(case, row, settings.changed(rate=0.04), data.pick([0, 1]))  # another setting is another folder
    assert calls == [2, 2, 2, 1, 1, 2]
    assert make_sets(case, row, settings, data.pick([])) == []


def test_pictures_are_known_by_their_causes_so_that_another_rounding_finds_what_was_made_of_them(case: Case) -> None:
    data = case.world.sample(3, 5)
    elsewhere = dataclasses.replace(data, images=(data.images - 1 / 255).clamp_min(0))
    others = case.world.sample(3, 6)
    here, there, other = (name_of(one, 2, 2) for one in (data, elsewhere, others))
    assert here == there != other != name_of(data, 1, 2) != here != name_of(data, 2, 1)
    assert hash_of_causes(data.pick(slice(2))) != hash_of_causes(data)


@pytest.mark.parametrize("name", list(WORLDS))
def test_the_shipped_surrogates_are_found_on_any_machine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.surrogate_cache.distil", lambda *_, **__: pytest.fail("it is shipped"))
    case = open_case(WORLDS[name], tmp_path, command.SURROGATES)
    images = WORLDS[name].sample(200, 7).images
    said = [f(images).argmax(1) for f in (case.classifier, case.surrogates.guide, case.surrogates.evaluator)]
    assert all((one == said[0]).float().mean() > 0.8 for one in said)  # of this world, and not of the other


def test_a_set_survives_the_disk_as_pictures_of_eight_bits_that_the_classifier_is_asked_about_again(
    case: Case, tmp_path: Path
) -> None:
    row = Row.of("diffeocf")
    settings, images = case.start(row), case.world.sample(2, 6).images
    sets = METHODS["diffeocf"](
        case.prior("latent"), case.classifier, None, images, case.targets(images), settings, [0, 1]
    )
    half = sets[0].edit_masks.clone()
    half[..., :32] = False  # some of the picture is left alone
    sets[0] = dataclasses.replace(sets[0], edit_masks=half)
    write_sets(sets, ["one", "other"], tmp_path)
    (file,) = tmp_path.iterdir()
    assert contents(tmp_path) == {"one": (file, 0), "other": (file, 1)}
    read = read_sets(file, [0, 1], case.classifier, images, settings)
    for one, other in zip(sets, read, strict=True):
        assert torch.equal(one.edit_masks, other.edit_masks) and torch.equal(one.x0, other.x0)
        edit = one.edit_masks.expand_as(one.images)
        assert torch.equal(other.images[edit].mul(255).round(), one.images[edit].mul(255).round())
        assert torch.equal(other.images[~edit], one.x0.expand_as(one.images)[~edit])
        assert (one.images[edit] - other.images[edit]).abs().max() <= 0.5 / 255 + 1e-6
        asked = case.classifier(other.images).argmax(1) == one.target
        assert other.flipped == tuple(asked.tolist())
        for name in ("source", "target", "seed", "recipe", "factors", "hashes", "costs", "setup"):
            assert getattr(one, name) == getattr(other, name), name
    (last,) = read_sets(file, [1], case.classifier, images[1:], settings)
    assert last.seed == 1 and torch.equal(last.images, read[1].images) and list(tmp_path.iterdir()) == [file]


def test_calibration_keeps_to_its_budget_and_takes_the_best_score(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row.of("diffeocf")
    calls = counted(monkeypatch, "diffeocf")
    monkeypatch.setitem(CANDIDATES, "diffeocf", ({}, {"rate": 1e-9, "iterations": (1,)}, {"rate": 1.0}))
    chosen, trials = calibrate(case, row, trials=2, pictures=3)
    assert calls == [1, 1, 2, 2] and [trial["changes"] for trial in trials] == [{}, {"rate": 1e-9, "iterations": (1,)}]
    assert case.tried(row, CANDIDATES["diffeocf"][1]).tries == (60,)  # type: ignore[union-attr]  # what was asked for
    assert trials[1]["flip_rate"] <= trials[0]["flip_rate"] and trials[0]["score"] >= trials[1]["score"]
    assert chosen == {}
    assert [trial["pictures"] for trial in trials] == [3, 3]
    assert calibrate(case, row, trials=0, pictures=3) == ({}, []) and len(calls) == 4


def test_only_the_best_two_candidates_see_all_pictures(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {0.01: 0.5, 0.02: 0.4, 0.03: 0.5, 0.04: 0.7}

    def trial(case: Case, row: Row, changes: dict[str, float], parts: list[Sample]) -> dict[str, object]:
        seen = sum(len(part.images) for part in parts)
        return {"changes": changes, "pictures": seen, "score": scores[changes["rate"]]}

    monkeypatch.setattr("benchmarks.tables.calibration.trial", trial)
    row = Row.of("diffeocf")
    monkeypatch.setitem(CANDIDATES, "diffeocf", tuple({"rate": rate} for rate in scores))
    chosen, trials = calibrate(case, row, trials=4, pictures=6)
    assert chosen == {"rate": 0.04}
    assert [trial["pictures"] for trial in trials] == [6, 2, 2, 6]  # the earlier of equals comes along


def test_repairs_are_repeated_until_their_mean_is_exact() -> None:
    seeds: list[int] = []

    def gives(*values: float) -> Callable[[int], float]:
        seeds.clear()
        return lambda seed: (seeds.append(seed), values[seed % len(values)])[1]

    assert Figure.of(judged.repeated(gives(1.0), 20)) == Figure(1.0, 1.0, 1.0, judged.FEWEST_REPAIRS)
    assert seeds == list(range(judged.FEWEST_REPAIRS))
    assert judged.repeated(gives(0.8, 0.9), 20).n == len(seeds) == 20
    few = judged.repeated(gives(0.8, 0.9), 3)
    assert seeds == [0, 1, 2] and few.upper - few.value == pytest.approx(4.3027 * 0.1 / 3, rel=1e-4)


def test_figures_carry_intervals_and_the_gain_of_nothing_learned_is_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, data = Row.of("diffeocf"), case.world.sample(4, 5)
    sets = make_sets(case, row, case.start(row), data)
    figures = measured(case, row, data, sets)
    encoded = {"sparsity_oracle", "sparsity_oracle_valid", "diversity_oracle"}
    assert set(figures) == {column.key for column in COLUMNS1} - {"sparsity", "diversity", "gain"} | encoded
    for name in ("na", "nafr", "flip_rate"):
        assert figures[name].lower <= figures[name].value <= figures[name].upper
    assert 0 <= figures["nafr"].value <= figures["flip_rate"].value <= 1
    every = sparsity(change(case.oracle, run_of(case, row, data, sets)))
    assert figures["sparsity_oracle"].n == 4 and figures["sparsity_oracle"].value == pytest.approx(every.mean())
    monkeypatch.setattr(judged, "average_group_accuracy", lambda *_: pytest.fail("nothing was to be learned"))
    originals = [dataclasses.replace(one, images=one.x0.expand_as(one.images), flipped=(False,) * K) for one in sets]
    assert judged.gained(case, run_of(case, row, data, originals), repairs=2) == Figure(0.0, n=0)
    assert math.isnan(judged.gained(case, run_of(case, row, data, sets), repairs=0).value)


def test_a_method_that_breaks_is_reported_and_the_others_go_on(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise PriorError("The method made values that are not finite.")

    dive = METHODS["dive"]
    monkeypatch.setitem(METHODS, "dive", Method("dive", dive.title, dive.defaults, broken))  # type: ignore[arg-type]
    monkeypatch.setattr(command, "open_case", lambda *_, **__: case)
    few = [
        "--n",
        "4",
        "--trials",
        "0",
        "--repairs",
        "0",
        "--tables",
        "1",
        "--methods",
        "dive",
        "diffeocf",
        "ace@latent",
    ]
    monkeypatch.setitem(case.changes, "ace", {"iterations": (2,)})
    files = ["--json", str(tmp_path / "tables.json"), "--results", str(tmp_path), "--records", str(tmp_path / "rows")]
    assert command.main([*few, *files]) == 0
    content = json.loads((tmp_path / "tables.json").read_text())
    assert {"na", "nafr", "sparsity", "diversity", "gain", "flip_rate"} <= content["table1"]["diffeocf"].keys()
    assert content["table1"]["ace@latent"]["na"] is None or 0 <= content["table1"]["ace@latent"]["na"] <= 1
    why = "The method made values that are not finite."
    assert content["did_not_run"] == {"dive": why}
    assert content["table1"]["dive"] == {**{column.key: None for column in COLUMNS1}, "did_not_run": why}
    assert content["methods"]["diffeocf"]["settings"]["iterations"] == [60]
    text = (tmp_path / "tables-portraits.md").read_text()
    waiting = "SCE-LITE-HQ, DiME, FastDiME, FastDiME-2, FastDiME-2+, ACE, SCE"
    assert f"Not measured yet, so no place is final: {waiting}.\n" in text
    elsewhere = "dime@latent, fastdime@latent, fastdime-2@latent, fastdime-2+@latent, sce@latent"
    assert f"to be had by name: {elsewhere}.\n" in text
    assert "| DiVE | did not run: The method made" in text and "Calibration budget, the same for every method" in text
    records = list(csv.DictReader((tmp_path / "tables-portraits.csv").read_text().splitlines()))
    for columns, title in ((COLUMNS1, "Table 1"), (MOVED, "What the first counterfactuals")):
        found = {record["metric"] for record in records if record["table"].startswith(title) and record["metric"]}
        assert found == {column.key for column in columns}
    assert content["attributes"]["diffeocf"].keys() == {*(column.key for column in MOVED), "intervals"}
    assert [record["row"] for record in records if record["did_not_run"] == why] == ["dive"]
    assert (tmp_path / "tables-portraits.png").is_file() and "## Table 1" in capsys.readouterr().out
    # Nothing is measured where nothing is asked for, and what was measured is shown; a row that broke has no record.
    for name in ("diffeocf", "ace"):
        monkeypatch.setitem(METHODS, name, Method(name, METHODS[name].title, METHODS[name].defaults, broken))  # type: ignore[arg-type]
    picture = (tmp_path / "tables-portraits.png").read_bytes()
    asked = few.index("--methods") + 1
    assert command.main([*few[:asked], *files]) == 0
    shown = json.loads((tmp_path / "tables.json").read_text())
    assert shown["table1"] == {name: row for name, row in content["table1"].items() if name != "dive"}
    assert {"diffeocf", "ace@latent"} <= {kept.name for kept in (tmp_path / "rows/portraits/counterfactuals").iterdir()}
    assert shown["did_not_run"] == {} and (tmp_path / "tables-portraits.png").read_bytes() == picture
    batches = ["--tables", "3", "--timing-batch", "2", "3", "2"]
    assert command.main(["--world", "portraits", *batches, "--methods", *files]) == 0
    cost = json.loads((tmp_path / "tables.json").read_text())
    assert cost["table3_by_batch"] == {"2": {}, "3": {}} and cost["table3"] == {} and cost["batch"] == 2


def test_rows_without_weights_stand_in_the_tables_with_the_file_and_the_command(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = WeightsError("The embedded weights lack portraits/pixel. Rebuild it with `python -m worlds.train pixel`.")

    def lacking(self: Case, space: str) -> None:
        raise missing

    monkeypatch.setattr(Case, "prior", lacking)
    found, tuned, picture = fill(case, asked_for(tmp_path, methods=["dime", "ace"], tables=[1, 2, 3]))
    assert found[1].broken == found[3].broken == {"dime": str(missing), "ace": str(missing)}
    assert found[2].broken == dict.fromkeys(SOURCES, str(missing))  # SCE-LITE-HQ fills it, asked for or not
    assert (tuned, picture) == ({}, None)
    assert "did not run: The embedded weights lack" in found[3].markdown()


def test_sce_lite_hq_starts_from_its_general_defaults(case: Case) -> None:
    assert case.start(Row.of("sce-lite-hq")) == Recipe(k=K)


# Printing --------------------------------------------------------------------------------------------------------


def small_table() -> Table:
    columns = (Column("na", "NA"), Column("seconds", "s", more=False, percent=False, digits=2))
    values = {"a": (0.9, 1.0), "b": (0.8, 0.5), "c": (0.9, 3.0), "d": (math.nan, 0.7)}
    rows = {name: {"na": Figure(na, 0.5, 1.0, 10), "seconds": Figure(s)} for name, (na, s) in values.items()}
    return Table("Table", columns, {"b": {"na": 0.758}}, rows)


def test_the_best_and_the_second_are_marked_ties_alike_and_nan_never() -> None:
    table = small_table()
    more, less = (table.places(column) for column in table.columns)
    assert more == {"a": 1, "c": 1, "b": 2} and less == {"b": 1, "d": 2}
    lines = table.markdown().splitlines()
    assert lines[2] == "|  | NA ↑ | s ↓ |"
    assert lines[4] == "| a | **90.0** <sub>50.0–100.0</sub> | 1.00 |"
    assert lines[5] == "| b | <u>80.0</u> <sub>50.0–100.0</sub> (75.8) | **0.50** |"
    assert lines[7] == "| d | – | <u>0.70</u> |"


def test_json_and_csv_hold_no_nan() -> None:
    table = small_table()
    content = json.loads(json.dumps(table.as_dict(), allow_nan=False))
    assert content["d"]["na"] is None and content["a"]["intervals"]["seconds"] == [None, None]
    record = next(r for r in table.records() if r["row"] == "b" and r["metric"] == "na")
    assert (record["value"], record["paper"], record["place"], record["n"]) == (0.8, 0.758, 2, 10)


def test_the_grid_has_a_named_line_per_method() -> None:
    picture = grid(torch.zeros(3, 3, 64, 64), {"dime": torch.ones(3, 3, 64, 64), "ace": torch.ones(3, 3, 64, 64)})
    assert picture.height == 3 * 64 + 2 * 2 and picture.width == LABEL_WIDTH + 3 * 64 + 2 * 2
    label = picture.crop((0, 66, LABEL_WIDTH, 130))
    assert label.getextrema()[0][0] < 64  # something dark is written there


def test_timings_are_medians_of_processes_that_are_not_started_twice(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([3.0, 1.0, 2.0])

    def spawn(world: World, row: Row, folder: Path, timing: Timing, load_only: bool = False) -> dict[str, float]:
        if load_only:
            return {"seconds": 0.0, "network_calls": 0.0, "peak_rss": 100e6, "weights": 10e6}
        assert METHODS[row.method].load(folder / "settings.json") == case.start(row)
        return {"seconds": next(seconds), "network_calls": 41.0, "peak_rss": 160e6, "weights": 10e6}

    monkeypatch.setattr(costs, "spawn", spawn)
    row, timing = Row.of("diffeocf"), Timing(2)
    cost: Callable[[], dict[str, Figure]] = lambda: costs.Clock(case, row, case.start(row), timing).figures()  # noqa: E731
    first = cost()
    assert first["seconds_per_sample"] == Figure(2.0, 1.0, 3.0, 3)
    assert first["peak_mb"].value == 70.0 and first["network_calls"].value == 41.0
    assert cost() == first  # the iterator is empty: nothing was started again


def test_runs_of_different_rows_take_turns_and_a_row_without_calibration_is_timed_as_its_authors_run_it(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    turns: list[str] = []

    def spawn(world: World, row: Row, folder: Path, timing: Timing, load_only: bool = False) -> dict[str, float]:
        turns.append(f"{row.name}{' loads' if load_only else ''}")
        return {"seconds": float(len(turns)), "network_calls": 7.0, "peak_rss": 160e6, "weights": 10e6}

    monkeypatch.setattr(costs, "spawn", spawn)
    asked = asked_for(tmp_path, methods=["dive", "diffeocf"], tables=[3])
    found, tuned, _ = fill(dataclasses.replace(case, cache=tmp_path / "cache"), asked)
    assert turns == ["diffeocf loads", "diffeocf", "dive loads", "dive", *["diffeocf", "dive"] * 2]
    assert tuned["dive"]["trials"] is None and found[3].rows["diffeocf"]["network_calls"].value == 7.0
    again, _, _ = fill(dataclasses.replace(case, cache=tmp_path / "other"), asked)
    assert again[3].rows == found[3].rows and len(turns) == 8  # on record, so nothing is started
    asked.timing_batch = [2, 3]
    both, _, _ = fill(dataclasses.replace(case, cache=tmp_path / "other"), asked)
    assert len(turns) == 16  # another batch is another measurement, and the first is still on record
    first, second = both[3].chain()
    assert first.rows == found[3].rows and first.rows.keys() == second.rows.keys()
    assert "batch of 2" in first.title and "batch of 3" in second.title and second.title in both[3].markdown()


def test_cost_is_compared_with_that_of_sce_lite_hq_and_of_its_faster_runtime() -> None:
    took = {"sce-lite-hq": 0.5, "sce-lite-hq@onnxruntime": 0.25, "ace": 10.0}
    table = Table("Table 3", COLUMNS3, {}, {name: {"seconds_per_sample": Figure(t)} for name, t in took.items()})
    compare_cost(table)
    assert [table.rows["ace"][key].value for key in ("times_own", "times_onnx")] == [20.0, 40.0]
    assert table.rows["sce-lite-hq"]["times_own"].value == 1.0
    alone = Table("Table 3", COLUMNS3, {}, {"ace": {"seconds_per_sample": Figure(10.0)}})
    compare_cost(alone)
    assert "times_own" not in alone.rows["ace"]  # nothing to compare with


def test_a_record_counts_only_for_what_it_was_measured_of(tmp_path: Path) -> None:
    records, of = Records(tmp_path), {"settings": {"rate": (1, 2)}, "n": 4}
    assert records.once("table1", "ace", of, None) is None
    figures = {"na": Figure(0.5, 0.25, 0.75, 4), "gain": Figure(math.nan)}
    assert records.once("table1", "ace", of, lambda: as_found(figures)) is not None
    stored = records.once("table1", "ace", of, lambda: pytest.fail("it is on record"))
    assert stored is not None
    read = as_figures(stored)
    assert read["na"] == figures["na"] and math.isnan(read["gain"].value) and read["gain"].upper == math.inf
    assert records.once("table1", "ace", {**of, "n": 5}, None) is None
    images = torch.linspace(0, 1, 12 * 3 * 8 * 8).view(12, 3, 8, 8)
    records.keep_pictures("table1", "ace", images)
    assert torch.allclose(records.kept_pictures("table1", "ace", 8), images, atol=1 / 255)


def test_a_process_of_its_own_measures_a_method(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    METHODS["ace"].defaults.changed(iterations=(1,), k=2).save(tmp_path / "settings.json")
    (tmp_path / "guide.safetensors").write_bytes(serialise(case.surrogates.guide.network))
    assert costs.main(["portraits", "ace@latent", str(tmp_path), "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["network_calls"] == 10  # one attack step and RePaint, five each, for one counterfactual
    assert answer["seconds"] > 0 and 0 < answer["weights"] < answer["peak_rss"]
    assert costs.main(["portraits", "ace@latent", str(tmp_path), "2", "--load-only"]) == 0
    assert json.loads(capsys.readouterr().out)["network_calls"] == 0


def test_the_guided_loop_is_timed_on_onnx_runtime_too(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(world: World, row: Row, folder: Path, timing: Timing, load_only: bool = False) -> dict[str, float]:
        arguments = [world.name, row.name, str(folder), str(timing.batch), *(["--onnx"] if timing.onnx else [])]
        assert costs.main([*arguments, *(["--load-only"] if load_only else [])]) == 0
        answer: dict[str, float] = json.loads(capsys.readouterr().out)
        return answer

    monkeypatch.setattr(costs, "spawn", here)
    monkeypatch.setattr(costs, "TIMING_RUNS", 1)
    row = Row.of("sce-lite-hq")
    settings = case.start(row).changed(steps=3, escalation=(1.0,))
    eager, onnx = (costs.Clock(case, row, settings, Timing(2, onnx=onnx)).figures() for onnx in (False, True))
    assert onnx["network_calls"] == eager["network_calls"]
    graphs = list((case.cache / case.world.name / "timings").glob("*/graphs/manifest.json"))
    assert len(graphs) == 1


def test_the_pixel_network_on_onnx_runtime_is_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    prior = open_prior(WORLDS["portraits"], part=PIXEL)
    guide = SurrogateNetwork(2, GUIDE.network).eval().requires_grad_(False)
    quick = QuickPrior(prior, guide, 64)
    assert quick.content_hash == prior.content_hash
    z, t = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(5)), torch.tensor(120)
    with torch.no_grad():
        assert not torch.equal(quick.predict(z, t), prior.predict(z, t))  # it is another program
        assert torch.allclose(quick.predict(z, t), prior.predict(z, t), atol=1e-4)
    seen = z.requires_grad_(True)  # a shape that was asked for a few times is not worth tracing
    (gradient,) = torch.autograd.grad(quick.predict(seen, t).sum(), seen)
    (wanted,) = torch.autograd.grad(prior.predict(seen, t).sum(), seen)
    assert torch.equal(gradient, wanted)
    monkeypatch.setattr(network, "OFTEN", 1)
    (traced,) = torch.autograd.grad(quick.predict(seen, t).sum(), seen)
    assert not torch.equal(traced, wanted)
    assert torch.allclose(traced, wanted, atol=1e-4 * float(wanted.abs().max()))


class SmallNetwork(nn.Module):
    """What the pixel-space network is made of, once each."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 3, 3, padding=1),
        )

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        """z pushed through two convolutions, the second of which hears of t."""
        return z + self.out(F.silu(self.norm(self.into(z))) * torch.sin(t * 0.01))


def test_a_chain_of_networks_in_halves_has_the_gradient_of_autograd() -> None:
    torch.manual_seed(5)
    small, t = SmallNetwork(), torch.tensor(120)
    z, cotangent = torch.randn(2, 3, 16, 16, requires_grad=True), torch.randn(2, 3, 16, 16)
    parts = halves(small, z, t)
    assert all(parameter.requires_grad for parameter in small.parameters())  # it is left as it was
    output = Recorded.apply(Recorded.apply(z, t, parts), t - 20, parts)
    (gradient,) = torch.autograd.grad(output, z, cotangent)
    wanted_output = small(small(z, t), t - 20)
    (wanted,) = torch.autograd.grad(wanted_output, z, cotangent)
    assert torch.allclose(output, wanted_output, atol=1e-5)
    assert torch.allclose(gradient, wanted, atol=1e-5)
    assert not torch.allclose(gradient, cotangent, atol=1e-2)
