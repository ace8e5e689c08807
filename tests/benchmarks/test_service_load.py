"""The load benchmark: its statistics in closed form, its verdict, and a short run against a real server."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import service_load
from benchmarks.service_load import LateError, Target, growth, main, percentile


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values[::-1], 0.99) == 99
    assert percentile(values, 0.5) == 50
    assert percentile([*values, 1000.0], 0.99) == 100
    assert percentile([7.0], 0.99) == 7


def test_growth_leaves_out_what_is_filled_once() -> None:
    filled_once = [100.0, 200.0, 300.0, *[400.0] * 12]
    assert growth(filled_once) == 0
    leaking = [100.0 + n for n in range(50)]
    assert growth(leaking) == 30


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "kept"),
    [(99, 100, False, True), (101, 100, False, False), (0.9, 0.9, True, True), (0.89, 0.9, True, False)],
)
def test_a_missed_target_is_exit_code_1(
    value: float,
    limit: float,
    at_least: bool,
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(args: argparse.Namespace, say: Any) -> tuple[list[Target], dict[str, Any]]:
        return [Target("good", 1, 2, "ms"), Target("this", value, limit, "ms", at_least)], {}

    monkeypatch.setattr(service_load, "measure", measured)
    assert main(["--json", str(tmp_path / "load.json")]) == (0 if kept else 1)
    assert ("MISSED" in capsys.readouterr().out) is not kept
    assert [one["kept"] for one in json.loads((tmp_path / "load.json").read_text())["targets"]] == [True, kept]


def test_a_run_that_takes_too_long_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        raise LateError

    monkeypatch.setattr(service_load, "measure", late)
    assert main([]) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_measures_all_of_it(tmp_path: Path) -> None:
    """Counts too small to say anything of speed, but every question is really asked."""
    counts = ["--asked", "10", "--requests", "4", "--rounds", "2", "--steps", "2", "--growth", "10", "--threads", "1"]
    code = main([*counts, "--minutes", "14", "--json", str(tmp_path / "load.json")])
    found = json.loads((tmp_path / "load.json").read_text())
    targets = {one["name"]: one for one in found["targets"]}
    assert code == (0 if all(one["kept"] for one in targets.values()) else 1)
    assert targets["answered of those asked at once"]["value"] == 4
    assert targets["throughput of service / engine"]["value"] > 0
    assert len(found["rounds"]) == 2
    assert set(found["median_ms"]) == {"status", "liveness", "readiness"}
    assert all(size > 50 for size in found["memory_mb"])
