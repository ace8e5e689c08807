"""What strangers send: pictures, archives and models, judged before anything is decoded, unpacked or opened.

Nothing is fetched: where a file is expected, text that looks like an address is just bad base64. Formats go by content
alone, never by a file's name or declared type.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import shutil
import stat
import struct
import tempfile
import unicodedata
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from PIL import Image, UnidentifiedImageError

from service.http.errors import Refused

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "BMP": "image/bmp"}
MIN_SIDE = 16
MAX_ASPECT = 8
CHUNK = 1 << 20
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
PICKLED_NAMES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".npy", ".npz")
ENDINGS = (".safetensors", ".json", ".txt", ".md")
"""What a classifier's folder may hold; everything else is refused, code and pickles first of all."""
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TABLES = (".csv", ".parquet", ".txt", ".json", ".md")
LONGEST_PATH = 240


class Limits(Protocol):
    """The operator's limits on what is sent."""

    @property
    def image_bytes(self) -> int: ...
    @property
    def image_pixels(self) -> int: ...
    @property
    def archive_bytes(self) -> int: ...
    @property
    def archive_files(self) -> int: ...
    @property
    def unpacked_bytes(self) -> int: ...


# Pictures


def decode_base64(text: str, most: int, field: str = "image") -> bytes:
    """Bytes of strict base64: the standard alphabet, padded, without blanks, of at most `most` bytes."""
    if len(text) > 4 * (most // 3 + 1):
        raise Refused(413, f"The image has over {most} bytes.", field=field)
    try:
        # Python reads "QQ==" and "QR==" as the same byte; text that does not come back as it was is refused.
        content = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise Refused(422, "The image is no base64.", code="bad_base64", field=field) from None
    if base64.b64encode(content).decode() != text:
        raise Refused(422, "The image is no base64.", code="bad_base64", field=field)
    return content


def check_image(content: bytes, limits: Limits, declared: str | None = None, field: str = "image") -> None:
    """Judges a picture by its first bytes: format, size and shape; no pixel is decoded.

    `declared` is the content type that came with it; one that names another format is refused.
    """
    if not content:
        raise Refused(422, "The image is empty.", code="bad_image", field=field)
    if len(content) > limits.image_bytes:
        raise Refused(413, f"The image has over {limits.image_bytes} bytes.", field=field)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of bombs; the limits below refuse them
            with Image.open(io.BytesIO(content), formats=tuple(FORMATS)) as picture:
                (width, height), kind = picture.size, str(picture.format)
                frames = int(getattr(picture, "n_frames", 1))
    except (
        UnidentifiedImageError,
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        TypeError,
        Image.DecompressionBombError,
    ):
        # Pillow counts the pixels as it reads the header, so a bomb is refused here or by the limit below.
        raise Refused(
            422, f"The image is damaged, too large or none of {', '.join(FORMATS)}.", code="bad_image", field=field
        ) from None
    if width * height > limits.image_pixels:
        raise Refused(
            422,
            f"The image has {width}x{height} pixels; at most {limits.image_pixels} are read.",
            code="bad_image",
            field=field,
        )
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_ASPECT * min(width, height):
        raise Refused(
            422,
            f"The image has {width}x{height} pixels; each side needs {MIN_SIDE}, and none may be over {MAX_ASPECT} "
            "times the other.",
            code="bad_image",
            field=field,
        )
    if frames > 1:
        raise Refused(422, "The image is animated; send one frame of it.", code="bad_image", field=field)
    if declared and declared not in ("application/octet-stream", FORMATS[kind]):
        raise Refused(
            422, f"The image is {FORMATS[kind]}, but was declared as {declared!r:.60}.", code="bad_image", field=field
        )


def check_pixels(content: bytes, field: str = "image") -> None:
    """Decodes a picture that `check_image` let pass, to refuse one that is cut short before anything waits for it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=tuple(FORMATS)) as picture:
                picture.load()
    except (OSError, SyntaxError, ValueError, EOFError, TypeError, struct.error, zlib.error):
        raise Refused(422, "The image is cut short or damaged.", code="bad_image", field=field) from None


# Archives


def unpack(archive: IO[bytes], folder: Path, limits: Limits, endings: tuple[str, ...]) -> list[Path]:
    """Unpacks a zip file into an empty folder; returns its files.

    All names are judged before the first byte is written. What a member really holds is counted while it is unpacked,
    for the size in its header is the archive's own word.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            members = _members(packed, limits, endings)
            room = limits.unpacked_bytes
            files = []
            for name, member in members.items():
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                room -= _write(packed, member, file, room, limits)
                files.append(file)
            return files
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault, not the sender's
        raise Refused(422, "The archive is no zip file, or it is damaged.", code="bad_archive", field="file") from None


def _members(packed: zipfile.ZipFile, limits: Limits, endings: tuple[str, ...]) -> dict[str, zipfile.ZipInfo]:
    """The files of an archive by their plain relative names."""
    entries = packed.infolist()
    if len(entries) > limits.archive_files:
        raise _bad(f"The archive holds {len(entries)} entries; at most {limits.archive_files} are taken.")
    if sum(entry.file_size for entry in entries) > limits.unpacked_bytes:
        raise _bad(f"The archive unpacks to over {limits.unpacked_bytes} bytes.")
    found: dict[str, zipfile.ZipInfo] = {}
    seen: set[str] = set()
    for entry in entries:
        name = entry.orig_filename
        _check_name(name)
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _bad(f"The archive's entry {name!r:.80} is a link or a device; only files are taken.")
        if entry.flag_bits & 0x1:
            raise _bad("The archive is encrypted.")
        # Two names that one file system takes for the same file are duplicates.
        plain = unicodedata.normalize("NFC", name.rstrip("/")).casefold()
        if plain in seen:
            raise _bad(f"The archive holds {name!r:.80} twice.")
        seen.add(plain)
        if entry.is_dir() or kind == stat.S_IFDIR:
            continue
        if PurePosixPath(name).suffix.lower() not in endings:
            raise _bad(f"The archive holds {name!r:.80}; only {', '.join(endings)} are taken.")
        found[name] = entry
    if not found:
        raise _bad("The archive holds no file.")
    return found


def _check_name(name: str) -> None:
    parts = name.rstrip("/").split("/")
    if (
        not name.isprintable()
        or "\\" in name
        or ":" in name
        or len(name.encode("utf-8", "replace")) > LONGEST_PATH
        or any(part in ("", ".", "..") or part.startswith(".") for part in parts)
    ):
        raise _bad(f"The archive's name {name!r:.80} is not a plain path inside it.")


def _write(packed: zipfile.ZipFile, member: zipfile.ZipInfo, file: Path, room: int, limits: Limits) -> int:
    """Writes one member and returns how many bytes it has."""
    written = 0
    with packed.open(member) as source, file.open("xb") as sink:
        while part := source.read(CHUNK):
            written += len(part)
            if written > room:
                raise _bad(f"The archive unpacks to over {limits.unpacked_bytes} bytes.")
            sink.write(part)
    return written


def _bad(message: str) -> Refused:
    return Refused(422, message, code="bad_archive", field="file")


# Models and data sets


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """A folder for what was just received; it is gone afterwards, whatever happens."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=".upload-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place_model(upload: IO[bytes], folder: Path, limits: Limits) -> Path:
    """An uploaded model in `folder`: the path of its ONNX file, or of the Hugging Face folder that a zip held.

    A pickle is refused by its first bytes and never opened; the zip that torch.save writes is refused by its names.
    """
    head = upload.read(8)
    upload.seek(0)
    if not head:
        raise Refused(422, "The model is empty.", code="bad_model", field="file")
    if head.startswith(PICKLES):
        raise _pickle()
    if head.startswith(b"PK"):
        _refuse_pickles(upload)
        unpack(upload, folder, limits, ENDINGS)
        return _only_folder(folder)
    # A safetensors file begins with the length of its header and a brace.
    if head[7:8] == b"\x00" or upload_brace(upload):
        raise Refused(
            422,
            "The file holds weights alone; send the Hugging Face folder that they belong to as a zip file.",
            code="bad_model",
            field="file",
        )
    file = folder / "model.onnx"
    with file.open("xb") as sink:
        shutil.copyfileobj(upload, sink, CHUNK)
    return file


def upload_brace(upload: IO[bytes]) -> bool:
    """Whether the ninth byte opens a JSON object, as a safetensors header does."""
    brace = upload.read(9)[8:9]
    upload.seek(0)
    return brace == b"{"


def place_dataset(upload: IO[bytes], folder: Path, limits: Limits) -> Path:
    """An uploaded data set in `folder`: a zip file of pictures with a manifest or class folders."""
    if upload.read(2) != b"PK":
        raise Refused(422, "A data set is sent as a zip file.", code="bad_archive", field="file")
    upload.seek(0)
    unpack(upload, folder, limits, PICTURES + TABLES)
    return _only_folder(folder)


def _refuse_pickles(upload: IO[bytes]) -> None:
    try:
        names = zipfile.ZipFile(upload).namelist()
    except (zipfile.BadZipFile, ValueError, OSError):
        names = []  # `unpack` says what is wrong with it
    upload.seek(0)
    if any(name.lower().endswith(PICKLED_NAMES) for name in names[:100_000]):
        raise _pickle()


def _pickle() -> Refused:
    return Refused(
        422,
        "The file holds a pickle, which could run any code and is never opened. Save the model with "
        "save_pretrained(..., safe_serialization=True) as a folder of safetensors, or as ONNX.",
        code="pickle",
        field="file",
    )


def _only_folder(folder: Path) -> Path:
    """Where an archive packed one folder rather than its contents, that folder."""
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(os.stat(Path(root) / name).st_size for root, _, names in os.walk(folder) for name in names)
