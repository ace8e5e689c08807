"""python -m export.prove on the embedded priors: every promised key, and figures that hold.

Everything is exported, compared and built as in a real proof. What is not proven is cut short: pictures take few steps,
and the recipe has few and no escalation. The guide is the real network with drawn weights. How well half precision
keeps the gradient of a distilled one depends on its training; that is the real proof's to measure, not this test's.
"""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.surrogate import Query, SurrogateRecipe
from engine.surrogate_net import SurrogateNetwork
from export import pace, prove, rtx, subject
from worlds import WORLDS

GRAPHS = {"encoder", "decoder", "velocity", "surrogate", "guidance"}
SHORT = {"steps": 4, "escalation": [1.0], "redraw": 0, "harmonise": []}


def drawn_guide(query: Query, images: Tensor, recipe: SurrogateRecipe) -> SimpleNamespace:
    torch.manual_seed(recipe.seed)
    network = SurrogateNetwork(len(query(images[:1])[0]), recipe.network)
    return SimpleNamespace(network=network.eval().requires_grad_(False), agreement=None)


@pytest.mark.slow
@pytest.mark.rtx
@pytest.mark.parametrize("world", WORLDS)
def test_every_graph_of_the_embedded_priors_is_proven_and_builds(
    world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, classifier, recipe = subject.find(world)
    assert recipe is not None
    short = tmp_path / "recipe.json"
    short.write_text(json.dumps({**json.loads(recipe.read_text()), **SHORT}))
    monkeypatch.setattr(subject, "find", lambda name: (folder, classifier, short))
    monkeypatch.setattr(subject, "generate", partial(subject.generate, steps=6))
    monkeypatch.setattr(subject, "N_PICTURES", 2)
    monkeypatch.setattr(subject, "BATCH", 2)
    monkeypatch.setattr(subject, "distil", drawn_guide)
    file = tmp_path / "figures.json"
    assert prove.main(["--prior", world, "--json", str(file), "--rounds", "1"]) == 0
    figures = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == figures
    assert figures["flips_identical"] is True
    assert figures["ort_over_two_decodes"] > 0 and figures["ort_over_eager"] > 0
    assert figures["memory_kept"]["ort_over_two_decodes"] > 0
    assert figures["behind_the_proof"]["ort_over_two_decodes"] > 0
    assert set(figures["page_faults"]) == {"eager", "two_decodes", "onnxruntime"}
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
    assert pace.ratio(seconds, "fast", "slow") == 0.5
