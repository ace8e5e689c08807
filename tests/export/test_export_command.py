"""`pfungst export`: bad input ends with one line and exit code 2 before anything is distilled or written."""

from pathlib import Path

import pytest

from service.cli import main
from worlds.store import WEIGHTS

STUDENT = str(WEIGHTS / "portraits" / "student")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "export needs --prior"),
        (["--prior", "portraits", "--batch", "0"], "The batch '0'"),
        (["--prior", "portraits", "--batch", "4-2"], "The batch '4-2'"),
        (["--prior", "portraits", "--resolution", "50"], "50x50 pixels does not fit this prior"),
        (["--prior", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_bad_input(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code = main(["export", "--classifier", STUDENT, "--out", str(out), "--cache", str(tmp_path / "cache"), *arguments])
    assert code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out"
    file.write_text("mine")
    assert main(["export", "--classifier", STUDENT, "--prior", "portraits", "--out", str(file)]) == 2
    assert "is a file" in capsys.readouterr().err and file.read_text() == "mine"
