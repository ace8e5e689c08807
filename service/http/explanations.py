"""Counterfactuals of single images on the device: what is opened stays open, and the work of one batch.

All of it runs in the device's thread, so nothing here is asked by two at a time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from engine.errors import Cancelled, InputError, PfungstError
from service.cases import N_DISTIL, Embedded, find_classifier, open_classifier_id, surrogate_recipes
from service.configuration import Configuration
from service.http.batching import NobodyWaits
from service.sources import AUTO

if TYPE_CHECKING:
    from torch import Tensor

    from audit.explain import Explainer
    from engine.surrogate import SurrogatePair
    from service.sources import PriorSource

MOST_OPEN = 8
NEEDED = ("audit.answers", "audit.explain", "audit.images", "audit.sources", "worlds.store")

V = TypeVar("V")
Stage = Callable[[str, float], None]
"""Told (name of a stage, seconds)."""


@dataclass(frozen=True)
class Kind:
    """What questions of one batch have in common."""

    classifier: str
    prior: str
    k: int
    steps: int | None


@dataclass(frozen=True)
class Question:
    """One image, and what is asked of it."""

    image: bytes
    target: int | str | None
    seed: int


class Shelf(Generic[V]):
    """The most recently used values by key."""

    def __init__(self, most: int = MOST_OPEN) -> None:
        self.most = most
        self._values: OrderedDict[Any, V] = OrderedDict()

    def get(self, key: Any, make: Callable[[], V]) -> V:
        """The value of a key, made where it is not there."""
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > self.most:
            self._values.popitem(last=False)
        return self._values[key]

    def drop(self, wanted: Callable[[Any], bool]) -> None:
        """Forgets the keys that are wanted gone."""
        for key in [key for key in list(self._values) if wanted(key)]:
            self._values.pop(key, None)

    def __contains__(self, key: Any) -> bool:
        return key in self._values


class Explanations:
    """Answers questions; holds priors, classifiers and surrogates that were used last."""

    def __init__(self, configuration: Configuration, stage: Stage | None = None) -> None:
        self.configuration = configuration
        self.stage = stage
        self.priors: Shelf[PriorSource] = Shelf()
        self._surrogates: Shelf[tuple[Any, SurrogatePair]] = Shelf()

    def forget(self, classifier: str) -> None:
        """A classifier was deleted."""
        self._surrogates.drop(lambda key: key[0] == classifier)

    def prepare(self) -> None:
        """Imports what explanations need, before anybody is served: an import holds Python for a quarter of a second at
        a time, and the first question would keep every other request waiting for it."""
        for name in NEEDED:
            import_module(name)

    def __call__(
        self, kind: Kind, questions: Sequence[Question], cancel: NobodyWaits
    ) -> Sequence[dict[str, Any] | Exception]:
        """Answers to questions of one kind, in their order; what is wrong with one image is the answer to it alone."""
        from audit.answers import answer, explain_together, target_index
        from audit.images import to_square

        answers: dict[int, dict[str, Any] | Exception] = {}
        images: dict[str, dict[int, Tensor]] = {}
        for i, question in enumerate(questions):
            with _own_fault(answers, i), self._timed("decode"):
                image = self._decoded(question)
                images.setdefault(self._prior_of(kind, image), {})[i] = image
        for prior, group in images.items():
            explainer = self._explainer(kind, prior, cancel)
            size = self.priors.get(prior, lambda name=prior: self._open_prior(name)).size  # type: ignore[misc]
            ready: dict[int, tuple[Tensor, int]] = {}
            for i, image in group.items():
                with _own_fault(answers, i), self._timed("target"):
                    square = to_square(image, size)
                    ready[i] = square, target_index(explainer, square, questions[i].target)
            if not ready:
                continue
            with self._timed("counterfactuals"):
                found = explain_together(
                    explainer,
                    [image for image, _ in ready.values()],
                    [target for _, target in ready.values()],
                    [questions[i].seed for i in ready],
                    cancel=cancel,
                )
            with self._timed("encode"):
                for i, one in zip(ready, found, strict=True):
                    answers[i] = answer(explainer, one) | {"classifier": kind.classifier, "prior": prior}
        return [answers[i] for i in range(len(questions))]

    def _decoded(self, question: Question) -> Tensor:
        from audit.images import decode_image

        return decode_image(question.image)

    def _prior_of(self, kind: Kind, image: Tensor) -> str:
        """The prior that was named, else that of an embedded classifier's world, else the closest embedded one."""
        from service.sources import closest_embedded

        if kind.prior != AUTO:
            return kind.prior
        found = find_classifier(kind.classifier, self.configuration)
        prior = found.world if isinstance(found, Embedded) else closest_embedded(image)
        if prior not in self.configuration.priors:
            raise InputError(f"The prior {prior} is not among those that the operator allows.")
        return prior

    def _open_prior(self, name: str) -> PriorSource:
        from service.sources import open_source

        with self._timed("open"):
            return open_source(name)

    def _explainer(self, kind: Kind, prior: str, cancel: NobodyWaits) -> Explainer:
        from audit.explain import Explainer

        source = self.priors.get(prior, lambda: self._open_prior(prior))
        classifier, surrogates = self._surrogates.get(
            (kind.classifier, prior), lambda: self._prepared(kind.classifier, source, cancel)
        )
        changes: dict[str, Any] = {"k": kind.k} | ({} if kind.steps is None else {"steps": kind.steps})
        return Explainer(source.prior, classifier, surrogates, source.recipe.changed(**changes))

    def _prepared(self, id: str, source: PriorSource, cancel: NobodyWaits) -> tuple[Any, SurrogatePair]:
        """A classifier and its surrogates, distilled now if no audit did so before: minutes, but they can be left."""
        from audit.explain import distil_pair

        with self._timed("open"):
            classifier = open_classifier_id(id, self.configuration)
        guide, evaluator = surrogate_recipes(self.configuration)
        with self._timed("distil"):
            pictures = source.pictures(None, self.configuration.surrogate_pictures or N_DISTIL)
            surrogates = distil_pair(
                classifier,
                pictures,
                self.configuration.cache_folder,
                guide=guide,
                evaluator=evaluator,
                cancel=cancel,
            )
        return classifier, surrogates

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.stage is not None:
                self.stage(name, time.perf_counter() - start)


@contextmanager
def _own_fault(answers: dict[int, dict[str, Any] | Exception], i: int) -> Iterator[None]:
    """A refusal inside is the answer to question i; the others go on."""
    try:
        yield
    except Cancelled:
        raise
    except PfungstError as error:
        answers[i] = error


def flips(found: dict[str, Any]) -> tuple[int, int]:
    """(flipped, all) counterfactuals of an answer."""
    return sum(bool(one["flipped"]) for one in found["counterfactuals"]), len(found["counterfactuals"])
