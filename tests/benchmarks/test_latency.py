"""The waterfall measures real runs; a row that cannot run says why; the plot shows every curve."""

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from benchmarks import latency
from benchmarks.latency import TRICKS, Point, Row, Trick, one_pass, plot, show, waterfall, write_csv
from engine.errors import ModelError
from engine.prior import load_prior
from engine.recipe import Recipe
from engine.runtime import Runtime
from engine.surrogate_net import NetworkConfig, SurrogateNetwork
from export.subject import Subject
from tests.engine.test_prior import save_sd3

SMALL = NetworkConfig(input_size=32, widths=(8, 16), blocks=1)


def small_subject(folder: Path) -> Subject:
    prior = load_prior(save_sd3(folder))
    models: list[nn.Module] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(SurrogateNetwork(2, SMALL).eval().requires_grad_(False))
    x0 = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return Subject(prior, models[0], models[1], None, Recipe(steps=3, strength=1.0), x0)


def test_every_row_has_its_figures_or_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager rows on a tiny prior, and one that cannot run."""

    def missing(subject: Subject, recipe: Recipe, folders: Path) -> Runtime:
        raise ModelError("there is no such device")

    monkeypatch.setattr(latency, "TRICKS", (*TRICKS[:3], Trick("absent", "nothing", True, missing)))
    subject = small_subject(tmp_path / "prior")
    told: list[str] = []
    rows = waterfall(subject, "tiny", tmp_path, 2, told.append, memory=False)
    assert [row.row for row in rows] == ["two decodes", "one decode", "channels last", "absent"]
    first, second, third, absent = rows
    assert not absent.runs_here and absent.reason == "there is no such device" and absent.flip_rate is None
    assert first.over_two_decodes == 1.0 and first.over_row_before is None and second.over_one_decode == 1.0
    assert all(row.gradient_cosine == pytest.approx(1.0, abs=1e-5) for row in (first, second, third))
    assert first.flip_rate == second.flip_rate == third.flip_rate and first.n == 2 and first.rounds == 2
    assert "absent           not run here: there is no such device" in show(rows)
    write_csv(tmp_path / "rows.csv", Row, rows)
    read = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert read[3]["seconds_per_counterfactual"] == "" and read[3]["reason"] == absent.reason
    assert "torch" in read[0]["versions"] and read[0]["machine"] and float(read[0]["seconds_per_counterfactual"]) > 0


def test_all_tricks_of_the_issue_are_rows_in_their_order() -> None:
    names = ["two decodes", "one decode", "channels last", "onnx runtime", "early stop", "half precision"]
    assert [trick.name for trick in TRICKS] == [*names, "tensorrt", "cuda graph"]
    assert [trick.early_stop for trick in TRICKS] == [False] * 4 + [True] * 4


def test_a_pass_is_the_same_work_for_every_row() -> None:
    recipe = one_pass(Recipe(k=3, prune=True, second_pass=True, margin=0.7), early_stop=False)
    assert recipe.k == 1 and recipe.escalation == (1.0,) and recipe.margin is None and not recipe.prune
    assert one_pass(Recipe(margin=0.7), early_stop=True).margin == 0.7


def test_the_plot_holds_every_point() -> None:
    points = [
        Point(axis, value, kind, value * (1.0 if kind == "eager" else 0.5), "tiny")
        for axis in ("batch", "resolution")
        for value in (1, 2, 4)
        for kind in ("eager", "onnx runtime")
    ]
    root = ElementTree.fromstring(plot(points))
    spaces = {"s": "http://www.w3.org/2000/svg"}
    assert len(root.findall("s:circle", spaces)) == len(points)
    assert len(root.findall("s:polyline", spaces)) == 4
    # Half the time lies lower on the page, and growth goes to the upper right.
    circles = root.findall("s:circle", spaces)
    xs, ys = ([float(circle.get(name, "0")) for circle in circles] for name in ("cx", "cy"))
    assert xs[0] < xs[1] < xs[2] and ys[0] > ys[1] > ys[2] and ys[3] > ys[0]


def test_a_prior_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert latency.main(["--prior", str(tmp_path / "nothing")]) == 2
    assert "no embedded prior" in capsys.readouterr().err
