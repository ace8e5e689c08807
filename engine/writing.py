"""Files that are whole or not there: written under a temporary name beside their place, then renamed over it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to that takes the place of `file` when the block ends well, and is removed when it raises.

    A missing folder is made. The name is fixed, so two writers of the same file at once are not kept apart.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    try:
        yield partial
        partial.replace(file)
    except BaseException:  # an interrupted run leaves nothing behind either
        partial.unlink(missing_ok=True)
        raise


def write_text(file: Path, text: str, errors: str = "strict") -> None:
    """Writes UTF-8 text; `errors` says what becomes of half a character, as in `str.encode`."""
    with replacing(file) as partial:
        partial.write_text(text, encoding="utf-8", errors=errors)
