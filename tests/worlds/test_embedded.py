"""The shipped models keep what the foundations promise, measured on fresh pictures."""

import json
from pathlib import Path

import pytest
import torch

from engine.sampling import generate
from worlds import WORLDS, World, report
from worlds.demo import main as demo
from worlds.measure import Measurement, measure
from worlds.report import PROMISES, kept, table
from worlds.store import open_prior

SAMPLES = 300


@pytest.fixture(params=list(WORLDS), scope="module")
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.param]


@pytest.fixture(scope="module")
def found(world: World) -> Measurement:
    """The embedded models of a world, measured now, with fewer samples than `python -m worlds.report` takes."""
    return measure(world, generate(open_prior(world), SAMPLES, world.size, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first one measures
@pytest.mark.parametrize("key", [key for key in PROMISES if key != "frechet_ratio"])
def test_promises_about_reconstructions_and_classifiers_are_kept(found: Measurement, key: str) -> None:
    assert kept(getattr(found, key), PROMISES[key])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_promise_about_samples_is_kept_by_a_few_hundred(found: Measurement) -> None:
    """Real pictures are as few as the samples, so both distances are larger than those of a thousand."""
    assert kept(found.frechet_ratio, PROMISES["frechet_ratio"])


def test_samples_come_from_their_seed(world: World) -> None:
    prior = open_prior(world)
    first = generate(prior, 2, world.size, seed=1, steps=4)
    assert torch.equal(first, generate(prior, 2, world.size, seed=1, steps=4))
    assert not torch.equal(first, generate(prior, 2, world.size, seed=2, steps=4))


def _measurement(**changes: float) -> Measurement:
    good = dict.fromkeys(Measurement.__dataclass_fields__, 1.0) | {"psnr": 35.0, "student_worst_group": 0.2}
    return Measurement(**{**good, **changes})  # type: ignore[arg-type]


def test_the_report_says_which_promise_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "measure", lambda world: _measurement())
    assert report.main(["--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"portraits", "histology", "weights_mb"}
    assert set(PROMISES) <= set(figures["portraits"])
    assert "MISSED" not in capsys.readouterr().out
    monkeypatch.setattr(report, "measure", lambda world: _measurement(psnr=30.0))
    assert report.main([]) == 1
    missed = [line for line in capsys.readouterr().out.splitlines() if "MISSED" in line]
    assert len(missed) == 1
    assert missed[0].startswith("psnr")


def test_the_table_has_every_figure() -> None:
    text = table({"portraits": _measurement()}, 12.5)
    for key in Measurement.__dataclass_fields__:
        assert key in text


@pytest.mark.slow
def test_the_demo_writes_a_page_that_needs_no_other_file(tmp_path: Path) -> None:
    page = demo(tmp_path / "demo")
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 3 * len(WORLDS)
    assert "http" not in text
    assert "student" in text
    assert not list(tmp_path.rglob("*.partial"))
