"""Artifacts in a folder, and in a store that is none."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from engine.errors import InputError
from service.artifacts import ArtifactStore

JOB, OTHER = "0700a08134e34d75a4255db3158387e7", "cd9120757dec4e7986bb0ed80e71e5b5"


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ArtifactStore]:
    if request.param == "folder":
        yield ArtifactStore(str(tmp_path / "artifacts"))
        return
    yield ArtifactStore("memory://bucket/prefix")
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "source"
    file.write_bytes(b"content")
    return file


def read(store: ArtifactStore, job: str, name: str) -> bytes:
    with store.open(job, name) as stream:
        return stream.read()


def test_what_is_put_comes_back(store: ArtifactStore, file: Path) -> None:
    store.put(JOB, "report.html", file)
    store.put(JOB, "counterfactuals/000001-1.png", file)
    assert store.names(JOB) == ["counterfactuals/000001-1.png", "report.html"]
    assert read(store, JOB, "report.html") == b"content"
    assert store.size(JOB, "report.html") == 7
    assert store.has(JOB, "report.html")
    file.write_bytes(b"newer")
    store.put(JOB, "report.html", file)
    assert read(store, JOB, "report.html") == b"newer"
    assert store.size(JOB, "report.html") == 5


def test_an_open_file_can_be_read_from_anywhere(store: ArtifactStore, file: Path) -> None:
    """As a range request does."""
    store.put(JOB, "set.zip", file)
    with store.open(JOB, "set.zip") as stream:
        stream.seek(3)
        assert stream.read(2) == b"te"


def test_a_tree_is_put_under_its_names(store: ArtifactStore, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "one").write_bytes(b"1")
    (tree / "two").write_bytes(b"2")
    assert store.put_tree(JOB, tree) == ["a/b/one", "two"]
    assert store.put_tree(JOB, tree, "pictures") == ["pictures/a/b/one", "pictures/two"]
    assert store.names(JOB) == ["a/b/one", "pictures/a/b/one", "pictures/two", "two"]
    assert read(store, JOB, "pictures/a/b/one") == b"1"


def test_a_file_is_fetched_whole(store: ArtifactStore, file: Path, tmp_path: Path) -> None:
    store.put(JOB, "a", file)
    store.fetch(JOB, "a", tmp_path / "deep" / "copy")
    assert (tmp_path / "deep" / "copy").read_bytes() == b"content"
    with pytest.raises(FileNotFoundError):
        store.fetch(JOB, "b", tmp_path / "deep" / "none")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["copy"]


def test_jobs_are_apart_and_can_be_deleted(store: ArtifactStore, file: Path) -> None:
    store.put(JOB, "a", file)
    store.put(OTHER, "a", file)
    store.delete(JOB)
    store.delete(JOB)
    assert store.names(JOB) == []
    assert store.names(OTHER) == ["a"]
    with pytest.raises(FileNotFoundError):
        store.open(JOB, "a")
    with pytest.raises(FileNotFoundError):
        store.size(JOB, "a")
    assert not store.has(JOB, "a")


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/", "a\x00b", "a\nb", "..\\x", "./a"),
        *("x" * 401, ".partial-1", "a/.partial-1"),
    ],
)
def test_a_name_that_leads_out_is_refused(store: ArtifactStore, file: Path, name: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for use in (lambda: store.put(JOB, name, file), lambda: store.open(JOB, name), lambda: store.size(JOB, name)):
        with pytest.raises(InputError, match="not the name of an artifact"):
            use()
    assert sorted(tmp_path.rglob("*")) == before
    assert store.names(JOB) == []


@pytest.mark.parametrize("job", ["", "..", "../" + JOB, JOB.upper() + "g", JOB + "/..", "*" * 32, JOB + "\n"])
def test_what_is_no_job_is_refused(store: ArtifactStore, file: Path, job: str) -> None:
    for use in (lambda: store.put(job, "a", file), lambda: store.names(job), lambda: store.delete(job)):
        with pytest.raises(InputError, match="not the id of a job"):
            use()


def test_a_half_written_file_is_not_there(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    store.put(JOB, "a", file)
    seen: list[list[str]] = []

    def full_disk(source: str, target: str, **_: object) -> None:
        Path(target).write_bytes(b"half")
        seen.append(store.names(JOB))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._files, "put_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        store.put(JOB, "a", file)
    assert seen == [["a"]]
    assert read(store, JOB, "a") == b"content"
    assert [path.name for path in (tmp_path / "artifacts" / JOB).iterdir()] == ["a"]


@pytest.mark.parametrize("url", ["nonsense://bucket", "memory://"])
def test_a_place_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        ArtifactStore(url)
