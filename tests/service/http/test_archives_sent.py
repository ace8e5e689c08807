"""Archives: names are judged before a byte is written, contents are counted while they are."""

import io
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from service.http.uploads import unpack
from service.http.zip_stream import zip_stream
from tests.service.http.conftest import Service, png, zip_of

UPLOAD = "/v1/datasets/upload"


def crafted(*entries: tuple[str, bytes, int]) -> bytes:
    """A zip file of (name, content, Unix mode), with names as they are."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, content, mode in entries:
            info = zipfile.ZipInfo("x" * len(name))
            info.filename = info.orig_filename = name
            info.external_attr = mode << 16
            packed.writestr(info, content)
    return stream.getvalue()


def dataset(**changed: bytes) -> dict[str, bytes]:
    rows = "image,label,group\na.png,dark,x\nb.png,blond,y\n"
    return {"manifest.csv": rows.encode(), "a.png": png(), "b.png": png()} | {
        name.replace("__", "."): content for name, content in changed.items()
    }


BOMB = zip_of({"a.png": bytes(9_000_000)})


def lying() -> bytes:
    """A zip whose headers say that its nine megabytes are ten bytes."""
    return BOMB.replace((9_000_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "make",
    [
        lambda: crafted(("../outside.png", b"1", 0)),
        lambda: crafted(("a/../../outside.png", b"1", 0)),
        lambda: crafted(("/etc/outside.png", b"1", 0)),
        lambda: crafted(("C:/outside.png", b"1", 0)),
        lambda: crafted(("a\\..\\outside.png", b"1", 0)),
        lambda: crafted(("link.png", b"/etc/passwd", stat.S_IFLNK | 0o777)),
        lambda: crafted(("device.png", b"", stat.S_IFCHR | 0o666)),
        lambda: crafted(("a.png", b"1", 0), ("a.png", b"2", 0)),
        lambda: crafted(("a.png", b"1", 0), ("A.PNG", b"2", 0)),
        lambda: crafted(("caf\u00e9.png", b"1", 0), ("cafe\u0301.png", b"2", 0)),
        lambda: crafted(("a/", b"", 0), ("a", b"", 0)),
        lambda: crafted((".hidden/a.png", b"1", 0)),
        lambda: crafted(("a\x07.png", b"1", 0)),
        lambda: crafted(("n" * 300 + ".png", b"1", 0)),
        lambda: crafted(("run.sh", b"rm", 0o755)),
        lambda: crafted(("code.py", b"1", 0)),
        lambda: crafted(("inner.zip", zip_of({"a.png": b"1"}), 0)),
        lambda: crafted(*((f"{i}.png", b"1", 0) for i in range(21))),
        lambda: BOMB,
        lying,
        lambda: zip_of({}),
        lambda: b"PK\x03\x04 and then nothing",
        lambda: zip_of(dataset())[:-40],
        lambda: crafted(("a.png", png(), 0)).replace(png()[20:40], bytes(20)),
        lambda: b"Rar!\x1a\x07\x00",
        lambda: b"",
    ],
)
def test_a_bad_archive_is_refused_whole(service: Service, make: Callable[[], bytes]) -> None:
    before = sorted(service.folder.parent.rglob("*outside*"))
    message = service.refuses(422, None, "POST", UPLOAD, files={"file": ("a.zip", make())})
    assert str(service.folder) not in message
    assert sorted(service.folder.parent.rglob("*outside*")) == before
    assert not list(service.folder.rglob(".upload-*"))


@pytest.mark.parametrize(
    "files",
    [
        dataset(manifest__csv=b"image,label\nmissing.png,dark\n"),
        dataset(manifest__csv=b"image,label\n../a.png,dark\nb.png,blond\n"),
        dataset(manifest__csv=b"image,label\na.png,dark\nb.png,dark\n"),
        dataset(manifest__csv=b"image,label\n"),
        dataset(manifest__csv=b""),
        dataset(manifest__csv=b"\xff\xfe\x00"),
        dataset(manifest__csv=b"picture,kind\na.png,dark\n"),
        {"readme.txt": b"no pictures"},
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused(service: Service, files: dict[str, bytes]) -> None:
    message = service.refuses(422, None, "POST", UPLOAD, files={"file": ("a.zip", zip_of(files))})
    assert str(service.folder) not in message


def test_a_data_set_is_taken_listed_and_deleted(service: Service) -> None:
    formula = b"image,label,note\na.png,dark,=HYPERLINK(1)\nb.png,blond,-\n"
    answer = service.client.post(
        UPLOAD, files={"file": ("a.zip", zip_of(dataset(manifest__csv=formula)))}, data={"name": "faces"}
    )
    assert answer.status_code == 201, answer.text
    entry = answer.json()
    assert (entry["kind"], entry["name"]) == ("uploaded", "faces")
    assert entry in service.client.get("/v1/datasets").json()["datasets"]
    audit = {"classifier": "portraits/student", "dataset": entry["id"]}
    assert service.client.post("/v1/audits", json=audit).status_code == 202
    assert service.client.delete(f"/v1/datasets/{entry['id']}").status_code == 204
    service.refuses(422, "unknown_dataset", "POST", "/v1/audits", json=audit, field="dataset")


def test_a_streamed_zip_is_what_went_in(service: Service, tmp_path: Path) -> None:
    files = {"a/one.txt": b"1" * 700_000, "two.txt": b"", "ü.txt": b"3"}
    whole = b"".join(zip_stream(files, lambda name: io.BytesIO(files[name])))
    with zipfile.ZipFile(io.BytesIO(whole)) as packed:
        assert packed.testzip() is None
        assert {name: packed.read(name) for name in packed.namelist()} == files
    unpack(io.BytesIO(whole), tmp_path, service.backend.configuration.limits, (".txt",))
    assert (tmp_path / "a" / "one.txt").read_bytes() == files["a/one.txt"]
