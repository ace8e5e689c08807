"""python -m export.prove on the embedded priors: every promised key, and figures that hold.

Everything is exported, compared and built as in a real proof; only the guide is distilled from fewer pictures and the
batch is smaller.
"""

import json
from pathlib import Path

import pytest

from export import prove, rtx
from worlds import WORLDS

GRAPHS = {"encoder", "decoder", "velocity", "surrogate", "guidance"}


@pytest.mark.proof
@pytest.mark.rtx
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS)
def test_every_graph_of_the_embedded_priors_is_proven_and_builds(
    world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "N_PICTURES", 64)
    monkeypatch.setattr(prove, "BATCH", 2)
    monkeypatch.setattr(prove, "GUIDE", prove.GUIDE.changed(steps=60, extra_queries=0))
    file = tmp_path / "figures.json"
    assert prove.main(["--prior", world, "--json", str(file), "--rounds", "1"]) == 0
    figures = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == figures
    assert figures["flips_identical"] is True
    assert figures["ort_over_two_decodes"] > 0 and figures["ort_over_eager"] > 0
    graphs, builds = figures["graphs"], figures["rtx_builds"]
    assert set(graphs) == GRAPHS == set(builds)
    assert graphs["guidance"]["fp32_gradient_error"] <= 1e-4
    assert all(graphs[name]["fp32_error"] <= 1e-4 for name in GRAPHS - {"guidance"})
    assert all(graph["fp16_cosine"] >= 0.999 for graph in graphs.values())
    if rtx.available():
        assert builds == {name: {"fp32": True, "fp16": True} for name in GRAPHS}
    else:
        assert all("not installed" in build["fp16"] for build in builds.values())


def test_a_prior_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove.main(["--prior", str(tmp_path / "nothing")]) == 2
    assert "no embedded prior" in capsys.readouterr().err


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that slows down tenfold between rounds changes both times and no ratio."""
    seconds = {"fast": [1.0, 10.0, 1.0], "slow": [2.0, 20.0, 2.0]}
    assert prove.ratio(seconds, "fast", "slow") == 0.5
