"""The pictures of an audit with their labels and groups: manifests, image folders, CelebA, Camelyon17-WILDS.

Opening reads names and columns only; a picture is read when it is asked for. Rows keep the order of the manifest, or of
the names in a folder, so that a row number means the same picture in every run.

Shapes: an image is [3, H, W] in [0, 1], H = W = size.
"""

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from audit.images import read_image, to_square
from engine.errors import ImageError, InputError
from engine.writing import replacing

MANIFESTS = (".csv", ".parquet")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SPLIT_FOLDERS = frozenset({"train", "val", "valid", "validation", "test"})
OWN_COLUMNS = ("image", "label", "split")
"""Columns of every table that are no groups."""
MAX_BAD_SHARE = 0.05
MAX_MANIFEST_BYTES = 2**30
MAX_ROWS = 20_000_000
NUMBER = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?"
FORMULA = r"'*[=+\-@\t\r\n]"
"""How a cell begins that a spreadsheet takes for a formula, or would if it lost its apostrophes."""
NAMED = 5
"""How many names a message lists before it only counts."""

CELEBA_SPLITS = {"0": "train", "1": "val", "2": "test"}
CAMELYON17_COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
CAMELYON17_GROUPS = ("center", "slide", "patient", "node")
CAMELYON17_SPLITS = {"0": "train", "1": "id_val"}
CAMELYON17_HELD_OUT = {"1": "val", "2": "test"}
"""Hospitals that the published split keeps whole, whatever the split column says of their patches."""


# The data set ----------------------------------------------------------------------------------------------------


class Pictures(Protocol):
    """Where a data set's pictures are."""

    def read(self, name: str) -> Tensor:
        """One picture, [3, size, size]."""

    def fingerprint(self, name: str) -> str:
        """What tells this picture from another of the same name."""


@dataclass(frozen=True)
class Files:
    """Picture files under one folder, cut to squares of `size`."""

    root: Path
    size: int

    def read(self, name: str) -> Tensor:
        """The centre square of a picture file."""
        try:
            return to_square(read_image(self.root / name), self.size)
        except OSError as error:
            # A name too long, a folder without permission: what a file system says before there is a picture.
            raise ImageError(f"{self.root / name} cannot be opened: {error.strerror}.") from None

    def fingerprint(self, name: str) -> str:
        """The file's length in bytes, or "missing"."""
        try:
            return str(os.stat(self.root / name).st_size)
        except (OSError, ValueError):
            return "missing"


@dataclass(frozen=True)
class InMemory:
    """Pictures that are at hand already, by name."""

    images: Mapping[str, Tensor]

    def read(self, name: str) -> Tensor:
        """The picture as it was handed in."""
        return self.images[name]

    def fingerprint(self, name: str) -> str:
        """SHA-256 of the picture's numbers."""
        return hashlib.sha256(self.images[name].contiguous().numpy().tobytes()).hexdigest()


@dataclass(eq=False)
class Dataset:
    """Pictures with labels and group columns; one row a picture."""

    table: pd.DataFrame
    """`image` (a name that stands once), `label` (text, all missing where there are none), the groups, and `split`."""
    labels: tuple[str, ...]
    """Names of the labels that occur; empty for pictures without labels."""
    group_columns: tuple[str, ...]
    pictures: Pictures
    size: int
    max_bad_share: float = MAX_BAD_SHARE
    """The share of unreadable pictures, of those asked for, that `readable` puts up with."""
    bad: dict[str, str] = field(default_factory=dict)
    """Pictures that could not be read so far: name to reason."""
    asked: set[str] = field(default_factory=set)
    """Names of the pictures that `readable` has tried so far."""

    def __len__(self) -> int:
        return len(self.table)

    def name(self, row: int) -> str:
        """The name of the picture in a row."""
        return str(self._names[row])

    def image(self, row: int) -> Tensor:
        """One picture, [3, size, size]; an ImageError if it cannot be read."""
        return self.pictures.read(self.name(row))

    def images(self, rows: Iterable[int]) -> Tensor:
        """Pictures [N, 3, size, size]; an ImageError at the first that cannot be read."""
        read = [self.image(row) for row in rows]
        return torch.stack(read) if read else torch.empty(0, 3, self.size, self.size)

    def readable(self, rows: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Yields (row, picture) of all rows that can be read and notes the others in `bad`.

        Raises an InputError as soon as more than `max_bad_share` of `rows` are bad. The share is of all rows of one
        call: hand in the whole order at once and stop iterating when enough is seen.
        """
        rows = [int(row) for row in rows]
        failed: list[str] = []
        for row in rows:
            name = self.name(row)
            self.asked.add(name)
            try:
                image = self.pictures.read(name)
            except ImageError as error:
                self.bad[name] = _reason(error, name)
                failed.append(name)
                if len(failed) > self.max_bad_share * len(rows):
                    listed = self._list_bad(failed)
                    raise InputError(
                        f"{len(failed)} of the {len(rows)} pictures asked for could not be read, more than the allowed "
                        f"{self.max_bad_share:.0%}: {listed}. Repair or remove them, or allow a larger share."
                    ) from None
                continue
            self.bad.pop(name, None)
            yield row, image

    @property
    def bad_summary(self) -> str:
        """The unreadable pictures in one line for a person, or "" if there are none."""
        if not self.bad:
            return ""
        return f"{len(self.bad)} of {len(self.asked)} pictures could not be read: {self._list_bad(list(self.bad))}"

    def order(self, seed: int) -> list[int]:
        """All rows in a random order that the seed decides."""
        return np.random.default_rng([seed, 5741]).permutation(len(self)).tolist()

    def subset(self, rows: Iterable[int]) -> "Dataset":
        """A data set of some rows, in the order given; it keeps its own list of bad files."""
        table = self.table.iloc[[int(row) for row in rows]].reset_index(drop=True)
        present = set(table["label"])
        labels = tuple(label for label in self.labels if label in present)
        return replace(self, table=table, labels=labels, bad={}, asked=set())

    def check_labels(self, classifier_labels: Sequence[str]) -> None:
        """Raises an InputError that names the labels which the classifier does not know."""
        unknown = [label for label in self.labels if label not in classifier_labels]
        if not unknown:
            return
        example = f"{{{unknown[0]!r}: {classifier_labels[0]!r}}}"
        raise InputError(
            f"The classifier does not know {len(unknown)} of the {len(self.labels)} labels in the data: "
            f"{_some(map(repr, unknown))}. It knows: {_some(map(repr, classifier_labels))}. "
            f"Rename them with label_names, such as {example}, or choose another label column."
        )

    def label_indices(self, classifier_labels: Sequence[str]) -> np.ndarray:
        """Each row's label as an index into the classifier's labels, [N]."""
        if not self.labels:
            raise InputError("These pictures have no labels; use class folders or a manifest with a label column.")
        self.check_labels(classifier_labels)
        index = {label: i for i, label in enumerate(classifier_labels)}
        return np.array([index[label] for label in self.table["label"]], dtype=np.int64)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over the table and each picture's fingerprint, which for files is the length, not the content.

        Reading every byte of half a million files to audit two hundred of them would cost more than the audit. A file
        altered to the same length goes unseen here; the hash of each audited picture stands with its counterfactuals.
        """
        digest = hashlib.sha256()
        for column in self.table.columns:
            values = self.table[column]
            known = [None if missing else value for value, missing in zip(values.tolist(), values.isna(), strict=True)]
            digest.update(json.dumps([str(column), known]).encode())
        for name in self._names:
            digest.update(f"{self.pictures.fingerprint(name)}\n".encode())
        return digest.hexdigest()

    @cached_property
    def _names(self) -> list[str]:
        return [str(name) for name in self.table["image"]]

    def _list_bad(self, names: list[str]) -> str:
        # Up to the first ":" or ";" a reason is short; the whole stands in `bad`.
        return _some(f"{name} ({re.split('[:;]', self.bad[name])[0]})" for name in names)


def _reason(error: ImageError, name: str) -> str:
    """What is wrong with a picture, without the path that a message begins with."""
    text = str(error).removesuffix(".")
    _, found, rest = text.partition(f"{name} ")
    return (rest if found else text).removeprefix("is ")


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = [str(name) for name in names]
    more = len(listed) - NAMED
    return ", ".join(listed[:NAMED]) + (f" and {more} more" if more > 0 else "")


# Opening ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """What a reader found: the whole table, before splits are chosen and paths are checked."""

    root: Path
    table: pd.DataFrame
    labels: tuple[str, ...]
    group_columns: tuple[str, ...]


def open_dataset(
    source: Path | str,
    *,
    size: int,
    split: str | None = None,
    image_column: str = "image",
    label_column: str | None = None,
    group_columns: Sequence[str] | None = None,
    label_names: Mapping[str, str] | None = None,
    labelled: bool = True,
    allow_outside: bool = False,
    max_bad_share: float = MAX_BAD_SHARE,
) -> Dataset:
    """The data set at `source`, whose kind is read off what is there.

    * A `.csv` or `.parquet` manifest, or a folder with manifest.csv or manifest.parquet: `image_column` holds paths
      relative to it, `label_column` (default "label") the labels; all other columns are groups unless some are named.
    * A folder with list_attr_celeba.txt is CelebA: `label_column` (default Blond_Hair) and `group_columns` (default
      Male) name attributes. Labels are "not Blond_Hair" and "Blond_Hair", groups 0 and 1.
    * A folder with metadata.csv and patches is Camelyon17-WILDS: labels "normal" and "tumor", and the hospital is the
      group column "center".
    * Any other folder holds pictures in class folders, or pictures alone, which have no labels; train, val and test
      folders above them are splits.

    `split` keeps one split. `label_names` renames labels to those of the classifier. `labelled=False` leaves labels
    out. Paths must stay inside the source's folder, symbolic links too, unless `allow_outside` is set.
    """
    source = Path(source)
    if size < 1:
        raise InputError(f"Pictures need a size of at least 1 pixel, not {size}.")
    if not 0 <= max_bad_share <= 1:
        raise InputError(f"The share of bad pictures lies between 0 and 1, not at {max_bad_share}.")
    groups = None if group_columns is None else tuple(group_columns)
    if (kind := _kind(source)) == "manifest":
        found = _read_manifest(_manifest_in(source), image_column, label_column or "label", groups, labelled)
    elif kind == "celeba":
        found = _read_celeba(source, label_column or "Blond_Hair", ("Male",) if groups is None else groups)
    elif kind == "camelyon17":
        found = _read_camelyon17(source, label_column or "tumor", CAMELYON17_GROUPS if groups is None else groups)
    else:
        if label_column is not None or groups:
            raise InputError(f"{source} is an image folder, which has no columns; name columns only of a manifest.")
        found = _read_folder(source)
    if not labelled:
        found = replace(found, table=found.table.assign(label=_no_labels(len(found.table))), labels=())
    if label_names:
        found = _renamed(found, label_names)
    table = found.table if split is None else _of_split(found.table, split, source)
    if table.empty:
        raise InputError(f"{source} lists no pictures.")
    present = set(table["label"])
    labels = tuple(label for label in found.labels if label in present)
    if len(labels) == 1:
        raise InputError(
            f"All {len(table)} pictures of {source} have the label {labels[0]!r}; an audit needs at least two labels "
            "in the data."
        )
    _check_names(found.root, table["image"].tolist(), source, allow_outside)
    return Dataset(table, labels, found.group_columns, Files(found.root, size), size, max_bad_share)


def dataset_of_images(
    images: Tensor, labels: Sequence[str], groups: Mapping[str, Sequence[Any]] | None = None
) -> Dataset:
    """A data set of pictures [N, 3, H, W] in memory, one label each; they are named by their row."""
    if len(images) == 0 or images.shape[2] != images.shape[3] or len(images) != len(labels):
        raise InputError(f"Pictures [N, 3, H, H] and N labels are needed, not {list(images.shape)} and {len(labels)}.")
    names = [f"{row:06d}" for row in range(len(images))]
    table = pd.DataFrame({"image": names, "label": [str(label) for label in labels], **(groups or {})})
    pictures = InMemory(dict(zip(names, images, strict=True)))
    return Dataset(table, _sorted_labels(table["label"]), tuple(groups or {}), pictures, images.shape[2])


def _kind(source: Path) -> str:
    if source.is_file():
        if source.suffix.lower() not in MANIFESTS:
            raise InputError(f"{source} is no manifest; a data set is a .csv or .parquet file, or a folder of images.")
        return "manifest"
    if not source.is_dir():
        raise InputError(f"{source} does not exist; a data set is a .csv or .parquet file, or a folder of images.")
    if any((source / f"manifest{ending}").is_file() for ending in MANIFESTS):
        return "manifest"
    if (source / "list_attr_celeba.txt").exists() or (source / "img_align_celeba").exists():
        return "celeba"
    if (source / "metadata.csv").exists() and (source / "patches").exists():
        return "camelyon17"
    return "folder"


def _renamed(found: _Source, names: Mapping[str, str]) -> _Source:
    unknown = [label for label in names if label not in found.labels]
    if unknown:
        raise InputError(
            f"label_names renames {_some(map(repr, unknown))}, but the labels are: {_some(map(repr, found.labels))}."
        )
    labels = tuple(dict.fromkeys(names.get(label, label) for label in found.labels))
    table = found.table.assign(label=[names.get(label, label) for label in found.table["label"]])
    return replace(found, table=table, labels=labels)


def _of_split(table: pd.DataFrame, split: str, source: Path) -> pd.DataFrame:
    if "split" not in table:
        raise InputError(f"{source} has no splits, so {split!r} cannot be chosen; add a column or folders for them.")
    chosen = table[table["split"] == split]
    if chosen.empty:
        known = sorted(set(table["split"].dropna()))
        raise InputError(f"{source} has no split {split!r}; it has: {_some(map(repr, known))}.")
    return chosen.reset_index(drop=True)


def _check_names(root: Path, names: list[str], source: Path, allow_outside: bool) -> None:
    """Every picture stands once, and none leads out of the folder, neither by its path nor by a symbolic link."""
    first: dict[str, int] = {}
    for row, name in enumerate(names, start=1):
        if first.setdefault(name, row) != row:
            raise InputError(
                f"{source} lists the picture {name} twice, in rows {first[name]} and {row}; each may count once only."
            )
    if allow_outside:
        return
    inside = os.path.realpath(root)
    folders: dict[str, bool] = {}
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise InputError(
                f"{source} lists {name}, which leads out of its folder; only paths below the folder are opened unless "
                "paths outside are allowed."
            )
        file = os.path.join(inside, name)
        folder = os.path.dirname(file)
        if folder not in folders:
            folders[folder] = _lies_in(folder, inside)
        if not folders[folder] or (os.path.islink(file) and not _lies_in(file, inside)):
            raise InputError(
                f"{source} lists {name}, a symbolic link that leads out of its folder; such links are followed only if "
                "paths outside are allowed."
            )


def _lies_in(path: str, folder: str) -> bool:
    try:
        return os.path.commonpath([os.path.realpath(path), folder]) == folder
    except (OSError, ValueError):
        return False


def _no_labels(n: int) -> pd.Series:
    return pd.Series([None] * n, dtype=object)


def _sorted_labels(column: Iterable[str]) -> tuple[str, ...]:
    """Labels in the order of their names, with numbers as numbers: 2 before 10."""
    return tuple(sorted(set(column), key=lambda label: (len(label), label) if label.isdigit() else (10**6, label)))


# Manifests -------------------------------------------------------------------------------------------------------


def _manifest_in(source: Path) -> Path:
    if source.is_file():
        return source
    found = [source / f"manifest{ending}" for ending in MANIFESTS if (source / f"manifest{ending}").is_file()]
    return found[-1]  # Parquet before CSV: it knows types


def _read_manifest(
    file: Path, image_column: str, label_column: str, group_columns: tuple[str, ...] | None, labelled: bool
) -> _Source:
    own = (image_column, label_column)
    content = read_csv(file, as_text=own) if file.suffix.lower() == ".csv" else read_parquet(file)
    needed = [image_column, *([label_column] if labelled else []), *(group_columns or ())]
    for column in needed:
        if column not in content:
            raise InputError(
                f"{file} has no column {column!r}; the columns that can be read are: {_some(map(repr, content))}."
            )
    if group_columns is None:
        group_columns = tuple(c for c in map(str, content) if c not in {*OWN_COLUMNS, image_column, label_column})
    for column in group_columns:
        if column in OWN_COLUMNS:
            raise InputError(f"A group column of {file} cannot be named {column!r}; rename it.")
    columns: dict[str, Any] = {
        "image": [str(PurePosixPath(name)) for name in _filled(content[image_column], file)],
        "label": _filled(content[label_column], file) if labelled else _no_labels(len(content)),
        **{column: content[column] for column in group_columns},
    }
    if "split" in content and "split" not in (image_column, label_column):
        columns["split"] = [_text(value) for value in content["split"].tolist()]
    labels = _sorted_labels(columns["label"]) if labelled else ()
    return _Source(file.parent, pd.DataFrame(columns), labels, group_columns)


def _filled(column: pd.Series, file: Path) -> list[str]:
    """A column as text, in which no cell may be empty."""
    values = [_text(value) for value in column.tolist()]
    for row, value in enumerate(values, start=1):
        if value is None:
            raise InputError(f"{file} has no {column.name} in row {row}; fill it in or leave the row out.")
    return [value for value in values if value is not None]


def _text(value: Any) -> str | None:
    """A cell as text: 1.0 is "1", since a column of whole numbers with gaps comes as floats; empty is None."""
    if isinstance(value, str):
        return value or None
    if value is None or value != value:
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def read_csv(file: Path, as_text: Collection[str] = ()) -> pd.DataFrame:
    """A UTF-8 table with commas and a header; columns of nothing but plain numbers become numbers, save `as_text`.

    A cell is never evaluated. The apostrophe that `write_csv` puts before what a spreadsheet would take for a formula
    is removed. Empty cells are missing values; columns without a name, such as a stored index, are left out.
    """
    text = _read_text(file)
    try:
        cells = pd.read_csv(io.StringIO(text), header=None, dtype=str, na_filter=False).fillna("")
    except pd.errors.EmptyDataError:
        raise InputError(f"{file} is empty; a manifest begins with a line that names its columns.") from None
    except pd.errors.ParserError as error:
        detail = str(error).strip().removeprefix("Error tokenizing data. C error: ")
        raise InputError(f"{file} is no table with commas and as many cells in each line: {detail}.") from None
    cells = cells.apply(lambda column: column.str.replace(f"^'({FORMULA})", r"\1", regex=True))
    names = [str(name) for name in cells.iloc[0]]
    _check_columns(names, file)
    table = cells.mask(cells == "").iloc[1:].reset_index(drop=True).set_axis(names, axis=1)
    return pd.DataFrame(
        {name: table[name] if name in as_text else _numbers(table[name]) for name in filter(None, names)}
    )


def read_parquet(file: Path) -> pd.DataFrame:
    """The columns of a Parquet file that hold text, numbers or booleans; others, such as lists, are left out."""
    try:
        with pq.ParquetFile(file) as content:
            if content.metadata.num_rows > MAX_ROWS:
                raise InputError(f"{file} has {content.metadata.num_rows} rows; at most {MAX_ROWS} are read.")
            _check_columns(content.schema_arrow.names, file)
            plain = [column.name for column in content.schema_arrow if _is_plain(column.type)]
            table = content.read(columns=plain)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    decoded = [c.cast(c.type.value_type) if pa.types.is_dictionary(c.type) else c for c in table.columns]
    return pa.table(decoded, names=table.column_names).to_pandas(ignore_metadata=True)


def _is_plain(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return types.is_string(kind.value_type) or types.is_large_string(kind.value_type)
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(test(kind) for test in tests)


def _check_columns(names: Sequence[str], file: Path) -> None:
    twice = sorted({name for name in names if name and list(names).count(name) > 1})
    if twice:
        raise InputError(f"{file} has two columns named {twice[0]!r}; rename one.")


def _numbers(column: pd.Series) -> pd.Series:
    """A text column as numbers if all its cells are written as a number would be; 004 is a name."""
    known = column.dropna()
    if known.empty or not known.str.fullmatch(NUMBER).all():
        return column
    return pd.to_numeric(column)


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise InputError(f"{file} is larger than {MAX_MANIFEST_BYTES // 2**20} MiB; use Parquet or fewer rows.")
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file} is not UTF-8 text (line {line}); save it as UTF-8.") from None
    if "\0" in text:
        raise InputError(f"{file} holds NUL characters and so is no text file.")
    return text


# Writing tables that spreadsheets will open ----------------------------------------------------------------------


def guarded(text: str) -> str:
    """A cell's text with a leading apostrophe if a spreadsheet would take it for a formula; -1 is none."""
    return f"'{text}" if re.match(FORMULA, text) and not re.fullmatch(NUMBER, text) else text


def write_csv(table: pd.DataFrame, file: Path) -> None:
    """Writes a table as UTF-8 CSV with guarded text, under a temporary name first; `read_csv` gives the table back."""
    safe = table.map(lambda value: guarded(value) if isinstance(value, str) else value)
    safe.columns = pd.Index([guarded(str(name)) for name in table.columns])
    with replacing(file) as partial:
        safe.to_csv(partial, index=False, quoting=csv.QUOTE_ALL, lineterminator="\n", encoding="utf-8")


# Image folders ---------------------------------------------------------------------------------------------------


def _read_folder(folder: Path) -> _Source:
    """Class folders, or pictures alone, or either of them in split folders."""
    try:
        above = {path.name for path in folder.iterdir() if _is_shown(path.name) and path.is_dir()}
        has_splits = bool(above) and above <= SPLIT_FOLDERS
        parts = sorted(above) if has_splits else [""]
        rows = [(Path(part, name).as_posix(), label, part) for part in parts for name, label in _rows(folder / part)]
    except OSError as error:
        raise InputError(f"{error.filename} cannot be listed: {error.strerror}.") from None
    if not rows:
        raise InputError(f"{folder} holds no pictures ({', '.join(ENDINGS)}) and no manifest.")
    table = pd.DataFrame(rows, columns=["image", "label", "split"])
    if not has_splits:
        table = table.drop(columns="split")
    labels = _sorted_labels(label for _, label, _ in rows if label is not None)
    if labels and table["label"].isna().any():
        raise InputError(f"{folder} holds pictures beside class folders; put every picture into the folder of a class.")
    return _Source(folder, table if labels else table.assign(label=_no_labels(len(table))), labels, ())


def _rows(folder: Path) -> list[tuple[str, str | None]]:
    """(path below the folder, class folder or None) of all pictures, by name. Linked folders inside are not entered."""
    rows: list[tuple[str, str | None]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not _is_shown(entry.name):
            continue
        if not entry.is_dir():
            if entry.suffix.lower() in ENDINGS:
                rows.append((entry.name, None))
            continue
        for parent, folders, files in os.walk(entry, onerror=_raise):
            folders[:] = sorted(name for name in folders if _is_shown(name))
            below = Path(parent).relative_to(folder)
            pictures = sorted(file for file in files if _is_shown(file) and Path(file).suffix.lower() in ENDINGS)
            rows += [((below / file).as_posix(), entry.name) for file in pictures]
    for name, _ in rows:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(f"{folder} holds a file whose name is not UTF-8, {name!a}; rename it.") from None
    return rows


def _raise(error: OSError) -> None:
    raise error


def _is_shown(name: str) -> bool:
    """Neither hidden nor what macOS leaves in archives."""
    return not name.startswith(".") and name != "__MACOSX"


# CelebA as published ---------------------------------------------------------------------------------------------


def _read_celeba(folder: Path, label: str, groups: tuple[str, ...]) -> _Source:
    """img_align_celeba, list_attr_celeba.txt and list_eval_partition.txt; attributes are written −1 and 1."""
    attributes, partition = folder / "list_attr_celeba.txt", folder / "list_eval_partition.txt"
    for needed in (folder / "img_align_celeba", attributes, partition):
        if not needed.exists():
            raise InputError(f"{folder} is not CelebA as published: it lacks {needed.name}.")
    lines = _read_text(attributes).splitlines()
    if len(lines) < 2 or not lines[0].strip().isdigit():
        raise InputError(f"{attributes} has to begin with the number of pictures and a line of attribute names.")
    names = lines[1].split()
    for name in (label, *groups):
        if name not in names:
            raise InputError(f"CelebA has no attribute {name!r}; it has: {', '.join(names)}.")
    if label in groups:
        raise InputError(f"The attribute {label!r} cannot be both the label and a group.")
    wanted = {name: names.index(name) + 1 for name in (label, *groups)}
    columns: dict[str, list[Any]] = {name: [] for name in ("image", *wanted)}
    for number, line in enumerate(lines[2:], start=3):
        # Only the wanted cells are kept: all 40 of 200 000 pictures would fill half a gigabyte.
        cells = line.split()
        if not cells:
            continue
        if len(cells) != len(names) + 1 or any(cells[i] not in ("-1", "1") for i in wanted.values()):
            raise InputError(f"{attributes} needs a file name and {len(names)} times -1 or 1 in line {number}.")
        columns["image"].append(cells[0])
        for name, i in wanted.items():
            columns[name].append(int(cells[i] == "1"))
    if len(columns["image"]) != int(lines[0]):
        raise InputError(
            f"{attributes} promises {int(lines[0])} pictures in its first line and lists {len(columns['image'])}; "
            "fetch it again."
        )
    split_of = _celeba_splits(partition)
    missing = [name for name in columns["image"] if name not in split_of]
    if missing:
        raise InputError(f"{partition} names no split for {_some(missing)}; fetch it again.")
    labels = (f"not {label}", label)
    table = {
        "image": [f"img_align_celeba/{name}" for name in columns["image"]],
        "label": [labels[value] for value in columns[label]],
        **{name: columns[name] for name in groups},
        "split": [split_of[name] for name in columns["image"]],
    }
    return _Source(folder, pd.DataFrame(table), labels, groups)


def _celeba_splits(partition: Path) -> dict[str, str]:
    splits = {}
    for number, line in enumerate(_read_text(partition).splitlines(), start=1):
        cells = line.split()
        if not cells:
            continue
        if len(cells) != 2 or cells[1] not in CELEBA_SPLITS:
            raise InputError(f"{partition} needs a file name and 0, 1 or 2 in line {number}.")
        splits[cells[0]] = CELEBA_SPLITS[cells[1]]
    return splits


# Camelyon17-WILDS as published -----------------------------------------------------------------------------------


def _read_camelyon17(folder: Path, label: str, groups: tuple[str, ...]) -> _Source:
    """metadata.csv and patches, with the official split: hospital 1 is val, hospital 2 is test."""
    file = folder / "metadata.csv"
    content = read_csv(file)
    for column in (*CAMELYON17_COLUMNS, *groups):
        if column not in content:
            raise InputError(f"{file} is not that of Camelyon17-WILDS: it has no column {column!r}.")
    if label != "tumor":
        raise InputError(f"Camelyon17-WILDS has one label column, 'tumor', not {label!r}.")
    for column in groups:
        if column in (*OWN_COLUMNS, "tumor"):
            raise InputError(f"The column {column!r} of {file} cannot be a group.")
    text = {column: _filled(content[column], file) for column in CAMELYON17_COLUMNS}
    labels = ("normal", "tumor")
    rows = []
    for row, (patient, node, x, y, tumor, _, center, split) in enumerate(zip(*text.values(), strict=True), start=1):
        if tumor not in ("0", "1") or split not in CAMELYON17_SPLITS:
            raise InputError(f"{file} needs 0 or 1 as tumor and as split in row {row}, not {tumor!r} and {split!r}.")
        place = f"patient_{patient}_node_{node}"
        rows.append(
            (
                f"patches/{place}/patch_{place}_x_{x}_y_{y}.png",
                labels[int(tumor)],
                CAMELYON17_HELD_OUT.get(center, CAMELYON17_SPLITS[split]),
            )
        )
    table = pd.DataFrame(rows, columns=["image", "label", "split"])
    for column in groups:
        table.insert(table.shape[1] - 1, column, content[column])
    return _Source(folder, table, labels, groups)
