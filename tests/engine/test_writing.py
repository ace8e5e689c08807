"""Files are whole or not there."""

from pathlib import Path

import pytest

from engine.writing import replacing, write_text

HALF = "half a character: \ud83d"


def test_a_file_appears_whole_at_the_end_of_the_block(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "figures.json"
    with replacing(file) as partial:
        partial.write_bytes(b"{}")
        assert partial == file.with_name("figures.json.partial")
        assert not file.exists()
    assert file.read_bytes() == b"{}"
    assert list(file.parent.iterdir()) == [file]


def test_text_is_utf_8_and_takes_the_place_of_the_old(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("a much longer text that was here before", encoding="utf-8")
    write_text(file, "ψ ≤ 1\n")
    assert file.read_bytes() == "ψ ≤ 1\n".encode()
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_changes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    file = tmp_path / "figures.json"
    file.write_bytes(b"old")
    with pytest.raises(error), replacing(file) as partial:
        partial.write_bytes(b"ne")
        raise error
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_block_that_raises_before_it_wrote_anything_tells_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing yet"), replacing(tmp_path / "figures.json"):
        raise ValueError("nothing yet")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_way_stays_and_no_temporary_file_does(tmp_path: Path) -> None:
    folder = tmp_path / "figures.json"
    folder.mkdir()
    with pytest.raises(OSError, match=r"figures\.json"):
        write_text(folder, "{}")
    assert folder.is_dir()
    assert list(tmp_path.iterdir()) == [folder]


def test_half_a_character_is_refused_or_replaced(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    file.write_bytes(b"old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, HALF)
    assert file.read_bytes() == b"old"
    write_text(file, HALF, errors="replace")
    assert file.read_bytes() == b"half a character: ?"
    assert list(tmp_path.iterdir()) == [file]
