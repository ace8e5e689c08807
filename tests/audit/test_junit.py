"""JUnit XML: what a pipeline reads, and text from strangers that must not break it."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from xml.etree import ElementTree

import pytest

from audit.junit import Case, write_junit

CASES = [
    Case("dark to blond", "pfungst.direction", 1.25, "passed", "reliance 0.02, limit 0.10"),
    Case("blond to dark", "pfungst.direction", 2.5, "failed", "reliance 0.61, limit 0.10", "beard moved\ntwice"),
    Case("teacher accuracy", "pfungst.prerequisite", 0.0, "skipped", "no teacher was given"),
    Case("flip rate", "pfungst.prerequisite", 0.5, "error", "the generator never flipped"),
]


def test_every_outcome_is_counted_and_told(tmp_path: Path) -> None:
    write_junit(tmp_path / "out" / "junit.xml", "pfungst", CASES, {"seed": 7, "classifier": "student"})
    root = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()
    suite = root.find("testsuite")
    assert root.tag == "testsuites"
    assert suite is not None
    for element in (root, suite):
        assert {key: element.get(key) for key in ("name", "tests", "failures", "errors", "skipped", "time")} == {
            "name": "pfungst",
            "tests": "4",
            "failures": "1",
            "errors": "1",
            "skipped": "1",
            "time": "4.250",
        }
    assert [(p.get("name"), p.get("value")) for p in suite.iter("property")] == [
        ("seed", "7"),
        ("classifier", "student"),
    ]
    passed, failed, skipped, error = suite.iter("testcase")
    assert [child.tag for child in passed] == ["system-out"]
    assert passed.findtext("system-out") == "reliance 0.02, limit 0.10"
    failure = failed.find("failure")
    assert failure is not None
    assert (failure.get("message"), failure.text) == ("reliance 0.61, limit 0.10", "beard moved\ntwice")
    assert [child.tag for child in skipped] == ["skipped"]
    assert [child.get("message") for child in error] == ["the generator never flipped"]
    assert (error.get("classname"), error.get("time")) == ("pfungst.prerequisite", "0.500")


@pytest.mark.parametrize("outcome", ["passed", "failed", "skipped", "error"])
def test_hostile_text_stays_text(tmp_path: Path, outcome: str) -> None:
    hostile = '<script>alert("1")</script> ]]> &amp; \x00\x08\x1b[31m \ud800 \ufffe\uffff grün 🐴'
    clean = '<script>alert("1")</script> ]]> &amp; [31m   grün 🐴'
    case = Case(hostile, hostile, 1, outcome, hostile, hostile)  # type: ignore[arg-type]
    write_junit(tmp_path / "junit.xml", hostile, [case], {hostile: hostile})
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [element.tag for element in root.iter() if element.tag == "script"] == []
    assert root.get("name") == clean
    found = next(root.iter("testcase"))
    assert (found.get("name"), found.get("classname")) == (clean, clean)
    told = next(iter(found))
    assert told.text == (f"{clean}\n{clean}" if outcome == "passed" else clean)
    prop = next(root.iter("property"))
    assert (prop.get("name"), prop.get("value")) == (clean, clean)
    assert b"<script" not in (tmp_path / "junit.xml").read_bytes()


def test_line_breaks_in_a_message_survive(tmp_path: Path) -> None:
    write_junit(tmp_path / "junit.xml", "s", [Case("a", "b", 1, "failed", "one\ntwo")])
    failure = next(ElementTree.parse(tmp_path / "junit.xml").getroot().iter("failure"))
    assert failure.get("message") == "one\ntwo"


def test_the_same_cases_give_the_same_bytes_and_leave_nothing_behind(tmp_path: Path) -> None:
    for name in ("a.xml", "b.xml"):
        write_junit(tmp_path / name, "pfungst", CASES)
    assert (tmp_path / "a.xml").read_bytes() == (tmp_path / "b.xml").read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"a.xml", "b.xml"}


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2026, 3, 1, 12, 30, 15, 999999, tzinfo=UTC),
        datetime(2026, 3, 1, 14, 30, 15, tzinfo=timezone(timedelta(hours=2))),
        datetime(2026, 3, 1, 12, 30, 15),
    ],
)
def test_a_timestamp_is_utc_without_a_zone(tmp_path: Path, moment: datetime) -> None:
    write_junit(tmp_path / "junit.xml", "s", [], timestamp=moment)
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    assert suite.get("timestamp") == "2026-03-01T12:30:15"


def test_a_time_that_is_no_number_is_zero(tmp_path: Path) -> None:
    write_junit(tmp_path / "junit.xml", "s", [Case("a", "b", float("nan"), "passed"), Case("c", "d", 2, "passed")])
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [case.get("time") for case in root.iter("testcase")] == ["0.000", "2.000"]
    assert root.get("time") == "2.000"
