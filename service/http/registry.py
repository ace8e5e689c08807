"""The classifiers and data sets that requests may name: embedded, configured by the operator, or uploaded.

An upload is a folder <data folder>/uploads/<kind>/<id>/ with what was sent under content/ and a record of it in
upload.json, written last: without the record there is no upload. It belongs to the token that sent it.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from engine.errors import ClassifierError, InputError, PfungstError
from service.cases import Embedded, find_classifier
from service.configuration import EMBEDDED_WORLDS, Configuration
from service.http.errors import Refused
from service.http.uploads import place_dataset, place_model, staging

if TYPE_CHECKING:
    from audit.classifier import Classifier
    from audit.dataset import Dataset

Kind = Literal["classifiers", "datasets"]
ID = re.compile(r"[0-9a-f]{32}")
RECORD = "upload.json"
CHECK_SECONDS = 20.0
"""How long an uploaded model may take for the first answer."""
NAMED = 5
"""How many names a message lists before it only counts."""


@dataclass(frozen=True)
class Upload:
    """The record of an upload."""

    id: str
    owner: str
    name: str
    created: str
    path: str
    """Of the model or data set, inside the upload's folder."""
    labels: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    sha256: str | None = None

    @property
    def time(self) -> datetime.datetime:
        """When it was sent."""
        return datetime.datetime.fromisoformat(self.created)


class Registry:
    """What can be named; every method may be called from any thread."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.opened: dict[str, dict[str, Any]] = {}
        """What is known of configured and embedded classifiers that were opened."""

    def home(self, kind: Kind) -> Path:
        """The folder of all uploads of a kind."""
        return self.configuration.folder / "uploads" / kind

    # Reading

    def uploads(self, kind: Kind, owner: str | None) -> Iterator[Upload]:
        """Uploads of an owner, or of all, the oldest first."""
        records = sorted(self.home(kind).glob(f"*/{RECORD}"), key=lambda file: file.stat().st_mtime_ns)
        for file in records:
            found = self._record(file)
            if found is not None and owner in (None, found.owner):
                yield found

    def upload(self, kind: Kind, id: str, owner: str | None) -> Upload | None:
        """An upload by its id, if it is the owner's."""
        if not ID.fullmatch(id):
            return None
        found = self._record(self.home(kind) / id / RECORD)
        return found if found is not None and owner in (None, found.owner) else None

    def check_named(self, kind: Kind, id: str, owner: str, field: str | None = None) -> None:
        """Refuses an id that this owner cannot name; another owner's upload is as unknown as any.

        `field` is the field of the request that names it, if that is not called as what it names.
        """
        known = self.configuration.classifier_ids if kind == "classifiers" else self.configuration.dataset_ids
        if id in known or self.upload(kind, id, owner) is not None:
            return
        what = kind.removesuffix("s")
        raise Refused(
            422, f"There is no {what} {id!r:.80}; see /v1/{kind}.", code=f"unknown_{what}", field=field or what
        )

    def check_labels(self, classifier: str, dataset: str, owner: str) -> None:
        """Refuses an uploaded data set with labels that the classifier does not know.

        Nothing is opened for it: what a configured classifier knows that nobody registered, its worker will see.
        """
        found = self.upload("datasets", dataset, owner)
        if found is None or not found.labels or (known := self._labels_of(classifier, owner)) is None:
            return
        if unknown := [label for label in found.labels if label not in known]:
            raise Refused(
                422,
                f"The classifier does not know {len(unknown)} of the {len(found.labels)} labels in the data set: "
                f"{_some(unknown)}. It knows: {_some(known)}. Rename them in the data set and send it again.",
                code="label_mismatch",
                field="dataset",
            )

    def _labels_of(self, classifier: str, owner: str) -> tuple[str, ...] | None:
        """What a classifier can answer, or None where nobody knows before it is opened."""
        if classifier in self.opened:
            return tuple(self.opened[classifier]["labels"])
        if (found := self.upload("classifiers", classifier, owner)) is not None:
            return found.labels
        source = find_classifier(classifier, self.configuration)
        if not isinstance(source, Embedded):
            return source.labels

        from worlds import WORLDS

        return WORLDS[source.world].labels

    # Changing

    def open_configured(self, id: str) -> dict[str, Any]:
        """Opens an embedded or configured classifier and notes what it says of itself."""
        from audit.answers import check_answers
        from service.cases import open_classifier_id

        classifier = open_classifier_id(id, self.configuration)
        check_answers(classifier)
        self.opened[id] = facts(classifier)
        return self.opened[id]

    def add_classifier(self, file: IO[bytes], owner: str, name: str, settings: dict[str, Any] | None) -> Upload:
        """Stores an uploaded model after it was opened and asked once."""
        with staging(self.home("classifiers")) as stage:
            content = stage / "content"
            content.mkdir()
            path = place_model(file, content, self.configuration.limits)
            if settings is not None:
                if path.suffix != ".onnx":
                    raise Refused(422, "settings are for ONNX files; a folder brings its own.", field="settings")
                path.with_suffix(".json").write_text(json.dumps(settings), encoding="utf-8")
            with _without_path(stage):
                known = facts(_opened(path))
            return self._keep("classifiers", stage, path, owner, name, **known)

    def add_dataset(self, file: IO[bytes], owner: str, name: str) -> Upload:
        """Stores an uploaded data set after its table was read and its files were found."""
        from audit.dataset import open_dataset

        with staging(self.home("datasets")) as stage:
            content = stage / "content"
            content.mkdir()
            path = place_dataset(file, content, self.configuration.limits)
            with _without_path(stage):
                found = open_dataset(path, size=64)
            check_files(found, path)
            labels = found.labels
            if len(labels) == 1:
                raise InputError(f"The data set has the one class {labels[0]!r:.60}; an audit needs two.")
            return self._keep("datasets", stage, path, owner, name, labels=tuple(labels))

    def delete(self, kind: Kind, id: str, owner: str | None) -> bool:
        """Removes an upload; whether there was one. Its record goes first, so that none is found half gone."""
        if self.upload(kind, id, owner) is None:
            return False
        folder = self.home(kind) / id
        (folder / RECORD).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return True

    # Inside

    def _record(self, file: Path) -> Upload | None:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            for name in ("labels", "size"):
                found[name] = None if found[name] is None else tuple(found[name])
            return Upload(**found)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _keep(self, kind: Kind, stage: Path, path: Path, owner: str, name: str, **known: Any) -> Upload:
        """Moves a staged folder to its place; the record appears with it."""
        id = uuid.uuid4().hex
        now = datetime.datetime.now(datetime.UTC).isoformat()
        upload = Upload(id, owner, name, now, path.relative_to(stage).as_posix(), **known)
        whole = stage / "whole"
        whole.mkdir()
        (stage / "content").replace(whole / "content")
        (whole / RECORD).write_text(json.dumps(asdict(upload)), encoding="utf-8")
        whole.replace(self.home(kind) / id)
        return upload


def check_files(dataset: Dataset, folder: Path) -> None:
    """Refuses a data set that names more files than it may lack; an audit would stop at them, but much later."""
    names = [dataset.name(row) for row in range(len(dataset))]
    # os.path takes a name that no file system could hold for one that is not there; pathlib raises.
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if len(missing) > dataset.max_bad_share * len(names):
        raise InputError(
            f"{len(missing)} of the {len(names)} pictures that the data set names are not in the archive, more than "
            f"the allowed {dataset.max_bad_share:.0%}: {_some(missing)}. Add them, or leave out their rows."
        )


def _some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(f"{name!r:.60}" for name in names[:NAMED]) + more


def facts(classifier: Classifier) -> dict[str, Any]:
    """What a classifier says of itself."""
    return {"labels": classifier.labels, "size": classifier.size, "sha256": classifier.content_hash}


def _opened(path: Path) -> Classifier:
    """An uploaded model, asked once; a graph that never ends is stopped."""
    from audit.answers import check_answers
    from audit.classifier import load_classifier
    from audit.onnx_classifier import OnnxClassifier

    if path.suffix == ".onnx":
        return OnnxClassifier.open(path, timeout=CHECK_SECONDS)
    classifier = load_classifier(path)
    check_answers(classifier)
    return classifier


class _without_path:  # noqa: N801  # read like a statement
    """Takes the staging folder out of the messages of other rooms."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PfungstError):
            raise type(error)(strip_path(str(error), self.folder)) from None
        if isinstance(error, RecursionError | MemoryError | ValueError | TypeError | KeyError | AttributeError):
            # transformers trusts a configuration that it can parse; what it stumbles over is the file's fault.
            raise ClassifierError("The files do not describe a model that can be opened.") from None


def strip_path(message: str, folder: Path) -> str:
    """A message without the place on this machine that it is about."""
    for place in {str(folder), str(folder.absolute()), str(folder.resolve())}:
        message = message.replace(f"{place}/content/", "").replace(f"{place}/", "").replace(place, "the upload")
    return message


def named_dataset(dataset: str | None, classifier: str) -> str:
    """The data set of a request: the one it names, or the world of an embedded classifier."""
    world = classifier.partition("/")[0]
    if dataset is not None:
        return dataset
    if "/" in classifier and world in EMBEDDED_WORLDS:
        return world
    raise Refused(422, "This classifier is not embedded: name the data set it is audited on.", field="dataset")
