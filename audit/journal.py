"""What an audit has finished, one line per image, so that a killed run loses none of it.

The first line says what is audited; a journal of something else is refused, never mixed. A line counts once its newline
is on the disk: a torn last line is cut off when the journal is opened again.
"""

import json
import os
from pathlib import Path
from typing import Any

from engine.errors import InputError

FORMAT = 3
"""3: the first counterfactual alone speaks for an image, and the teacher is known by its content."""


class Journal:
    """An append-only file of JSON lines, each flushed to the disk before `append` returns."""

    def __init__(self, file: Path, identity: dict[str, Any]) -> None:
        """Opens the journal of this identity, or starts one; `records` holds what was finished before."""
        self.file = file
        self.records: list[dict[str, Any]] = []
        header = json.loads(json.dumps({"format": FORMAT, **identity}))
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = self._whole_lines()
        if lines:
            if lines[0] != header:
                changed = sorted(key for key in header.keys() | lines[0].keys() if header.get(key) != lines[0].get(key))
                raise InputError(
                    f"{file} belongs to another audit (different: {', '.join(changed)}); name another --out, or delete "
                    "that folder to start again."
                )
            self.records = lines[1:]
        else:
            self.append_line(header)

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record; when this returns, it is on the disk."""
        self.append_line(record)
        self.records.append(record)

    def append_line(self, content: dict[str, Any]) -> None:
        """Writes one line and waits for the disk."""
        with self.file.open("ab") as stream:
            stream.write(json.dumps(content, allow_nan=False).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _whole_lines(self) -> list[dict[str, Any]]:
        """The lines that were finished; what follows the last newline is cut off the file."""
        if not self.file.exists():
            return []
        content = self.file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self.file.open("r+b") as stream:
                stream.truncate(len(whole))
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise InputError(f"{self.file} is damaged; delete that folder to start the audit again.") from None
        if not all(isinstance(line, dict) for line in lines):
            raise InputError(f"{self.file} is damaged; delete that folder to start the audit again.")
        return lines
