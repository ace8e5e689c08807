"""What goes over the wire, as records: the OpenAPI document is made of these and nothing else."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from audit.finetune_settings import FinetuneSettings
from audit.policy import Policy

MAX_SEED = 2**63 - 1


def _no_switch(value: Any) -> Any:
    """true and false are not numbers."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def _text(most: int) -> StringConstraints:
    return StringConstraints(min_length=1, max_length=most, pattern=r"^[^\x00-\x1f\x7f]+$")


Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
SourceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[a-z]{1,20})?$")]
"""An embedded classifier such as portraits/student, a configured name, or the id of an upload."""
PriorName = Annotated[str, _text(400)]
Count = Annotated[int, BeforeValidator(_no_switch, json_schema_input_type=int)]
Seed = Annotated[int, BeforeValidator(_no_switch, json_schema_input_type=int), Field(ge=0, le=MAX_SEED)]
Number = Annotated[float, BeforeValidator(_no_switch, json_schema_input_type=float)]
TargetIndex = Annotated[int, Field(strict=True, ge=0, le=100_000)]
TargetName = Annotated[str, _text(200)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


# Requests


class AuditRequest(_Request):
    """What to audit, on which data, by which limits."""

    classifier: SourceName = Field(description="one of /v1/classifiers")
    dataset: SourceName | None = Field(None, description="one of /v1/datasets; an embedded classifier brings its own")
    prior: PriorName | None = Field(None, description="one of /v1/priors; without it the one that fits the data")
    teacher: SourceName | None = Field(None, description="a trusted classifier that judges the counterfactuals")
    policy: Policy = Field(default_factory=Policy, description="limits of the verdict")
    k: Count = Field(1, ge=1, le=64, description="counterfactuals per image; the first speaks for the verdict")
    steps: Count | None = Field(None, ge=1, le=1000, description="length of the schedule; without it the recipe's")
    batch: Count = Field(8, ge=1, le=4096, description="images explained at a time")
    seed: Seed = Field(0, description="decides the order of the images")
    runtime: Literal["torch"] = "torch"


class GateRequest(AuditRequest):
    """An audit that a pipeline waits for."""

    wait_seconds: Number = Field(0.0, ge=0, le=600, description="how long to wait for the verdict; 0 only submits")


class CfkdRequest(_Request):
    """A debiasing set of a finished audit, and if asked for the classifier repaired with it."""

    audit: Id = Field(description="an audit of yours that has succeeded")
    include_true: bool = Field(False, description="learn from true counterfactuals too")
    finetune: bool = Field(False, description="repair the classifier that was audited")
    rounds: Count = Field(1, ge=1, le=20, description="most rounds of repair; more than one needs audit_again")
    steps: Count = Field(FinetuneSettings.steps, ge=1, le=100_000, description="fine-tuning steps of each round")
    rate: Number = Field(FinetuneSettings.rate, gt=0, le=1, description="learning rate")
    seed: Seed = 0
    audit_again: bool = Field(False, description="audit the repaired classifier too")
    train: SourceName | None = Field(None, description="data like the classifier's training data")
    test: SourceName | None = Field(None, description="unpoisoned data with a group column")
    group_column: Annotated[str, _text(200)] | None = Field(None, description="column with the confounder")


class ExplainSettings(_Request):
    """How one image is explained."""

    classifier: SourceName = Field(description="one of /v1/classifiers")
    prior: PriorName | None = Field(None, description="one of /v1/priors; without it the closest embedded one")
    target: TargetIndex | TargetName | None = Field(
        None, description="class to reach, by index or name; without it the second most probable"
    )
    k: Count = Field(1, ge=1, le=64, description="counterfactuals, disjoint in their edits")
    steps: Count | None = Field(None, ge=1, le=1000, description="length of the schedule; without it the recipe's")
    seed: Seed = 0
    timeout_seconds: Number = Field(120.0, gt=0, le=600)


class ExplainRequest(ExplainSettings):
    """An image and how it is explained."""

    image: str = Field(description="PNG, JPEG, WebP or BMP in base64", json_schema_extra={"format": "byte"})


class RegisterRequest(_Request):
    """A classifier that the operator has configured, opened and checked."""

    source: SourceName = Field(description="the name in the operator's configuration")


# Answers


class ClassifierEntry(_Answer):
    """A classifier that can be named in requests."""

    id: str
    kind: Literal["embedded", "configured", "uploaded"]
    name: str
    labels: list[str] | None = Field(None, description="known once the classifier was opened")
    size: list[int] | None = Field(None, description="[height, width] of its input")
    sha256: str | None = Field(None, description="of all that decides an answer")
    created: datetime.datetime | None = None


class ClassifierList(_Answer):
    """All classifiers that the caller may name."""

    classifiers: list[ClassifierEntry]


class DatasetEntry(_Answer):
    """A data set that can be named in requests."""

    id: str
    kind: Literal["embedded", "configured", "uploaded"]
    name: str
    created: datetime.datetime | None = None


class DatasetList(_Answer):
    """All data sets that the caller may name."""

    datasets: list[DatasetEntry]


class PriorEntry(_Answer):
    """A generative prior."""

    name: str
    kind: Literal["embedded", "configured"]
    ready: bool = Field(description="whether its files are there")
    loaded: bool = Field(description="whether it is in memory for explanations")


class PriorList(_Answer):
    """All priors that can be named."""

    priors: list[PriorEntry]


class RuntimeEntry(_Answer):
    """What the networks can run on."""

    name: Literal["torch", "onnxruntime", "tensorrt"]
    ready: bool
    version: str | None
    detail: str


class RuntimeList(_Answer):
    """All runtimes, usable here or not."""

    runtimes: list[RuntimeEntry]


class CounterfactualAnswer(_Answer):
    """One counterfactual."""

    model_config = ConfigDict(extra="ignore")

    flipped: bool
    evaluator_flipped: bool = Field(description="whether a second model, which had no part in the search, agrees")
    target_probability: float
    edited_area: float
    escalation: float
    cost: dict[str, float]
    image: str = Field(description="PNG in base64", json_schema_extra={"format": "byte"})
    mask: str = Field(description="where it was edited: PNG in base64", json_schema_extra={"format": "byte"})


class Explanation(_Answer):
    """K counterfactuals of one image."""

    model_config = ConfigDict(extra="ignore")

    format: int
    classifier: str
    prior: str
    source: str
    target: str
    source_probability: float
    original: str = Field(
        description="what the classifier was asked: PNG in base64", json_schema_extra={"format": "byte"}
    )
    counterfactuals: list[CounterfactualAnswer]
    agreement: dict[str, Any]
    seed: int
    recipe: dict[str, Any]
    hashes: dict[str, str]


class ProgressAnswer(_Answer):
    """How far a job is; what is not known is null."""

    stage: str | None = None
    done: int | None = None
    total: int | None = None
    seconds_left: float | None = None


class JobError(_Answer):
    """Why a job failed."""

    code: str
    message: str


class JobAnswer(_Answer):
    """A job's state."""

    id: Id
    kind: Literal["audit", "cfkd"]
    state: Literal["queued", "running", "succeeded", "failed", "cancelled", "interrupted"]
    progress: ProgressAnswer
    error: JobError | None
    cancel_requested: bool
    created: datetime.datetime
    started: datetime.datetime | None
    finished: datetime.datetime | None
    request: dict[str, Any]
    links: dict[str, str] = Field(description="addresses of this job's parts")


class JobList(_Answer):
    """Jobs of the caller, the newest first."""

    jobs: list[JobAnswer]
    next: str | None = Field(description="what to give as `before` for the next page")


class GateAnswer(_Answer):
    """What a pipeline branches on."""

    audit: Id
    state: Literal["queued", "running", "succeeded", "failed", "cancelled", "interrupted"]
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"] | None = Field(description="null until the audit has succeeded")
    exit_code: int | None = Field(description="0 pass, 1 fail, 3 inconclusive, 4 the audit failed; null while it runs")
    headline: str | None
    reasons: list[str]
    error: JobError | None
    progress: ProgressAnswer
    links: dict[str, str]
