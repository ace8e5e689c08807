"""Archives: names are judged before a byte is written, contents are counted while they are."""

import io
import json
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.configuration import Configuration
from service.http import uploads
from service.http.errors import Refused
from service.http.uploads import unpack
from service.http.zip_stream import zip_stream
from service.worker import Worker
from tests.audit.test_onnx_classifier import SETTINGS, save
from tests.service.http.conftest import LIMITS, Service, in_process, png, zip_of
from worlds.store import WEIGHTS

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
    message = service.refuses(422, "bad_archive", "POST", UPLOAD, files={"file": ("a.zip", make())}, field="file")
    assert str(service.folder) not in message
    assert sorted(service.folder.parent.rglob("*outside*")) == before
    assert not list(service.folder.rglob(".upload-*"))


def test_a_zip_whose_headers_lie_is_not_unpacked_beyond_what_they_say(service: Service, tmp_path: Path) -> None:
    """The reader of the zip stops at the stated length, where the content's checksum is wrong."""
    with pytest.raises(Refused) as refusal:
        unpack(io.BytesIO(lying()), tmp_path, service.backend.configuration.limits, (".png",))
    assert (refusal.value.status_code, refusal.value.code) == (422, "bad_archive")
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 10


def test_what_is_unpacked_is_counted_whatever_the_headers_say(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the check of the stated sizes taken away, the counter alone keeps several files together to the limit."""
    judge = uploads._members
    trusting = Configuration(folder=tmp_path, limits=LIMITS | {"unpacked_bytes": 2**40}).limits
    monkeypatch.setattr(uploads, "_members", lambda packed, _, endings: judge(packed, trusting, endings))
    for bomb in (BOMB, zip_of({"a.png": bytes(5_000_000), "b.png": bytes(5_000_000)})):
        message = service.refuses(422, "bad_archive", "POST", UPLOAD, files={"file": ("a.zip", bomb)}, field="file")
        assert message == "The archive unpacks to over 8000000 bytes."
        out = tmp_path / str(len(bomb))
        out.mkdir()
        with pytest.raises(Refused):
            unpack(io.BytesIO(bomb), out, service.backend.configuration.limits, (".png",))
        assert 0 < sum(file.stat().st_size for file in out.iterdir()) <= 8_000_000
    just = zip_of({"a.png": bytes(4_000_000), "b.png": bytes(4_000_000)})
    (tmp_path / "just").mkdir()
    assert len(unpack(io.BytesIO(just), tmp_path / "just", service.backend.configuration.limits, (".png",))) == 2


@pytest.mark.parametrize(
    "files",
    [
        dataset(manifest__csv=b"image,label\na.png,dark\n"),
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
    message = service.refuses(422, "bad_input", "POST", UPLOAD, files={"file": ("a.zip", zip_of(files))})
    assert str(service.folder) not in message


@pytest.mark.parametrize(
    ("rows", "count", "named"),
    [
        ("a.png,dark\nb.png,blond\nmissing.png,dark\n", "1 of the 3", "missing.png"),
        ("missing.png,dark\ngone.png,blond\n", "2 of the 2", "gone.png"),
        ("a.png,dark\nB.PNG,blond\n", "1 of the 2", "B.PNG"),
        ("a.png,dark\nfolder,blond\n", "1 of the 2", "folder"),
        (f"a.png,dark\n{'n' * 300}.png,blond\n", "1 of the 2", "n" * 50),
        ("a.png,dark\n" + "".join(f"{i}.png,blond\n" for i in range(9)), "9 of the 10", "and 4 more"),
    ],
)
def test_a_data_set_that_names_missing_files_is_refused(service: Service, rows: str, count: str, named: str) -> None:
    files = dataset(manifest__csv=f"image,label\n{rows}".encode()) | {"folder/c.png": png()}
    for prefix in ("", "packed/"):
        packed = zip_of({f"{prefix}{name}": content for name, content in files.items()})
        message = service.refuses(422, "bad_input", "POST", UPLOAD, files={"file": ("a.zip", packed)})
        assert count in message and named in message and "are not in the archive" in message
        assert str(service.folder) not in message and "upload-" not in message


def test_a_data_set_may_lack_the_share_of_files_that_an_audit_puts_up_with(service: Service) -> None:
    """One of twenty is the allowed 5 %, two of twenty are not."""
    rows = "".join(f"{i}.png,{('dark', 'blond')[i % 2]}\n" for i in range(20))
    files = {"manifest.csv": f"image,label\n{rows}".encode()} | {f"{i}.png": png() for i in range(19)}
    taken = service.client.post(UPLOAD, files={"file": ("a.zip", zip_of(files))})
    assert taken.status_code == 201, taken.text
    del files["18.png"]
    message = service.refuses(422, "bad_input", "POST", UPLOAD, files={"file": ("a.zip", zip_of(files))})
    assert "2 of the 20" in message and "'18.png', '19.png'" in message


def uploaded(service: Service, first: str, second: str) -> str:
    """The id of a data set with these two labels."""
    rows = f"image,label\na.png,{first}\nb.png,{second}\n".encode()
    answer = service.client.post(UPLOAD, files={"file": ("a.zip", zip_of(dataset(manifest__csv=rows)))})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def test_labels_that_the_classifier_does_not_know_are_refused_before_a_job(service: Service, tmp_path: Path) -> None:
    form: dict[str, Any] = {
        "files": {"file": ("model.onnx", save(tmp_path / "model.onnx").read_bytes())},
        "data": {"settings": json.dumps(SETTINGS)},
    }
    colours = service.client.post("/v1/classifiers/upload", **form).json()["id"]
    hair, half, paint = (uploaded(service, *two) for two in (("dark", "blond"), ("dark", "grey"), ("red", "blue")))
    for classifier, data, sentence in (
        (
            "portraits/student",
            half,
            "does not know 1 of the 2 labels in the data set: 'grey'. It knows: 'dark', 'blond'",
        ),
        ("portraits/twin", paint, "does not know 2 of the 2 labels in the data set: 'blue', 'red'"),
        (colours, hair, "does not know 2 of the 2 labels in the data set: 'blond', 'dark'. It knows: 'red', 'green'"),
    ):
        for address in ("/v1/audits", "/v1/gate"):
            asked = {"classifier": classifier, "dataset": data}
            assert sentence in service.refuses(422, "label_mismatch", "POST", address, json=asked, field="dataset")
    for classifier, data in (("portraits/student", hair), (colours, paint)):
        asked = {"classifier": classifier, "dataset": data}
        assert service.client.post("/v1/audits", json=asked).status_code == 202


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Service]:
    """A service whose operator configured a classifier, which nobody has opened so far."""
    mine = {"mine": {"path": WEIGHTS / "portraits" / "student"}}
    yield from in_process(Configuration(folder=tmp_path / "data", workers=0, limits=LIMITS, classifiers=mine))


def test_labels_that_an_unopened_classifier_does_not_know_fail_the_job(configured: Service) -> None:
    """Nobody knows its labels when the job is queued; once it was registered, they are known."""
    asked = {"classifier": "mine", "dataset": uploaded(configured, "dark", "grey"), "prior": "portraits"}
    answer = configured.client.post("/v1/audits", json=asked)
    assert answer.status_code == 202
    backend = configured.backend
    assert Worker(backend.configuration, table=backend.jobs, store=backend.artifacts).run_one()
    job = configured.client.get(answer.json()["links"]["self"]).json()
    assert (job["state"], job["error"]["code"]) == ("failed", "bad_input")
    assert "does not know 1 of the 2 labels in the data: 'grey'" in job["error"]["message"]
    assert backend.artifacts.names(job["id"]) == []
    assert configured.client.post("/v1/classifiers", json={"source": "mine"}).status_code == 201
    configured.refuses(422, "label_mismatch", "POST", "/v1/audits", json=asked, field="dataset")


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
