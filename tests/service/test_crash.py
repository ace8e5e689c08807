"""kill -9 of workers at random moments: nothing that was finished is lost or done twice, and every job ends."""

import json
from pathlib import Path

import pytest

from benchmarks import service_crash
from benchmarks.service_crash import Found, crash, main


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_kills_leave_no_trace(tmp_path: Path) -> None:
    found = crash(tmp_path, kills=3, seed=7, spread=1.0, images=4, minutes=14)
    assert len(found.kills) == 3
    assert found.jobs >= 3
    assert found.images == 4 * found.jobs
    assert (found.lost, found.duplicated, found.different, found.missing, found.unfinished) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("harm", ["lost", "duplicated", "different", "missing", "unfinished"])
def test_any_harm_is_exit_code_1(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_crash, "crash", lambda home, **_: Found(jobs=2, images=8, **{harm: 1}))
    assert main(["--json", str(tmp_path / "crash.json")]) == 1
    assert json.loads((tmp_path / "crash.json").read_text())[harm] == 1
    assert f"{harm}  1" in capsys.readouterr().out
    monkeypatch.setattr(service_crash, "crash", lambda home, **_: Found(jobs=2, images=8))
    assert main([]) == 0
