"""Nothing that was finished is lost, and nothing of another audit is taken over."""

import json
from pathlib import Path

import pytest

from audit.journal import Journal
from engine.errors import InputError

IDENTITY = {"classifier": "a", "recipe": "b"}


def test_what_was_appended_is_there_when_opened_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / "journal.jsonl", IDENTITY)
    journal.append({"row": 3, "flipped": [True, False]})
    journal.append({"row": 1, "flipped": [False, False]})
    assert Journal(journal.file, IDENTITY).records == journal.records
    assert [record["row"] for record in journal.records] == [3, 1]


def test_a_torn_line_is_cut_off_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", IDENTITY)
    journal.append({"row": 1})
    with journal.file.open("ab") as stream:
        stream.write(b'{"row": 2, "fli')
    again = Journal(journal.file, IDENTITY)
    assert again.records == [{"row": 1}]
    again.append({"row": 2})
    assert Journal(journal.file, IDENTITY).records == [{"row": 1}, {"row": 2}]


def test_a_header_that_was_torn_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b'{"format": 3, "class')
    journal = Journal(tmp_path / "journal.jsonl", IDENTITY)
    journal.append({"row": 1})
    assert Journal(journal.file, IDENTITY).records == [{"row": 1}]


def test_another_audit_s_journal_is_refused_and_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", IDENTITY)
    journal.append({"row": 1})
    with pytest.raises(InputError, match=r"another audit \(different: recipe\)"):
        Journal(journal.file, {**IDENTITY, "recipe": "c"})
    assert Journal(journal.file, IDENTITY).records == [{"row": 1}]


def test_a_journal_of_an_older_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text(json.dumps({"format": 2, **IDENTITY}) + "\n")
    with pytest.raises(InputError, match=r"another audit \(different: format\)"):
        Journal(tmp_path / "journal.jsonl", IDENTITY)


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", IDENTITY)
    with journal.file.open("ab") as stream:
        stream.write(b"not json\n")
    with pytest.raises(InputError, match="damaged"):
        Journal(journal.file, IDENTITY)


def test_a_value_that_json_does_not_know_is_not_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", IDENTITY)
    with pytest.raises(ValueError, match="JSON"):
        journal.append({"row": float("nan")})
    assert Journal(journal.file, IDENTITY).records == []
