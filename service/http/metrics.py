"""What Prometheus is told: queue, latency per stage, flips, device memory.

The numbers are kept here and handed over when asked. BentoML switches its client to counters in files that are merged
over processes, which would count here or there by which was imported first.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
BOUNDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

Figures = Callable[[], Mapping[str, float]]


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        total, found = 0, []
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Metrics(Collector):
    """The service's own figures; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: defaultdict[tuple[str, str, str], Durations] = defaultdict(Durations)
        self._stages: defaultdict[str, Durations] = defaultdict(Durations)
        self._batches = Durations()
        self._batched = 0
        self._counterfactuals = {"flipped": 0, "not_flipped": 0}
        self._figures: dict[str, tuple[str, str, Figures]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        with self._lock:
            self._requests[method, route, str(status)].add(seconds)

    def stage(self, name: str, seconds: float) -> None:
        """A stage of an explanation is over."""
        with self._lock:
            self._stages[name].add(seconds)

    def batch(self, size: int, seconds: float) -> None:
        """A batch left the device."""
        with self._lock:
            self._batches.add(seconds)
            self._batched += size

    def counterfactuals(self, flipped: int, made: int) -> None:
        """Counterfactuals were made."""
        with self._lock:
            self._counterfactuals["flipped"] += flipped
            self._counterfactuals["not_flipped"] += made - flipped

    def figure(self, name: str, text: str, label: str, read: Figures) -> None:
        """Adds a gauge that is read when Prometheus asks, one value per label."""
        self._figures[name] = (text, label, read)

    def text(self) -> str:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        with self._lock:
            yield self._histogram(
                "pfungst_request_seconds", "Requests by route.", ["method", "route", "status"], self._requests.items()
            )
            stages = [((name,), durations) for name, durations in self._stages.items()]
            yield self._histogram("pfungst_stage_seconds", "Stages of explanations.", ["stage"], stages)
            yield self._histogram("pfungst_batch_seconds", "Batches on the device.", [], [((), self._batches)])
            batched = CounterMetricFamily("pfungst_batched_questions", "Questions answered in batches.")
            batched.add_metric([], self._batched)
            made = CounterMetricFamily("pfungst_counterfactuals", "Counterfactuals made.", labels=["outcome"])
            for outcome, count in self._counterfactuals.items():
                made.add_metric([outcome], count)
            yield batched
            yield made
        for name, (text, label, read) in self._figures.items():
            gauge = GaugeMetricFamily(name, text, labels=[label])
            for value, number in read().items():
                gauge.add_metric([value], number)
            yield gauge

    def _histogram(
        self, name: str, text: str, labels: list[str], found: Iterable[tuple[tuple[str, ...], Durations]]
    ) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, durations in found:
            family.add_metric(list(values), durations.buckets, durations.sum)
        return family
