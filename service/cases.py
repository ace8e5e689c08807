"""What is audited or repaired, and with whose help: from names and paths to the objects that the other rooms work on.

The command line and the workers of the service both come here. A job names its classifier and data set by ids that the
operator's configuration knows; a command names them by path.

    portraits/student, portraits/twin, histology/…    embedded classifiers
    portraits, histology                              embedded data sets, judged by their worlds' oracles
    any other id                                      configured by the operator, or uploaded

Modules of other rooms that load torch are imported inside functions, so that nobody waits for it who only checks a
request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from audit.finetune_settings import FinetuneSettings
from engine.errors import ClassifierError, InputError
from engine.settings import wrong_setting
from service.configuration import EMBEDDED_ROLES, EMBEDDED_WORLDS, ClassifierSource, Configuration, DatasetSource
from service.sources import AUTO

if TYPE_CHECKING:
    from torch import Tensor

    from audit.cfkd import TestData
    from audit.classifier import Classifier, HuggingFaceClassifier
    from audit.dataset import Dataset
    from audit.finetune import Labelled
    from audit.report import Names
    from audit.teachers import Teacher
    from engine.surrogate import SurrogateRecipe
    from service.sources import PriorSource

N_WORLD = 400
N_DISTIL = 2_000
WORLD_SEED = 600_001
N_TEST = 2_000
N_ORIGINALS = 8_000
TEST_SEED = 900_001
ORDINARY_SEED = 900_051
RUNTIMES = ("torch",)
LARGEST_SEED = 2**63 - 1
UPLOAD = re.compile(r"[0-9a-f]{32}")
ENDPOINT_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Case:
    """What is audited, and with whose help."""

    source: PriorSource
    classifier: Classifier
    dataset: Dataset
    teacher: Teacher
    names: Names
    pictures: Tensor
    """To distil the surrogates on."""


def embedded_case(world: str, model: str, *, recipe: Path | None = None) -> Case:
    """An embedded classifier on its world's unpoisoned pictures, judged by the world's oracle."""
    return world_case(_embedded_classifier(world, model), world, recipe=recipe)


def world_case(classifier: Classifier, world: str, *, recipe: Path | None = None, pictures: int = N_DISTIL) -> Case:
    """Any classifier of a world's labels on the world's unpoisoned pictures, judged by the world's oracle."""
    from service.sources import open_source
    from worlds import WORLDS
    from worlds.audited import audited

    source = open_source(world, recipe=recipe, for_audit=True)
    dataset, teacher, names = audited(WORLDS[world], source.prior, N_WORLD, WORLD_SEED)
    return Case(source, classifier, dataset, teacher, names, source.pictures(None, pictures))


def given_case(
    classifier: Classifier,
    data: Path,
    *,
    prior: str = AUTO,
    recipe: Path | None = None,
    revision: str | None = None,
    split: str | None = None,
    label_column: str | None = None,
    teacher: Path | str | None = None,
    verdicts: Path | None = None,
    max_bad_share: float | None = None,
    pictures: int = N_DISTIL,
) -> Case:
    """A classifier and a data set of the user's."""
    from audit.dataset import MAX_BAD_SHARE, open_dataset
    from audit.explain import distillation_pictures
    from audit.teacher_choice import choose_teacher
    from service.sources import closest_embedded, open_source

    patience = MAX_BAD_SHARE if max_bad_share is None else max_bad_share
    read = partial(open_dataset, data, split=split, label_column=label_column, max_bad_share=patience)
    if prior == AUTO:
        prior = closest_embedded(read(size=64).image(0))
    source = open_source(prior, recipe=recipe, revision=revision, for_audit=True)
    dataset = read(size=source.size)
    dataset.check_labels(classifier.labels)  # before a teacher is learned and pictures are made
    judge, names = choose_teacher(source.prior, dataset, classifier.labels, oracle=teacher, verdicts=verdicts)
    return Case(source, classifier, dataset, judge, names, distillation_pictures(dataset, source.prior, pictures))


# Jobs ------------------------------------------------------------------------------------------------------------


class _Request(BaseModel):
    # The HTTP half refuses unknown names where a request comes in; what a later version adds does not stop a worker.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise InputError(wrong_setting(error, "request", type(self))) from None


class AuditRequest(_Request):
    """What an audit job asks for, with every default filled in."""

    classifier: str
    dataset: str | None = None
    """Without one, an embedded classifier is audited on its own world."""
    prior: str | None = None
    teacher: str | None = None
    """A classifier that judges instead of the data set's own teacher."""
    policy: dict[str, Any] = Field(default_factory=dict)
    k: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    batch: int = Field(8, ge=1)
    runtime: str = "torch"

    @classmethod
    def of(cls, request: Mapping[str, Any], configuration: Configuration) -> AuditRequest:
        """A request that this configuration allows; an InputError says what it does not."""
        found = cls(**request)
        classifier = find_classifier(found.classifier, configuration)
        if found.dataset is None:
            if not isinstance(classifier, Embedded):
                raise InputError("The request has to name the data set that this classifier is audited on.")
            found = found.model_copy(update={"dataset": classifier.world})
        embedded = isinstance(find_dataset(str(found.dataset), configuration), str)
        if found.prior == AUTO:
            found = found.model_copy(update={"prior": None})
        if found.prior not in (None, *configuration.priors):
            known = ", ".join(configuration.priors)
            raise InputError(f"The prior {found.prior!r:.80} is unknown; there are: {known}.")
        if embedded and found.prior not in (None, found.dataset):
            raise InputError(f"The data set {found.dataset} goes with the prior {found.dataset} alone.")
        if embedded and found.teacher is not None:
            raise InputError(f"The data set {found.dataset} brings its own teacher; name none.")
        if found.teacher is not None:
            find_classifier(found.teacher, configuration)
        for name in ("k", "batch", "steps"):
            value, most = getattr(found, name), getattr(configuration.limits, name)
            if value is not None and value > most:
                raise InputError(f"The request's {name} is {value}; at most {most} are allowed.")
        if found.runtime not in RUNTIMES:
            raise InputError(f"The runtime {found.runtime!r:.80} is unknown; audits run on: {', '.join(RUNTIMES)}.")
        return found


class CfkdRequest(_Request):
    """What a cfkd job asks for."""

    audit: str
    """Id of the audit job that it learns from."""
    include_true: bool = False
    finetune: bool = False
    """Whether the classifier that was audited is repaired; what follows says how."""
    rounds: int = Field(1, ge=1, le=20)
    steps: int = Field(FinetuneSettings.steps, ge=1)
    rate: float = Field(FinetuneSettings.rate, gt=0, le=1)
    seed: int = Field(0, ge=0, le=2**31 - 1)
    audit_again: bool = False
    """Whether the repaired classifier is audited too; more than one round needs it."""
    train: str | None = None
    """Data set like the classifier's training data; embedded classifiers know their own."""
    test: str | None = None
    """Unpoisoned data set with a group column."""
    group_column: str | None = None

    @classmethod
    def of(cls, request: Mapping[str, Any], configuration: Configuration) -> CfkdRequest:
        """A request that this configuration allows."""
        found = cls(**request)
        if found.steps > configuration.limits.steps:
            raise InputError(
                f"The request's steps are {found.steps}; at most {configuration.limits.steps} are allowed."
            )
        for name in (found.train, found.test):
            if name is not None:
                find_dataset(name, configuration)
        return found


@dataclass(frozen=True)
class Embedded:
    """An embedded classifier's world and role."""

    world: str
    role: str


def find_classifier(id: str, configuration: Configuration) -> Embedded | ClassifierSource:
    """Where a classifier is, by its id: embedded, configured or uploaded."""
    world, slash, role = id.partition("/")
    if slash and world in EMBEDDED_WORLDS and role in EMBEDDED_ROLES:
        return Embedded(world, role)
    if id in configuration.classifiers:
        return configuration.classifiers[id]
    uploaded = _uploaded("classifiers", id, configuration)
    if uploaded is not None:
        return ClassifierSource(path=uploaded)
    raise InputError(f"The classifier {id!r:.80} is unknown; there are: {', '.join(configuration.classifier_ids)}.")


def find_dataset(id: str, configuration: Configuration) -> str | DatasetSource:
    """The name of an embedded world, or where a configured or uploaded data set is."""
    if id in EMBEDDED_WORLDS:
        return id
    if id in configuration.datasets:
        return configuration.datasets[id]
    uploaded = _uploaded("datasets", id, configuration)
    if uploaded is not None:
        return DatasetSource(path=uploaded)
    raise InputError(f"The data set {id!r:.80} is unknown; there are: {', '.join(configuration.dataset_ids)}.")


def classifier_path(id: str, configuration: Configuration) -> Path:
    """The folder or file of a classifier."""
    found = find_classifier(id, configuration)
    if not isinstance(found, Embedded):
        return found.path

    from worlds.store import WEIGHTS

    return WEIGHTS / found.world / found.role


def open_classifier_id(id: str, configuration: Configuration) -> Classifier:
    """The classifier of an id. A remote one has to be at a host of the operator's list, whatever its file says."""
    from audit.sources import open_classifier

    found = find_classifier(id, configuration)
    if isinstance(found, Embedded):
        return _embedded_classifier(found.world, found.role)
    if found.path.suffix.lower() in ENDPOINT_FILES and not configuration.endpoints:
        raise ClassifierError(f"The classifier {id} is remote, and the operator's list of endpoints is empty.")
    return open_classifier(
        found.path,
        **found.stated,
        allowed_hosts=configuration.endpoints,
        allow_private=configuration.private_endpoints,
    )


def job_case(request: AuditRequest, configuration: Configuration, *, max_bad_share: float | None = None) -> Case:
    """The case that an audit job is about."""
    classifier = open_classifier_id(request.classifier, configuration)
    pictures = configuration.surrogate_pictures or N_DISTIL
    found = find_dataset(str(request.dataset), configuration)
    if isinstance(found, str):
        case = world_case(classifier, found, pictures=pictures)
    else:
        case = given_case(
            classifier,
            found.path,
            prior=request.prior or found.prior or AUTO,
            split=found.split,
            label_column=found.label_column,
            teacher=found.teacher if request.teacher is None else classifier_path(request.teacher, configuration),
            max_bad_share=max_bad_share,
            pictures=pictures,
        )
    case.dataset.check_labels(classifier.labels)  # before minutes are spent on surrogates
    return case


def surrogate_recipes(configuration: Configuration) -> tuple[SurrogateRecipe, SurrogateRecipe]:
    """(guide, evaluator) recipes, with as many steps as the configuration says, and as many queries in proportion."""
    from engine.surrogate import EVALUATOR, GUIDE

    def shortened(recipe: SurrogateRecipe) -> SurrogateRecipe:
        steps = configuration.surrogate_steps
        if steps is None:
            return recipe
        return recipe.changed(steps=steps, extra_queries=recipe.extra_queries * steps // recipe.steps)

    return shortened(GUIDE), shortened(EVALUATOR)


# Repair ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RepairCase:
    """The classifier that is repaired, and the data for it."""

    classifier: HuggingFaceClassifier
    source: Path
    originals: Labelled
    ordinary: Labelled
    test: TestData


def embedded_repair(world: str, model: str) -> RepairCase:
    """An embedded classifier with its own training data, and fresh pictures of its world to test on."""
    from audit.cfkd import TestData
    from audit.finetune import Labelled
    from worlds import WORLDS
    from worlds.classifiers import RECIPES
    from worlds.store import WEIGHTS, open_classifier

    found = WORLDS[world]
    recipe = RECIPES[world][model]
    learned = found.poisoned(recipe.images, recipe.seed, recipe.rho)
    ordinary = found.poisoned(N_TEST, ORDINARY_SEED, recipe.rho)
    test = found.sample(N_TEST, TEST_SEED)
    return RepairCase(
        classifier=open_classifier(found, model),
        source=WEIGHTS / world / model,
        originals=Labelled.of(learned.images, learned.labels),
        ordinary=Labelled.of(ordinary.images, ordinary.labels),
        test=TestData(Labelled.of(test.images, test.labels), test.confounders, found.confounders),
    )


def given_repair(
    source: Path, train: DatasetSource, test: DatasetSource, group_column: str, *, size: int, seed: int = 0
) -> RepairCase:
    """A classifier and data sets of the user's, read at the size of the audit's pictures.

    Where originals and counterfactuals came at different sizes, sharpness would tell them apart.
    """
    from audit.cfkd import TestData, ordinary_split
    from audit.classifier import load_classifier
    from audit.dataset import open_dataset

    if not source.is_dir():
        raise InputError(f"{source} is no Hugging Face folder; only such a classifier can be repaired.")
    classifier = load_classifier(source)
    learned = open_dataset(train.path, size=size, split=train.split, label_column=train.label_column)
    tested = open_dataset(test.path, size=size, split=test.split, label_column=test.label_column)
    originals, ordinary = ordinary_split(learned, classifier.labels, N_ORIGINALS, seed)
    measured = TestData.of(tested, classifier.labels, group_column, N_TEST)
    return RepairCase(classifier, source, originals, ordinary, measured)


def job_repair(request: CfkdRequest, classifier: str, size: int, configuration: Configuration) -> RepairCase:
    """The repair that a cfkd job is about; `classifier` is the id that its audit named, `size` its pictures'."""
    found = find_classifier(classifier, configuration)
    if isinstance(found, Embedded):
        if request.train or request.test or request.group_column:
            raise InputError(f"{classifier} is embedded and brings its own data; leave out train, test, group_column.")
        return embedded_repair(found.world, found.role)
    if not (request.train and request.test and request.group_column):
        raise InputError("To repair this classifier, train, test and group_column have to be named.")
    train, test = (find_dataset(id, configuration) for id in (request.train, request.test))
    if isinstance(train, str) or isinstance(test, str):
        raise InputError("Embedded data sets repair embedded classifiers alone; name configured ones.")
    return given_repair(found.path, train, test, request.group_column, size=size, seed=request.seed)


# Inside ----------------------------------------------------------------------------------------------------------


def _embedded_classifier(world: str, role: str) -> Classifier:
    from worlds import WORLDS
    from worlds.store import open_classifier

    return open_classifier(WORLDS[world], role)


def _uploaded(kind: str, id: str, configuration: Configuration) -> Path | None:
    """Where an upload lies; its record, upload.json, names a path inside its own folder."""
    folder = configuration.folder / "uploads" / kind / id
    if not UPLOAD.fullmatch(id):
        return None
    try:
        path = folder / json.loads((folder / "upload.json").read_text(encoding="utf-8"))["path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if path.resolve().is_relative_to(folder.resolve()) else None
