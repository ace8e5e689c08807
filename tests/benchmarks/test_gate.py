"""The gate's benchmark: who is counted as what, what a fixed test would have needed, and that nothing is done twice."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from audit.confidence import fixed_size
from audit.metrics import group_accuracies
from audit.policy import Policy
from audit.teachers import OracleTeacher
from benchmarks import gate
from benchmarks.gate import (
    Bench,
    Student,
    StudentRecipe,
    area_under,
    draw,
    fixed_images,
    plot,
    roc,
    run,
    students,
    summarise,
)
from benchmarks.numbers import finite
from engine.errors import InputError
from engine.rate import Rate
from engine.surrogate import EVALUATOR, GUIDE
from worlds import WORLDS
from worlds.store import open_classifier, open_prior, open_recipe

WORLD = WORLDS["portraits"]
POLICY = Policy()


def line(gap: float, verdict: str, reliance: float | None, n_images: int = 40) -> dict[str, Any]:
    seconds = {"train": 1.0, "test": 1.0, "distil": 1.0, "audit": 1.0}
    return {"name": f"{gap}", "gap": gap, "verdict": verdict, "reliance": reliance, "n_images": n_images} | {
        "seconds": seconds
    }


def test_at_least_forty_students_are_trained_and_any_first_part_of_them_is_a_mixture() -> None:
    found = students()
    assert len(found) >= 40
    assert len({student.name for student in found}) == len(found)
    assert {student.rho for student in found} >= {0.5, 1.0}
    assert all(0.5 <= student.rho <= 1 for student in found)
    for n in (2, 8, 20):
        part = found[:n]
        assert abs(sum(s.rho < 0.85 for s in part) - sum(s.rho > 0.85 for s in part)) <= 2


@pytest.mark.parametrize("rho", [0.5, 0.9, 1.0])
def test_a_student_s_data_agrees_as_often_as_it_should_and_repeats_nothing(rho: float) -> None:
    pool = WORLD.sample(1_000, seed=9)
    student = Student(rho, 7)
    images, labels = draw(pool, student, 400)
    again, _ = draw(pool, student, 400)
    assert images.equal(again)
    assert not images.equal(draw(pool, replace(student, seed=8), 400)[0])
    rows = {picture.numpy().tobytes(): row for row, picture in enumerate(pool.images.mul(255).round().byte())}
    chosen = [rows[picture.numpy().tobytes()] for picture in images]
    assert len(set(chosen)) == 400
    assert labels.tolist() == pool.labels[chosen].tolist()
    agree = (pool.labels[chosen] == pool.confounders[chosen]).float().mean().item()
    assert agree == pytest.approx(rho, abs=4 * math.sqrt(rho * (1 - rho) / 400) + 1e-9)


def test_the_fixed_test_has_the_errors_of_the_sequential_one_on_both_sides() -> None:
    assert fixed_images(POLICY) == 2 * max(fixed_size(0.2, 0.35, 0.025, 0.95), fixed_size(0.2, 0.05, 0.05, 0.95))
    assert fixed_images(POLICY, effect=0.1) > fixed_images(POLICY) > fixed_images(POLICY, effect=0.3)
    assert gate.EFFECT == 0.15  # stated before any result was seen


def test_verdicts_are_counted_against_the_true_gap() -> None:
    lines = [
        *(line(0.01, "PASS", 0.0) for _ in range(6)),
        line(0.05, "FAIL", 0.5),
        line(0.02, "INCONCLUSIVE", None, 200),
        line(0.15, "FAIL", 0.4),
        *(line(0.45, "FAIL", 1.0, 20) for _ in range(3)),
        line(0.30, "INCONCLUSIVE", 0.25, 200),
    ]
    found = summarise(lines, POLICY)
    assert found["students"] == 13
    assert found["false_alarm_rate"] == 1 / 8
    assert found["honest_passed"]["value"] == 6 / 8
    assert found["miss_rate"] == 1 / 4  # undecided about a biased one is a miss
    assert found["biased_passed"]["value"] == 0.0
    assert found["inconclusive"]["value"] == 2 / 13
    assert found["sequential_over_fixed"] == 40 / fixed_images(POLICY)
    assert found["fixed"]["others"].keys() == {"0.10", "0.20", "0.30"}
    json.dumps(found, allow_nan=False)


def test_without_students_of_a_kind_there_is_no_rate() -> None:
    found = finite(summarise([line(0.01, "PASS", 0.0)], POLICY))
    assert found["false_alarm_rate"] == 0.0
    assert found["miss_rate"] is None
    assert found["auc"] is None
    json.dumps(finite(summarise([], POLICY)), allow_nan=False)


def test_the_roc_curve_of_a_known_case() -> None:
    honest, biased = [0.0, 0.0, 0.6], [0.6, 0.9]
    assert roc(honest, biased) == [(0, 0), (0, 0.5), (pytest.approx(1 / 3), 1), (1, 1)]
    assert area_under(honest, biased) == pytest.approx((2 + 2 + 0.5 + 1) / 6)
    assert area_under([0.1], [0.2]) == 1.0
    assert math.isnan(area_under([], [0.2]))


def test_the_plot_is_a_picture_of_every_student() -> None:
    lines = [line(0.01, "PASS", 0.0), line(0.2, "INCONCLUSIVE", None), line(0.4, "FAIL", 0.9)]
    root = ElementTree.fromstring(plot(lines, POLICY, "A plot"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}circle/{space}title")) == 3
    assert len(root.findall(f"{space}polyline")) == 1
    ElementTree.fromstring(plot([], POLICY, "Nothing yet"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The real thing, a few steps of everything."""
    monkeypatch.setattr(gate, "N_AUDITED", 24)
    few = {"steps": 3, "batch": 4, "adversarial_weight": 0.0, "extra_queries": 0}
    oracle = open_classifier(WORLD, "oracle")
    return Bench(
        world=WORLD,
        prior=open_prior(WORLD),
        recipe=open_recipe(WORLD).changed(k=1, steps=4, escalation=(1.0,), prune=False, second_pass=False),
        policy=Policy(min_images=1, max_images=4, min_evaluator_agreement=0),
        teacher=OracleTeacher(oracle.probabilities, Rate.of(99, 100), content_hash=oracle.content_hash),
        pool=WORLD.sample(300, 1),
        test=WORLD.sample(60, 2),
        pictures=WORLD.sample(20, 3).images,
        out=tmp_path / WORLD.name,
        student=StudentRecipe(images=64, steps=3, jitter=True, widths=(8, 8)),
        guide=GUIDE.changed(**few),
        evaluator=EVALUATOR.changed(**few),
    )


def test_students_are_trained_audited_and_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Student(0.5, 1), Student(1.0, 2)
    found = run(bench, [first])
    (known,) = found
    classifier = bench.classifier(first)
    groups = group_accuracies(
        classifier.probabilities(bench.test.images).argmax(1), bench.test.labels, bench.test.confounders
    )
    assert known["gap"] == pytest.approx(groups.aga.value - groups.worst.value)
    assert known["n_images"] == 4
    assert {"train", "test", "distil", "audit"} == known["seconds"].keys()
    assert not list((bench.out / "checkpoints").iterdir())

    measured: list[Student] = []

    def measure(self: Bench, student: Student) -> dict[str, Any]:
        measured.append(student)
        return {**known, "name": student.name}

    monkeypatch.setattr(Bench, "measure", measure)
    assert [one["name"] for one in run(bench, [first, second])] == [first.name, second.name]
    assert measured == [second]
    assert run(bench, [first]) == found
    with pytest.raises(InputError, match="different: policy"):
        run(replace(bench, policy=POLICY), [first])
