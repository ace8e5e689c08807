"""What jobs leave behind: files by job and name, in a folder or in any store that fsspec reaches.

In a folder a file appears under its name only when it is whole. An object store does that by itself.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from engine.errors import InputError

__all__ = ["ArtifactStore"]

JOB = re.compile(r"[0-9a-f]{32}")
LONGEST_NAME = 400
PARTIAL = ".partial-"


class ArtifactStore:
    """The artifacts under a folder or an fsspec URL such as s3://bucket/prefix."""

    def __init__(self, url: str) -> None:
        """Opens the store; a folder that is not there is made."""
        try:
            self._files, root = fsspec.core.url_to_fs(url, auto_mkdir=True) if _local(url) else fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InputError(f"The artifacts' place cannot be used: {error}") from None
        self._root = str(root).rstrip("/")
        if not self._root:
            raise InputError("The artifacts need a folder of their own, not the root of a store.")

    def put(self, job_id: str, name: str, source: Path) -> None:
        """Stores a file; one of that name is replaced."""
        target = self._path(job_id, name)
        with self._whole(target) as place:
            self._files.put_file(str(source), place)

    def put_tree(self, job_id: str, folder: Path, prefix: str = "") -> list[str]:
        """Stores every file of a folder under its relative name, after `prefix`; returns the names."""
        names = []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = f"{prefix.rstrip('/')}/" * bool(prefix) + file.relative_to(folder).as_posix()
            self.put(job_id, name, file)
            names.append(name)
        return names

    def open(self, job_id: str, name: str) -> BinaryIO:
        """A file to read; FileNotFoundError where there is none."""
        return cast(BinaryIO, self._files.open(self._path(job_id, name), "rb"))

    def fetch(self, job_id: str, name: str, target: Path) -> None:
        """Copies a file to the disk; it appears when it is whole."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
        try:
            with self.open(job_id, name) as source, partial.open("xb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def has(self, job_id: str, name: str) -> bool:
        """Whether a job has a file of this name."""
        self._files.invalidate_cache()
        return bool(self._files.isfile(self._path(job_id, name)))

    def names(self, job_id: str) -> list[str]:
        """All files of a job, sorted."""
        home = self._home(job_id)
        self._files.invalidate_cache()  # object stores remember listings, but other machines write too
        found = (str(path) for path in self._files.find(home))
        names = (path.rpartition(home + "/")[2] for path in found)
        return sorted(name for name in names if not name.rpartition("/")[2].startswith(PARTIAL))

    def size(self, job_id: str, name: str) -> int:
        """Bytes of a file; FileNotFoundError where there is none."""
        self._files.invalidate_cache()
        found: Any = self._files.info(self._path(job_id, name))
        if found["type"] != "file":
            raise FileNotFoundError(name)
        return int(found["size"])

    def delete(self, job_id: str) -> None:
        """Removes all files of a job, if there are any."""
        home = self._home(job_id)
        self._files.invalidate_cache()
        if self._files.exists(home):
            self._files.rm(home, recursive=True)

    # Inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _whole(self, target: str) -> Iterator[str]:
        """Where to write so that `target` is there whole or not at all."""
        if not isinstance(self._files, LocalFileSystem):
            yield target
            return
        file = Path(target)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
        try:
            yield str(partial)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    def _home(self, job_id: str) -> str:
        if not JOB.fullmatch(job_id):
            raise InputError(f"{job_id!r:.60} is not the id of a job.")
        return f"{self._root}/{job_id}"

    def _path(self, job_id: str, name: str) -> str:
        return f"{self._home(job_id)}/{check_name(name)}"


def check_name(name: str) -> str:
    """A name that stays inside its job's folder on every file system; an InputError otherwise."""
    parts = name.split("/")
    if (
        not 1 <= len(name) <= LONGEST_NAME
        or not name.isprintable()
        or "\\" in name
        or any(part in ("", ".", "..") or part.startswith(PARTIAL) for part in parts)
    ):
        raise InputError(f"{name!r:.80} is not the name of an artifact.")
    return name


def _local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")
