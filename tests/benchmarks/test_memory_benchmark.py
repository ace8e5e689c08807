"""The memory benchmark measures real processes and holds them against the budget."""

import json
import pathlib

import pytest

from benchmarks.memory import main


@pytest.mark.slow
def test_a_planned_run_stays_inside_its_budget(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    settings = ["--resolutions", "128", "--settings", "plain", "planned", "--batch", "4", "--width", "16"]
    assert main([*settings, "--json", str(file)]) == 0
    plain, planned = json.loads(file.read_text())["rows"]
    assert planned["inside"] and planned["planned_mb"] <= planned["budget_mb"]
    assert 0 < planned["peak_mb"] < plain["peak_mb"]
    assert capsys.readouterr().out.count("\n") == 3
