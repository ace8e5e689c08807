"""Metrics of METHOD §3: is a counterfactual valid, adversarial, sparse, realistic, diverse, useful?

Δ is e(x) − e(x_cf) in an encoder e that the caller chooses and every report names. Functions of single
counterfactuals return one number each; `mean_of` and `Rate` sum them up with a confidence interval. A value that does
not exist (the sparsity of no change at all) is NaN, and means leave it out of their n.

Shapes: N images, K counterfactuals of each, D encoder dimensions, A attributes, H W height and width, Y classes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import t as student_t
from torch import Tensor

from engine.errors import InputError
from engine.rate import Rate
from engine.surrogate import query_probabilities

__all__ = [
    "Diversity",
    "GroupAccuracies",
    "Mean",
    "Rate",
    "RegionShares",
    "cd",
    "changed",
    "cout",
    "diversity",
    "edited",
    "edited_area",
    "flip_rate",
    "flipped",
    "frechet_distance",
    "frechet_distance_of_gaussians",
    "fs",
    "fva",
    "gain",
    "group_accuracies",
    "hoyer_sparsity",
    "mean_of",
    "mean_of_few",
    "mnac",
    "na",
    "nafr",
    "region_shares",
    "s3",
    "sparsity",
    "split_frechet_distance",
]

Array = npt.ArrayLike
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

CONFIDENCE = 0.95
EDITED = 0.5 / 255
"""A smaller change of a channel does not survive rounding to eight bits."""


@dataclass(frozen=True)
class Mean:
    """A mean of n values with its 95 % interval; NaN where there is none."""

    value: float
    n: int
    lower: float
    upper: float


def mean_of(values: Array, confidence: float = CONFIDENCE) -> Mean:
    """Mean of all values that are not NaN, with a normal interval; it is unbounded where n < 2."""
    return _mean(values, lambda n: NormalDist().inv_cdf(0.5 + confidence / 2))


def mean_of_few(values: Array, confidence: float = CONFIDENCE) -> Mean:
    """As `mean_of`, with Student's t: the interval of a handful of values, whose spread is hardly known."""
    return _mean(values, lambda n: float(student_t.ppf(0.5 + confidence / 2, n - 1)))


def _mean(values: Array, quantile: Callable[[int], float]) -> Mean:
    data = np.asarray(values, dtype=np.float64).ravel()
    data = data[~np.isnan(data)]
    if len(data) == 0:
        return Mean(math.nan, 0, -math.inf, math.inf)
    value = float(data.mean())
    if len(data) == 1:
        return Mean(value, 1, -math.inf, math.inf)
    half = quantile(len(data)) * float(data.std(ddof=1)) / math.sqrt(len(data))
    return Mean(value, len(data), value - half, value + half)


# Validity --------------------------------------------------------------------------------------------------------


def flipped(prediction_cf: Array, target: Array) -> Bools:
    """[N] whether a counterfactual is given the target class: prediction(x_cf) = y′."""
    prediction, wanted = np.asarray(prediction_cf), np.asarray(target)
    _same_length(prediction, np.broadcast_to(wanted, prediction.shape))
    return np.asarray(prediction == wanted)


def changed(prediction_cf: Array, prediction: Array) -> Bools:
    """[N] whether the class is another than before, the paper's literal reading of a flip."""
    after, before = np.asarray(prediction_cf), np.asarray(prediction)
    _same_length(after, before)
    return np.asarray(after != before)


def flip_rate(f_flipped: Array) -> Rate:
    """Share that f flipped, of all N. To be printed beside NA always."""
    return _rate(_bools(f_flipped))


def nafr(f_flipped: Array, evaluator_flipped: Array) -> Rate:
    """Non-adversarial flip rate: share that f and the evaluator flipped, of all N."""
    f, evaluator = _bools(f_flipped), _bools(evaluator_flipped)
    _same_length(f, evaluator)
    return _rate(f & evaluator)


def na(f_flipped: Array, evaluator_flipped: Array) -> Rate:
    """Non-adversarial rate: share that the evaluator flipped too, of those that f flipped."""
    f, evaluator = _bools(f_flipped), _bools(evaluator_flipped)
    _same_length(f, evaluator)
    return _rate(evaluator[f])


# Sparsity and place ----------------------------------------------------------------------------------------------


def sparsity(delta: Array) -> Floats:
    """1 − mean|Δ| / max|Δ| of each row of [N, D] (paper). Gaussian noise scores 0.714 at D = 128."""
    size = np.abs(_rows(delta))
    return 1 - _divide(size.mean(axis=1), size.max(axis=1))


def hoyer_sparsity(delta: Array) -> Floats:
    """(√D − ‖Δ‖₁/‖Δ‖₂) / (√D − 1) of each row of [N, D]: 0 where all are equal, 1 where one stands alone."""
    rows = _rows(delta)
    if rows.shape[1] < 2:
        raise InputError("Hoyer sparsity needs at least two dimensions")
    root = math.sqrt(rows.shape[1])
    ratio = _divide(np.abs(rows).sum(axis=1), np.linalg.norm(rows, axis=1))
    return (root - ratio) / (root - 1)


def edited(x: Array, x_cf: Array, threshold: float = EDITED) -> Bools:
    """[N, H, W] pixels in which any channel of images [N, C, H, W] moved by more than the threshold."""
    before, after = _images(x), _images(x_cf)
    if before.shape != after.shape:
        raise InputError(f"images and counterfactuals differ in shape: {before.shape} and {after.shape}")
    return np.asarray((np.abs(after - before) > threshold).any(axis=1))


def edited_area(edit: Array) -> Floats:
    """[N] share of the pixels of masks [N, H, W] that are edited."""
    mask = _masks(edit)
    return np.asarray(mask.mean(axis=(1, 2)))


@dataclass(frozen=True)
class RegionShares:
    """Where the edited area lies, [N] each; the four add up to one, or are NaN where nothing was edited."""

    label: Floats
    """In the label's region only."""
    confounder: Floats
    """In the confounder's region only."""
    both: Floats
    elsewhere: Floats


def region_shares(edit: Array, label_region: Array, confounder_region: Array) -> RegionShares:
    """Shares of the edit [N, H, W] (a mask, or weights such as |Δ|) by region masks [N, H, W].

    A channel axis of length one is accepted everywhere.
    """
    weight = _masks(edit)
    label, confounder = _masks(label_region) > 0.5, _masks(confounder_region) > 0.5
    for region in (label, confounder):
        if region.shape != weight.shape:
            raise InputError(f"regions and edits differ in shape: {region.shape} and {weight.shape}")
    total = weight.sum(axis=(1, 2))

    def share(region: Bools) -> Floats:
        return _divide((weight * region).sum(axis=(1, 2)), total)

    return RegionShares(
        label=share(label & ~confounder),
        confounder=share(confounder & ~label),
        both=share(label & confounder),
        elsewhere=share(~label & ~confounder),
    )


# Diversity -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diversity:
    """How different the counterfactuals of an image are, over images with at least one valid pair."""

    absolute: Mean
    """1 − |cos|: opposite changes count as the same direction. Random vectors score 0.93 at D = 128."""
    signed: Mean
    """1 − cos, the paper's formula: opposite changes count as most different."""
    pairs: int


def diversity(delta: Array, valid: Array) -> Diversity:
    """Diversity of Δ [N, K, D] over pairs of which both are valid, [N, K].

    Pairs of one image are averaged first: they are not independent, so n counts images.
    """
    data, keep = np.asarray(delta, dtype=np.float64), _bools(valid)
    if data.ndim != 3 or keep.shape != data.shape[:2]:
        raise InputError(f"diversity takes Δ [N, K, D] and valid [N, K], not {data.shape} and {keep.shape}")
    length = np.linalg.norm(data, axis=2, keepdims=True)
    unit = data / np.where(length > 0, length, 1)
    cosine = np.clip(unit @ unit.transpose(0, 2, 1), -1, 1)
    keep = keep & (length[:, :, 0] > 0)
    upper = np.triu(np.ones((data.shape[1], data.shape[1]), dtype=bool), k=1)
    pairs = keep[:, :, None] & keep[:, None, :] & upper
    count = pairs.sum(axis=(1, 2))

    def per_image(value: Floats) -> Floats:
        return _divide((value * pairs).sum(axis=(1, 2)), count)

    return Diversity(
        absolute=mean_of(per_image(1 - np.abs(cosine))), signed=mean_of(per_image(1 - cosine)), pairs=int(count.sum())
    )


# Gain ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupAccuracies:
    """Accuracy by label × confounder group."""

    groups: dict[tuple[int, int], Rate]
    """(label, confounder) to accuracy, of the groups that have images."""
    aga: Mean
    """Average group accuracy: every group counts the same, however many images it has."""
    worst_group: tuple[int, int]
    missing: tuple[tuple[int, int], ...]
    """Combinations without a single image; an AGA without them is not that of balanced data."""

    @property
    def worst(self) -> Rate:
        """Accuracy of the worst group."""
        return self.groups[self.worst_group]


def group_accuracies(prediction: Array, label: Array, confounder: Array) -> GroupAccuracies:
    """Group accuracies of predictions [N], to be taken on unpoisoned test data.

    The interval of the average combines the groups' Wilson bounds (square-and-add), which stays honest at 0 and 1.
    """
    predicted, labels, confounders = (np.asarray(a).ravel() for a in (prediction, label, confounder))
    _same_length(predicted, labels)
    _same_length(labels, confounders)
    if len(labels) == 0:
        raise InputError("group accuracies need at least one image")
    groups: dict[tuple[int, int], Rate] = {}
    missing = []
    for y in np.unique(labels):
        for c in np.unique(confounders):
            inside = (labels == y) & (confounders == c)
            if inside.any():
                groups[int(y), int(c)] = _rate(predicted[inside] == y)
            else:
                missing.append((int(y), int(c)))
    rates = list(groups.values())
    value = sum(r.value for r in rates) / len(rates)
    down = math.sqrt(sum((r.value - r.lower) ** 2 for r in rates)) / len(rates)
    up = math.sqrt(sum((r.upper - r.value) ** 2 for r in rates)) / len(rates)
    aga = Mean(value, len(labels), max(0.0, value - down), min(1.0, value + up))
    return GroupAccuracies(groups, aga, min(groups, key=lambda g: groups[g].value), tuple(missing))


def gain(aga_before: float, aga_after: float) -> float:
    """(after − before) / (1 − before): share of the error that is gone; NaN where there was none."""
    for value in (aga_before, aga_after):
        if not 0 <= value <= 1:
            raise InputError(f"an accuracy lies between 0 and 1, not at {value}")
    return math.nan if aga_before == 1 else (aga_after - aga_before) / (1 - aga_before)


# Realism ---------------------------------------------------------------------------------------------------------


def frechet_distance_of_gaussians(mean_a: Array, cov_a: Array, mean_b: Array, cov_b: Array) -> float:
    """‖μa − μb‖² + tr(Σa + Σb − 2(Σa Σb)^½).

    The trace of the root is the sum of the singular values of Σa^½ Σb^½: real and stable for singular covariances,
    where the usual matrix root turns complex.
    """
    difference = np.atleast_1d(np.asarray(mean_a, dtype=np.float64) - np.asarray(mean_b, dtype=np.float64))
    a, b = (np.atleast_2d(np.asarray(c, dtype=np.float64)) for c in (cov_a, cov_b))
    if a.shape != b.shape or a.shape != (len(difference), len(difference)):
        raise InputError(f"means and covariances do not fit: {difference.shape}, {a.shape}, {b.shape}")
    root_trace = np.linalg.svd(_psd_root(a) @ _psd_root(b), compute_uv=False).sum()
    return max(0.0, float(difference @ difference + np.trace(a) + np.trace(b) - 2 * root_trace))


def frechet_distance(features_a: Array, features_b: Array) -> float:
    """Fréchet distance (FID-style) between features [N, D] and [M, D] of a stated encoder."""
    a, b = _rows(features_a), _rows(features_b)
    if min(len(a), len(b)) < 2:
        raise InputError("a Fréchet distance needs at least two feature vectors on each side")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("features contain NaN or infinity")
    if a.shape[1] != b.shape[1]:
        raise InputError(f"features have {a.shape[1]} and {b.shape[1]} dimensions")
    return frechet_distance_of_gaussians(a.mean(0), np.cov(a, rowvar=False), b.mean(0), np.cov(b, rowvar=False))


def split_frechet_distance(features: Array, features_cf: Array, seed: int = 0, splits: int = 10) -> Mean:
    """sFID as ACE defines it: counterfactuals of one half against the originals of the other, over random splits.

    Against its own originals a set that changes nothing would score a perfect 0. The interval is the splits' spread,
    not that of the population: they share images.
    """
    x, x_cf = _rows(features), _rows(features_cf)
    _same_length(x, x_cf)
    if len(x) < 4:
        raise InputError("a split Fréchet distance needs at least four pairs")
    rng = np.random.default_rng(seed)
    distances = []
    for _ in range(splits):
        order = rng.permutation(len(x))
        first, second = order[: len(x) // 2], order[len(x) // 2 :]
        distances.append(frechet_distance(x[first], x_cf[second]))
    return mean_of(distances)


# Metrics of other papers -----------------------------------------------------------------------------------------


def mnac(attributes: Array, attributes_cf: Array, threshold: float = 0.5) -> Mean:
    """Mean number of attributes changed, from attribute scores [N, A] before and after."""
    before, after = _rows(attributes) > threshold, _rows(attributes_cf) > threshold
    _same_length(before, after)
    return mean_of((before != after).sum(axis=1))


def cd(attributes: Array, attributes_cf: Array, query: int, dataset_attributes: Array, threshold: float = 0.5) -> float:
    """Correlation difference (DiME): Σ over attributes of |correlation in the data − correlation of the changes|.

    Correlations are with the attribute `query`; in the data [M, A] between the attributes themselves, in the
    counterfactuals between their changes −1, 0, 1. One that does not exist, since nothing varies, counts as 0.
    """
    before, after, data = (_rows(a) > threshold for a in (attributes, attributes_cf, dataset_attributes))
    _same_length(before, after)
    change = after.astype(np.float64) - before
    return float(np.abs(_correlations(data.astype(np.float64), query) - _correlations(change, query)).sum())


def cout(
    query: Callable[[Tensor], Any], x: Tensor, x_cf: Tensor, source: Tensor, target: Tensor, steps: int = 50
) -> Floats:
    """[N] counterfactual transition score in [−1, 1]: area under f's curve for the target minus that for the source.

    The pixels of x [N, 3, H, W] are replaced by those of x_cf in the order of their change, in `steps` equal portions.
    """
    n, _, h, w = x.shape
    if x.shape != x_cf.shape or len(source) != n or len(target) != n:
        raise InputError("COUT takes one counterfactual, source and target per image")
    steps = min(steps, h * w)
    scores = np.empty(n)
    for i in range(n):
        change = (x_cf[i] - x[i]).abs().sum(dim=0).flatten()
        rank = torch.empty(h * w, dtype=torch.int64)
        rank[change.argsort(descending=True, stable=True).cpu()] = torch.arange(h * w)
        replaced = torch.linspace(0, h * w, steps + 1).round().view(-1, 1, 1)
        inserted = (rank.view(1, h, w) < replaced)[:, None].to(x.device)
        p = query_probabilities(query, torch.where(inserted, x_cf[i], x[i])).numpy().astype(np.float64)
        curve = p[:, int(target[i])] - p[:, int(source[i])]
        scores[i] = (curve[1:] + curve[:-1]).mean() / 2
    return scores


def fva(identity: Array, identity_cf: Array, threshold: float = 0.5) -> Rate:
    """Face verification accuracy: share of pairs whose identity features [N, D] have a cosine above the threshold."""
    return _rate(_cosines(identity, identity_cf) > threshold)


def fs(identity: Array, identity_cf: Array) -> Mean:
    """Face similarity: mean cosine of identity features [N, D]."""
    return mean_of(_cosines(identity, identity_cf))


def s3(features: Array, features_cf: Array) -> Mean:
    """SimSiam similarity: mean cosine of features [N, D] of a self-supervised encoder."""
    return mean_of(_cosines(features, features_cf))


# Parts -----------------------------------------------------------------------------------------------------------


def _rate(hits: Bools) -> Rate:
    return Rate.of(int(np.count_nonzero(hits)), int(hits.size), CONFIDENCE)


def _bools(values: Array) -> Bools:
    array = np.asarray(values)
    if array.dtype != np.bool_:
        raise InputError(f"expected true or false for each counterfactual, not {array.dtype}")
    return array


def _rows(values: Array) -> Floats:
    """[N, …] as [N, D] of double precision."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim < 2:
        raise InputError(f"expected [N, D], not {array.shape}")
    return array.reshape(len(array), -1)


def _images(values: Array) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 4:
        raise InputError(f"expected images [N, C, H, W], not {array.shape}")
    return array


def _masks(values: Array) -> Floats:
    """[N, H, W] or [N, 1, H, W] as [N, H, W]."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 4 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 3:
        raise InputError(f"expected masks [N, H, W], not {array.shape}")
    return array


def _same_length(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
    if a.shape != b.shape:
        raise InputError(f"expected arrays of one shape, not {a.shape} and {b.shape}")


def _divide(a: Floats, b: npt.NDArray[Any]) -> Floats:
    """a / b, NaN where b is 0."""
    return np.divide(a, b, out=np.full(a.shape, np.nan), where=b != 0)


def _psd_root(covariance: Floats) -> Floats:
    """Symmetric root of a positive semi-definite matrix; eigenvalues below zero are rounding and count as zero."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    return np.asarray((vectors * np.sqrt(values.clip(min=0))) @ vectors.T)


def _correlations(columns: Floats, query: int) -> Floats:
    """Pearson correlation of every column of [N, A] with one of them, 0 where a column does not vary."""
    centred = columns - columns.mean(axis=0)
    length = np.linalg.norm(centred, axis=0)
    correlation = _divide(centred.T @ centred[:, query], length * length[query])
    return np.nan_to_num(correlation, nan=0.0)


def _cosines(a: Array, b: Array) -> Floats:
    """[N] cosines between the rows of two [N, D]."""
    first, second = _rows(a), _rows(b)
    _same_length(first, second)
    length = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return _divide((first * second).sum(axis=1), length)
