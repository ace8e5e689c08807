"""Results as JUnit XML, which GitLab, Jenkins and GitHub actions show beside a pipeline.

One test case for each direction and each prerequisite of an audit. Text comes from labels and files of strangers: what
XML 1.0 does not allow is left out, the rest is escaped.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from engine.writing import replacing

Outcome = Literal["passed", "failed", "skipped", "error"]

ELEMENTS: dict[Outcome, str] = {"failed": "failure", "skipped": "skipped", "error": "error"}
PLURALS: dict[str, Outcome] = {"failures": "failed", "errors": "error", "skipped": "skipped"}
NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Case:
    """One test case: a direction of the audit, or something it needs."""

    name: str
    classname: str
    seconds: float
    outcome: Outcome
    message: str = ""
    """One line that a pipeline shows beside the name."""
    details: str = ""
    """As many lines as needed; of a passed case they stand as its output."""


def write_junit(
    file: Path,
    suite_name: str,
    cases: Sequence[Case],
    properties: Mapping[str, object] | None = None,
    timestamp: datetime | None = None,
) -> None:
    """Writes one suite under a temporary name, then renames it; without a timestamp the same cases give the same bytes.

    A timestamp is written in UTC without a zone, the only form that the common schema takes; a naive one counts as UTC.
    """
    totals = {
        "name": _clean(suite_name),
        "tests": str(len(cases)),
        **{plural: _count(cases, outcome) for plural, outcome in PLURALS.items()},
        "time": _seconds(*(case.seconds for case in cases)),
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", totals)
    if timestamp is not None:
        aware = timestamp if timestamp.tzinfo is not None else timestamp.replace(tzinfo=UTC)
        suite.set("timestamp", aware.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S"))
    if properties:
        listed = ElementTree.SubElement(suite, "properties")
        for name, value in properties.items():
            ElementTree.SubElement(listed, "property", name=_clean(name), value=_clean(str(value)))
    for case in cases:
        _add(suite, case)
    ElementTree.indent(root)
    with replacing(file) as partial:
        ElementTree.ElementTree(root).write(partial, encoding="utf-8", xml_declaration=True)


def _add(suite: ElementTree.Element, case: Case) -> None:
    element = ElementTree.SubElement(
        suite,
        "testcase",
        {"name": _clean(case.name), "classname": _clean(case.classname), "time": _seconds(case.seconds)},
    )
    if case.outcome == "passed":
        if text := "\n".join(part for part in (case.message, case.details) if part):
            ElementTree.SubElement(element, "system-out").text = _clean(text)
        return
    attributes = {"message": _clean(case.message)}
    if case.outcome != "skipped":
        attributes["type"] = case.outcome
    ElementTree.SubElement(element, ELEMENTS[case.outcome], attributes).text = _clean(case.details)


def _count(cases: Sequence[Case], outcome: Outcome) -> str:
    return str(sum(case.outcome == outcome for case in cases))


def _seconds(*seconds: float) -> str:
    return f"{sum(s for s in seconds if math.isfinite(s) and s > 0):.3f}"


def _clean(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold even escaped: controls, lone surrogates, U+FFFE, U+FFFF."""
    return NOT_IN_XML.sub("", text)
