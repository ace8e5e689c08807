"""A zip file that is sent while it is written: no copy on the disk, and memory for one part of one file at a time."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

CHUNK = 1 << 18
DATE = (1980, 1, 1, 0, 0, 0)
"""The zip format's first day: the same files give the same bytes."""


class _Pipe(io.RawIOBase):
    """Where the zip writer writes; `take` gives what has come in since."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, content) -> int:  # type: ignore[no-untyped-def]  # any buffer
        self._parts.append(bytes(content))
        return len(content)

    def take(self) -> bytes:
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken


def zip_stream(names: Iterable[str], open_file: Callable[[str], BinaryIO]) -> Iterator[bytes]:
    """The bytes of a zip file of these files; pictures are packed already, so nothing is compressed again."""
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as packed:
        for name in names:
            member = zipfile.ZipInfo(name, DATE)
            member.external_attr = 0o644 << 16
            with open_file(name) as source, packed.open(member, "w") as sink:
                while part := source.read(CHUNK):
                    sink.write(part)
                    yield pipe.take()
    yield pipe.take()
