"""What lets another worker go on with a job: its folder for one process at a time, and the copy of a running audit."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from engine.errors import InputError, RecipeError
from service.artifacts import ArtifactStore
from service.cases import Case
from service.configuration import Configuration
from service.stop import Stop

if TYPE_CHECKING:
    from audit.classifier import Classifier
    from engine.recipe import Recipe
    from engine.surrogate import SurrogatePair

JOURNAL = "journal.jsonl"
RECIPE = "resume/recipe.json"
LOCK_SECONDS = 60.0


class AuditCopy:
    """What of a running audit lies in the artifacts too: its recipe, surrogates, pictures, and last the journal that
    names them."""

    def __init__(self, store: ArtifactStore, job_id: str, folder: Path, configuration: Configuration) -> None:
        self.store, self.job_id, self.folder = store, job_id, folder
        self.cache, self.configuration = configuration.cache_folder, configuration
        self._lines = 0

    def restore(self) -> None:
        """Fetches the copy where it is further than what lies here, as it is when another machine worked on the job."""
        names = self.store.names(self.job_id)
        for name in names:
            # Surrogates that are distilled again on another machine may differ in the last bit: that is another audit.
            file = self.cache / Path(name).name
            if name.startswith("surrogates/") and not file.is_file():
                self.store.fetch(self.job_id, name, file)
        if JOURNAL not in names:
            return
        with self.store.open(self.job_id, JOURNAL) as stream:
            stored = stream.read().count(b"\n")
        journal = self.folder / JOURNAL
        here = journal.read_bytes().count(b"\n") if journal.is_file() else 0
        if stored <= here:
            return
        for name in names:
            if name.startswith("counterfactuals/"):
                self.store.fetch(self.job_id, name, self.folder / name)
        self.store.fetch(self.job_id, JOURNAL, journal)
        self._lines = stored

    def keep_recipe(self, recipe: Recipe) -> Recipe:
        """The recipe that the first worker began with: an upgrade may bring another, but an audit is of one piece."""
        from engine.recipe import Recipe

        if self.store.has(self.job_id, RECIPE):
            with self.store.open(self.job_id, RECIPE) as stream:
                began = json.load(stream)
            try:
                return Recipe(**began)
            except RecipeError:
                raise _changed(["recipe"]) from None
        file = self.folder / Path(RECIPE).name
        recipe.save(file)
        self.store.put(self.job_id, RECIPE, file)
        return recipe

    def check_unchanged(self, case: Case, recipe: Recipe) -> None:
        """An InputError where what the finished images rest on is another thing now."""
        journal = self.folder / JOURNAL
        content = journal.read_bytes() if journal.is_file() else b""
        try:
            began = json.loads(content[: content.index(b"\n")])
        except ValueError:
            return  # nothing was finished, or the journal itself says that it is damaged
        now = {
            "classifier": case.classifier.content_hash,
            "data": case.dataset.content_hash,
            "prior": case.source.prior.content_hash,
            "recipe": recipe.digest,
        }
        if changed := [name for name, content in now.items() if began.get(name) != content]:
            raise _changed(changed)

    def keep_surrogates(self, classifier: Classifier, case: Case, surrogates: SurrogatePair) -> None:
        """Stores the surrogates that the journal's identity names."""
        from engine.surrogate_cache import cache_key, hash_images

        pictures = hash_images(case.pictures)
        for one in (surrogates.guide, surrogates.evaluator):
            key = cache_key(classifier.content_hash, pictures, one.recipe)
            for file in (self.cache / f"{key}.safetensors", self.cache / f"{key}.json"):
                name = f"surrogates/{file.name}"
                if file.is_file() and not self.store.has(self.job_id, name):
                    self.store.put(self.job_id, name, file)

    def sync(self) -> None:
        """Stores the pictures of every image finished since the last time, then the journal."""
        journal = self.folder / JOURNAL
        content = journal.read_bytes()
        lines = content[: content.rfind(b"\n") + 1].splitlines()
        if len(lines) <= self._lines:
            return
        for line in lines[max(1, self._lines) :]:
            image = json.loads(line)
            pictures = [image["original"]]
            for one in image["counterfactuals"]:
                pictures += [one["file"], one["mask"]]
            for name in pictures:
                self.store.put(self.job_id, name, self.folder / name)
        self.store.put(self.job_id, JOURNAL, journal)
        self._lines = len(lines)


def _changed(names: list[str]) -> InputError:
    return InputError(f"The {' and the '.join(names)} changed since the audit began; submit it again.")


class Busy(Exception):
    """Another process on this machine holds the job's folder and does not let go."""


@contextmanager
def locked(folder: Path, stop: Stop) -> Iterator[None]:
    """The job's folder for this process alone.

    A worker that was suspended and lost its job may still write there; once it wakes, it hears of it and lets go. The
    kernel frees the lock of a process that died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("ab") as file:
        until = time.monotonic() + LOCK_SECONDS
        while not _try_lock(file):
            stop.check()
            if time.monotonic() > until:
                raise Busy
            time.sleep(0.1)
        yield


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
