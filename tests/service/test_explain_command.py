"""`pfungst explain` and `pfungst calibrate` as a user runs them: outcome on stdout, one sentence for each mistake."""

import json
from pathlib import Path

import pytest

from audit.pictures import save_png, to_pil
from engine.methods import METHODS
from service.cli import main
from service.commands.explain import BASELINES, DEFAULT_METHOD
from worlds import WORLDS
from worlds.store import WEIGHTS

STUDENT = str(WEIGHTS / "portraits" / "student")


@pytest.fixture
def image(tmp_path: Path) -> str:
    """A portrait as a PNG file."""
    save_png(to_pil(WORLDS["portraits"].sample(1, seed=6).images[0]), tmp_path / "portrait.png")
    return str(tmp_path / "portrait.png")


@pytest.mark.slow
@pytest.mark.timeout(900)  # distils two surrogates
def test_a_portrait_is_explained(image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    arguments = ["explain", "--classifier", STUDENT, "--image", image, "--k", "1", "--cache", str(cache)]
    assert main([*arguments, "--out", str(out), "--max-memory", "4GiB"]) == 0
    said = capsys.readouterr().out
    assert "counterfactual 1:" in said
    assert str(out / "explanation.png") in said
    told = json.loads((out / "explanation.json").read_text())
    assert told["recipe"]["k"] == 1
    assert told["plan"]["peak"] <= told["plan"]["budget"] == 4 * 1024**3


def _mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_mistakes_get_one_sentence_and_leave_nothing_behind(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    common = ["--out", str(out), "--cache", str(tmp_path / "cache")]
    text = tmp_path / "text.png"
    text.write_text("hello")
    explain = ["explain", "--classifier", STUDENT, *common]
    assert "lacks config.json" in _mistake(capsys, "explain", "--classifier", str(tmp_path), "--image", image, *common)
    assert "not an image" in _mistake(capsys, *explain, "--image", str(text))
    assert "not a file" in _mistake(capsys, *explain, "--image", str(tmp_path / "nothing.png"))
    assert "knows: dark, blond" in _mistake(capsys, *explain, "--image", image, "--target", "grey")
    assert "no folder" in _mistake(capsys, *explain, "--image", image, "--prior", "sepia")
    assert "'k'" in _mistake(capsys, *explain, "--image", image, "--k", "0")
    assert "like 4GiB" in _mistake(capsys, *explain, "--image", image, "--max-memory", "plenty")
    assert "no method 'time'; there are sce-lite-hq" in _mistake(capsys, *explain, "--image", image, "--method", "time")
    ace = [*explain, "--image", image, "--method", "ace"]
    assert "ace runs in eager torch alone" in _mistake(capsys, *ace, "--runtime", "onnx")
    assert "for the method sce-lite-hq alone" in _mistake(capsys, *ace, "--max-memory", "4GiB")
    settings = tmp_path / "settings.json"
    settings.write_text('{"eta": 1}')
    assert "method's settings has no setting 'eta'" in _mistake(capsys, *ace, "--recipe", str(settings))
    assert "needs at least" in _mistake(capsys, *explain, "--image", image, "--max-memory", "1MB")
    assert not out.exists()


def test_an_audit_takes_a_method_and_the_priors_of_its_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = ["audit", "--world", "portraits", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert "no method 'time'" in _mistake(capsys, *audit, "--method", "time")
    assert "dime runs in eager torch alone" in _mistake(capsys, *audit, "--method", "dime", "--runtime", "onnx")
    assert "does not go with --server" in _mistake(capsys, *audit, "--method", "dime", "--server", "http://localhost:1")
    assert "it has portraits and portraits-pixel" in _mistake(capsys, *audit, "--prior", "histology")
    assert not (tmp_path / "out").exists()


def test_the_help_names_every_method() -> None:
    assert (DEFAULT_METHOD, *BASELINES) == tuple(METHODS)


def test_calibration_asks_for_a_prior(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs --prior" in _mistake(capsys, "calibrate", "--classifier", STUDENT)


def test_calibration_takes_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["calibrate", "--classifier", STUDENT, "--prior", "portraits", "--max-memory"]
    assert "like 4GiB" in _mistake(capsys, *arguments, "plenty")
