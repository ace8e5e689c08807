"""What an operator writes, and what becomes of it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InputError
from service.configuration import EMBEDDED_ROLES, EMBEDDED_WORLDS, Configuration, is_loopback

SECRET = hashlib.sha256(b"secret").hexdigest()


@pytest.fixture(autouse=True)
def no_file_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PFUNGST_CONFIG", raising=False)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "pfungst.yaml"
    file.write_text(text)
    return file


def test_without_a_file_everything_has_a_default() -> None:
    found = Configuration.load()
    assert found.database_url == f"sqlite:///{Path.cwd() / 'pfungst-data' / 'jobs.sqlite'}"
    assert found.artifacts_url == str(Path.cwd() / "pfungst-data" / "artifacts")
    assert found.priors == ("portraits", "histology")
    assert found.host == "127.0.0.1"
    assert found.workers == 1
    assert found.classifier_ids == ("portraits/student", "portraits/twin", "histology/student", "histology/twin")
    assert found.dataset_ids == ("portraits", "histology")


def test_the_embedded_names_are_those_of_the_worlds() -> None:
    from worlds import WORLDS
    from worlds.store import ROLES

    assert tuple(WORLDS) == EMBEDDED_WORLDS
    assert set(EMBEDDED_ROLES) < set(ROLES)


def test_a_file_is_read_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    found = Configuration.load(
        written(
            tmp_path,
            f"""
            folder: data
            database: postgresql+psycopg://jobs@localhost/jobs
            classifiers:
              hair: models/hair
              spots: {{path: /srv/spots.onnx, labels: [benign, malignant], size: 96}}
            datasets:
              faces: {{path: faces, split: test, label_column: blond, teacher: models/trusted, prior: portraits}}
            tokens:
              - {{name: ci, sha256: {SECRET.upper()}, scopes: [read, audit]}}
            host: 0.0.0.0
            limits: {{k: 3}}
            """,
        )
    )
    assert found.folder == tmp_path / "data"
    assert found.database_url == "postgresql+psycopg://jobs@localhost/jobs"
    assert found.artifacts_url == str(tmp_path / "data" / "artifacts")
    assert found.classifiers["hair"].path == tmp_path / "models" / "hair"
    assert found.classifiers["hair"].stated == {}
    assert found.classifiers["spots"].path == Path("/srv/spots.onnx")
    assert found.classifiers["spots"].stated == {"labels": ("benign", "malignant"), "size": 96}
    assert found.datasets["faces"].teacher == tmp_path / "models" / "trusted"
    assert found.classifier_ids[-2:] == ("hair", "spots")
    assert found.tokens[0].sha256 == SECRET
    assert found.tokens[0].scopes == {"read", "audit"}
    assert found.limits.k == 3
    assert found.limits.queue == Configuration().limits.queue


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFUNGST_CONFIG", str(written(tmp_path, "workers: 3")))
    assert Configuration.load().workers == 3
    (tmp_path / "other.yaml").write_text("workers: 2")
    assert Configuration.load(tmp_path / "other.yaml").workers == 2


def test_an_empty_file_is_the_defaults_beside_it(tmp_path: Path) -> None:
    found = Configuration.load(written(tmp_path, ""))
    assert found == Configuration(folder=tmp_path / "pfungst-data")


def test_it_goes_through_json_unchanged(tmp_path: Path) -> None:
    """As it goes to a worker."""
    found = Configuration(
        folder=tmp_path, classifiers={"a": "x.onnx"}, datasets={"b": {"path": "y"}}, surrogate_steps=5
    )
    assert Configuration(**json.loads(found.model_dump_json())) == found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("worker: 1", r"has no setting 'worker'; it knows folder, database, artifacts"),
        ("limits: {kk: 1}", r"has no setting 'limits\.kk'; it knows body_bytes"),
        ("workers: yes", r"'workers'.*should be a number"),
        ("workers: -1", r"'workers' should be greater than or equal to 0, but is -1"),
        ("limits: {k: 0}", r"'limits\.k' should be greater than or equal to 1, but is 0"),
        ("limits: {queue: .nan}", r"'limits\.queue'.*nan"),
        ("heartbeat_seconds: 0", r"'heartbeat_seconds' should be greater than 0"),
        ("heartbeat_seconds: 20", r"stale_seconds \(30\) should be at least three times heartbeat_seconds \(20\)"),
        ("retention_days: soon", r"'retention_days' should be a valid number"),
        ("host: 0.0.0.0", r"host 0\.0\.0\.0 can be reached from other machines, which needs tokens"),
        ("host: example.org", r"which needs tokens"),
        ("tokens: [{name: a, sha256: abc}]", r"'tokens\.0\.sha256' string should match"),
        (f"tokens: [{{name: a b, sha256: {SECRET}}}]", r"'tokens\.0\.name' string should match"),
        (f"tokens: [{{name: a, sha256: {SECRET}, scopes: [root]}}]", r"'tokens\.0\.scopes\.0'"),
        (f"tokens: [{{name: a, sha256: {SECRET}, scopes: []}}]", r"'tokens\.0\.scopes'"),
        (f"tokens: [{{name: a, sha256: {SECRET}}}, {{name: a, sha256: {'f' * 64}}}]", r"'a' is there twice"),
        (f"tokens: [{{name: a, sha256: {SECRET}}}, {{name: b, sha256: {SECRET}}}]", r"sha256 of its own"),
        ("classifiers: {a/b: x}", r"'classifiers\.a/b"),
        ("classifiers: {a: {labels: [x]}}", r"lacks the setting 'classifiers\.a\.path'"),
        ("datasets: {portraits: x}", r"should not take the name 'portraits'"),
        ("datasets: {a: {path: x, colour: red}}", r"has no setting 'datasets\.a\.colour'; it knows path, split"),
        ("priors: []", r"'priors'"),
        ("database: mysql://user:password@host/db", r"'database' should be a URL that starts with sqlite:///"),
        ("workers: 1\nworkers: 2", r"'workers' is there twice in line 1"),
        ("- 1", r"has to hold settings by name"),
        ("a: [", r"cannot be read as YAML"),
        ("\x00", r"cannot be read as YAML"),
    ],
)
def test_a_wrong_setting_is_one_clear_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        Configuration.load(written(tmp_path, text))
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert SECRET not in str(refused.value)
    assert "password" not in str(refused.value)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Configuration.load(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="larger than"):
        Configuration.load(written(tmp_path, "#" * (1 << 20) + "\n"))


@pytest.mark.parametrize("settings", [{"tokens": [{"name": "a", "sha256": SECRET}]}, {"database": "sqlite:///secret"}])
def test_secrets_are_not_shown(settings: dict[str, Any]) -> None:
    shown = repr(Configuration(**settings))
    assert SECRET not in shown
    assert "sqlite" not in shown


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "")),
    ],
)
def test_loopback_is_this_machine_alone(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
