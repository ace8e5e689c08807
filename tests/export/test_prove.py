"""python -m export.prove on the smallest prior there is: every promised key, and figures that hold."""

import json
from pathlib import Path

import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification

from export import prove, rtx
from tests.engine.test_prior import save_sd3


@pytest.mark.proof
def test_the_promised_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save_sd3(tmp_path / "prior")
    torch.manual_seed(1)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=2)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "student")
    settings = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "student" / "preprocessor_config.json").write_text(json.dumps(settings))
    # An untrained prior draws one grey picture, on which a guide's norms would learn a variance of zero.
    monkeypatch.setattr(prove, "generate", lambda prior, n, size, seed: torch.rand(n, 3, size, size))
    monkeypatch.setattr(prove, "N_PICTURES", 20)
    monkeypatch.setattr(prove, "BATCH", 2)
    monkeypatch.setattr(prove, "GUIDE", prove.GUIDE.changed(steps=2, batch=4))
    monkeypatch.setattr(rtx, "available", lambda: False)
    file = tmp_path / "figures.json"
    assert prove.main(["--prior", str(tmp_path / "prior"), "--json", str(file), "--rounds", "1"]) == 0
    figures = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == figures
    assert figures["flips_identical"] is True
    assert figures["ort_over_eager"] > 0 and figures["ort_over_two_decodes"] > 0
    graphs = figures["graphs"]
    assert set(graphs) == {"encoder", "decoder", "velocity", "surrogate", "guidance"} == set(figures["rtx_builds"])
    assert graphs["guidance"]["fp32_gradient_error"] <= 1e-4 and graphs["guidance"]["fp16_cosine"] >= 0.999
    assert all(graphs[name]["fp32_error"] <= 1e-4 for name in graphs if name != "guidance")
    assert all("not installed" in one[p] for one in figures["rtx_builds"].values() for p in ("fp32", "fp16"))


def test_a_prior_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove.main(["--prior", str(tmp_path / "nothing")]) == 2
    assert "no embedded prior" in capsys.readouterr().err
