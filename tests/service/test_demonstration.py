"""The demonstration tells what the audits said, in their order, on the terminal and on its page."""

from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import worlds.demo
import worlds.store
from service.demonstration import Stage, main
from worlds import WORLDS


def report(verdict: str, reliance: float, judgement: str) -> dict[str, Any]:
    image = {"original": "counterfactuals/7-original.png"}
    one = {"file": "counterfactuals/7-1.png", "judgement": judgement}
    return {
        "verdict": verdict,
        "headline": f"The headline of a {verdict}.",
        "reasons": [f"The reason of a {verdict}."],
        "reliance": reliance,
        "lower": max(0.0, reliance - 0.1),
        "upper": min(1.0, reliance + 0.1),
        "limit": 0.2,
        "n_images": 40,
        "images": [{**image, "counterfactuals": [one]}],
    }


REPAIRED = {
    "gain": 0.75,
    **{"worst_group_before": 0.05, "worst_group_after": 0.9, "aga_before": 0.52, "aga_after": 0.88},
    **{"poisoned_before": 1.0, "poisoned_after": 0.99},
}


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Audits that are over at once; returns which classifiers were audited, and where."""
    done: list[str] = []

    def audit(self: Stage, classifier: str, out: Path) -> dict[str, Any]:
        done.append(f"{classifier} into {out.name}")
        return report("FAIL", 0.95, "false") if classifier == "student" else report("PASS", 0.02, "true")

    def repair(self: Stage, audited: Path, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        done.append(f"repair of {audited.name} into {out.name}")
        return REPAIRED, report("PASS", 0.04, "true")

    stage = Stage(**dict.fromkeys(Stage.__dataclass_fields__), **{})  # type: ignore[arg-type]
    stage.world = WORLDS["portraits"]
    monkeypatch.setattr(Stage, "open", lambda cache: stage)
    monkeypatch.setattr(Stage, "audit", audit)
    monkeypatch.setattr(Stage, "repair", repair)
    monkeypatch.setattr(worlds.demo, "main", lambda out: out / "index.html")
    monkeypatch.setattr(worlds.store, "open_classifier", lambda world, role: role)
    return done


class Page(HTMLParser):
    """The words, links and pictures of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.links, self.pictures = "", list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = SimpleNamespace(**{name: value for name, value in attrs if name in ("href", "src")})
        self.links += [found.href] if tag == "a" else []
        self.pictures += [found.src] if tag == "img" else []

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_story_is_told_in_its_order(audits: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = main(tmp_path / "demo")
    assert audits == ["student into student", "twin into twin", "repair of student into repair"]
    told = capsys.readouterr().out
    parts = [
        "1. The worlds",
        "2. The student",
        "FAIL after 40",
        "3. Its twin",
        "PASS after 40",
        "4. The student",
        "Worst group",
    ]
    places = [told.index(part) for part in parts]
    assert places == sorted(places)
    assert "flips it in 95 % of them (between 85 % and 100 %; allowed are 20 %)" in told
    assert "Worst group: 5 % → 90 % right." in told
    assert "75 % of the error is gone" in told
    assert page == tmp_path / "demo" / "report.html"
    shown = Page(page.read_text())
    assert shown.links == [
        "worlds/index.html",
        "student/report.html",
        "twin/report.html",
        "repair/rounds/1/audit/report.html",
    ]
    assert shown.pictures[:2] == ["student/counterfactuals/7-original.png", "student/counterfactuals/7-1.png"]
    assert "The reason of a FAIL." in shown.words
    assert not list(page.parent.glob("*.partial"))
