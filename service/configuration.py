"""What the operator of a service decides: one frozen record, read from a YAML file or made of defaults.

Paths in a file are relative to that file; defaults are relative to the current folder. Nothing here imports torch: the
serving process reads it too.
"""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from engine.errors import InputError
from engine.settings import wrong_setting

__all__ = ["EMBEDDED_WORLDS", "ClassifierSource", "Configuration", "DatasetSource", "Limits", "Scope", "Token"]

VARIABLE = "PFUNGST_CONFIG"
LARGEST_FILE = 1 << 20
EMBEDDED_WORLDS = ("portraits", "histology")
EMBEDDED_ROLES = ("student", "twin")

Scope = Literal["read", "audit", "admin"]


def _no_switch(value: Any) -> Any:
    """YAML reads yes and no as switches, which would pass for the numbers 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


Count = Annotated[int, BeforeValidator(_no_switch), Field(ge=1)]
Seconds = Annotated[float, BeforeValidator(_no_switch), Field(gt=0, le=86_400)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The id of something the operator configures: no slash, so that it never meets an embedded one."""
Host = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=255)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ClassifierSource(_Record):
    """A classifier that requests may name: a Hugging Face folder, an ONNX file or the file of a remote endpoint."""

    path: Path
    labels: tuple[str, ...] | None = Field(
        default=None, description="of an ONNX file that does not say them; so are the next"
    )
    size: Count | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    output: str | None = None

    @property
    def stated(self) -> dict[str, Any]:
        """What is said about an ONNX file beside it."""
        return {name: value for name, value in self if name != "path" and value is not None}


class DatasetSource(_Record):
    """A data set that requests may name."""

    path: Path
    split: str | None = None
    label_column: str | None = None
    teacher: Path | None = Field(
        default=None, description="a trusted classifier that judges counterfactuals of this data"
    )
    prior: str | None = Field(
        default=None, description="used where a request names none; otherwise the closest embedded one"
    )


class Token(_Record):
    """Who may ask, known by the SHA-256 of a secret that is stored nowhere."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    sha256: Annotated[str, StringConstraints(to_lower=True, pattern=r"^[0-9a-fA-F]{64}$")] = Field(repr=False)
    scopes: frozenset[Scope] = Field(frozenset({"read"}), min_length=1)


class Limits(_Record):
    """What one request may ask for."""

    body_bytes: Count = Field(default=32 << 20, description="a request's body, except uploads of archives")
    image_bytes: Count = 16 << 20
    image_pixels: Count = 40_000_000
    archive_bytes: Count = 1 << 30
    archive_files: Count = 1_000
    unpacked_bytes: Count = 2 << 30
    steps: Count = Field(default=1_000, description="guided steps of an explanation; steps of a fine-tuning")
    k: Count = Field(default=8, description="counterfactuals of an image")
    batch: Count = 64
    queue: Count = Field(default=100, description="jobs that wait; more are refused")


def _as_path(value: Any) -> Any:
    """`name: folder` is short for `name: {path: folder}`."""
    return {"path": value} if isinstance(value, str | Path) else value


class Configuration(_Record):
    """Everything that a service is told before it starts."""

    folder: Path = Field(
        Path("pfungst-data"), description="database, artifacts, work and cache, unless named elsewhere"
    )
    database: str | None = Field(None, description="SQLAlchemy URL; default: SQLite in the folder", repr=False)
    artifacts: str | None = Field(
        None, description="fsspec URL or folder; default: artifacts in the folder", repr=False
    )

    classifiers: dict[Name, Annotated[ClassifierSource, BeforeValidator(_as_path)]] = Field(default_factory=dict)
    datasets: dict[Name, Annotated[DatasetSource, BeforeValidator(_as_path)]] = Field(default_factory=dict)
    priors: tuple[str, ...] = Field(EMBEDDED_WORLDS, min_length=1)
    endpoints: tuple[Host, ...] = Field((), description="hosts, or host:port, that remote classifiers may be at")
    private_endpoints: bool = Field(False, description="whether those may have private or loopback addresses")

    tokens: tuple[Token, ...] = ()
    limits: Limits = Limits()
    host: Host = "127.0.0.1"

    workers: Annotated[int, BeforeValidator(_no_switch), Field(ge=0, le=256)] = Field(
        1, description="audit workers beside the serving process; 0 where they run on other machines"
    )
    gpus: Annotated[float, BeforeValidator(_no_switch), Field(ge=0)] = Field(
        0.0, description="GPUs that BentoML reserves for the serving process"
    )
    threads: Count | None = Field(None, description="threads of each worker; default: cores shared among the workers")
    nice: Annotated[int, BeforeValidator(_no_switch), Field(ge=0, le=19)] = Field(
        10, description="by how much workers stand back behind the serving process"
    )
    heartbeat_seconds: Seconds = Field(1.0, description="how often a worker says that it lives, and hears of a cancel")
    stale_seconds: Seconds = Field(30.0, description="silence after which another worker takes a job over")
    grace_seconds: Seconds = Field(6.0, description="what a worker that has to end may take for the step it is in")
    max_attempts: Count = Field(
        5, description="lost workers in a row, without a finished image, until a job has failed"
    )
    sync_images: Count = Field(4, description="finished images between copies of a running audit to the artifacts")
    retention_days: Annotated[float, BeforeValidator(_no_switch), Field(gt=0)] = Field(
        30.0, description="how long finished jobs and their artifacts are kept"
    )
    surrogate_steps: Count | None = Field(
        None, description="distillation steps instead of the recipes' own: quicker, and less to be believed"
    )
    surrogate_pictures: Annotated[int, BeforeValidator(_no_switch), Field(ge=20)] | None = Field(
        None, description="pictures to distil on instead of 2 000"
    )

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise InputError(_sentence(error)) from None

    @classmethod
    def load(cls, file: Path | None = None) -> Configuration:
        """The configuration in a file, or in the one that PFUNGST_CONFIG names, or the defaults."""
        named = os.environ.get(VARIABLE)
        if file is None and not named:
            return cls()
        return _read(Path(file or str(named)))

    @property
    def database_url(self) -> str:
        """Where the jobs are."""
        return self.database or f"sqlite:///{self.folder.absolute() / 'jobs.sqlite'}"

    @property
    def artifacts_url(self) -> str:
        """Where artifacts are."""
        return self.artifacts or str(self.folder.absolute() / "artifacts")

    @property
    def classifier_ids(self) -> tuple[str, ...]:
        """Every classifier that can be named: the embedded ones, then the configured ones."""
        embedded = (f"{world}/{role}" for world in EMBEDDED_WORLDS for role in EMBEDDED_ROLES)
        return (*embedded, *sorted(self.classifiers))

    @property
    def dataset_ids(self) -> tuple[str, ...]:
        """Every data set that can be named."""
        return (*EMBEDDED_WORLDS, *sorted(self.datasets))

    @property
    def threads_per_worker(self) -> int:
        """OMP_NUM_THREADS of a worker."""
        return self.threads or max(1, (os.cpu_count() or 1) // max(1, self.workers))

    @property
    def bound_to_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)

    def work_folder(self, job: str) -> Path:
        """Where a worker on this machine works on a job."""
        return self.folder / "work" / job

    @property
    def cache_folder(self) -> Path:
        """Where distilled surrogates are kept."""
        return self.folder / "cache"

    @field_validator("datasets")
    @classmethod
    def _no_embedded_name(cls, datasets: dict[str, DatasetSource]) -> dict[str, DatasetSource]:
        for name in EMBEDDED_WORLDS:
            if name in datasets:
                raise ValueError(f"should not take the name {name!r}, which is an embedded data set's")
        return datasets

    @field_validator("tokens")
    @classmethod
    def _tokens_differ(cls, tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        for what in ("name", "sha256"):
            value, count = Counter(getattr(token, what) for token in tokens).most_common(1)[0] if tokens else ("", 0)
            if count > 1:
                twice = f"{value!r} is there twice" if what == "name" else "two of them have the same"
                raise ValueError(f"should each have a {what} of its own, but {twice}")
        return tokens

    @field_validator("database")
    @classmethod
    def _known_database(cls, url: str | None) -> str | None:
        kind = None if url is None else url.partition(":")[0].partition("+")[0]
        if kind not in (None, "sqlite", "postgresql"):
            raise ValueError("should be a URL that starts with sqlite:/// or postgresql+psycopg://")
        return url

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if not self.bound_to_loopback and not self.tokens:
            raise ValueError(
                f"host {self.host} can be reached from other machines, which needs tokens; add one, or leave the host "
                "at 127.0.0.1"
            )
        if self.stale_seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                f"stale_seconds ({self.stale_seconds:g}) should be at least three times heartbeat_seconds "
                f"({self.heartbeat_seconds:g})"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone; a name other than localhost counts as not."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# Reading ---------------------------------------------------------------------------------------------------------


def _read(file: Path) -> Configuration:
    """The configuration in a file, with its paths made absolute."""
    settings, home = _settings(file), file.absolute().parent
    settings["folder"] = _below(home, settings.get("folder", "pfungst-data"))
    if isinstance(place := settings.get("artifacts"), str) and "://" not in place:
        settings["artifacts"] = str(home / place)
    for kind in ("classifiers", "datasets"):
        if isinstance(sources := settings.get(kind), dict):
            settings[kind] = {name: _source(home, source) for name, source in sources.items()}
    try:
        return Configuration(**settings)
    except InputError as error:
        raise InputError(f"{error} It is read from {file}.") from None


def _source(home: Path, source: Any) -> Any:
    if isinstance(source, str):
        return {"path": _below(home, source)}
    if not isinstance(source, dict):
        return source
    return {name: _below(home, value) if name in ("path", "teacher") else value for name, value in source.items()}


def _below(home: Path, path: Any) -> Any:
    return home / path if isinstance(path, str) and path else path


def _settings(file: Path) -> dict[str, Any]:
    """The settings of a file by name."""
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise InputError(f"The configuration {file} is larger than {LARGEST_FILE} bytes; it should be a page.")
        settings = yaml.load(content.decode("utf-8"), _Loader)
    except OSError as error:
        raise InputError(f"The configuration {file} cannot be read: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = error.problem or error.context
        raise InputError(f"The configuration {file} cannot be read as YAML: {problem}{line}.") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InputError(f"The configuration {file} cannot be read as YAML in UTF-8.") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise InputError(f"The configuration {file} has to hold settings by name, such as 'workers: 2'.")
    return settings


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a name that comes twice: the later one would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _sentence(error: ValidationError) -> str:
    """One sentence for the first wrong setting; secrets are not repeated."""
    first = error.errors(include_url=False)[0]
    problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ").rstrip(".")
    if not first["loc"]:
        return f"In the configuration, {problem}."
    if first["loc"][0] in ("tokens", "database", "artifacts") and first["type"] not in ("extra_forbidden", "missing"):
        name = ".".join(str(part) for part in first["loc"])
        return f"The configuration's setting {name!r} {problem[0].lower()}{problem[1:]}."
    return wrong_setting(error, "configuration", _record_at(first["loc"]))


def _record_at(place: tuple[int | str, ...]) -> type[BaseModel]:
    """The record that a setting belongs to, to list what it knows."""
    inner: dict[int | str, type[BaseModel]] = {
        "classifiers": ClassifierSource,
        "datasets": DatasetSource,
        "tokens": Token,
        "limits": Limits,
    }
    return inner.get(place[0], Configuration) if len(place) > 1 else Configuration
