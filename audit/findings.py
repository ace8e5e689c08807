"""What was changed when the classifier flipped: named attributes, named regions, and groups of alike edits.

Attributes and regions name what somebody thought of beforehand. Clusters need no name: edits that move the picture in
the same way lie together, so that a shortcut nobody has a word for still shows as a row of like pictures.

Shapes: N counterfactuals, images [N, 3, H, W], edits [N, 1, H, W] of bool.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor
from torch.nn import functional as F

from engine.rate import Rate

MOVED = 0.5
"""Half of a whole change of the attribute."""
TOUCHED = 0.1
"""Share of a region's area, or of the edit's, that has to be edited."""
MAX_CLUSTERS = 4
MIN_CLUSTER = 4
SIGNATURE_SIZE = 8
EXAMPLES = 6


@dataclass(frozen=True)
class Finding:
    """One thing that the edits have in common."""

    kind: Literal["attribute", "region", "cluster"]
    name: str
    rate: Rate
    """Share of the looked-at counterfactuals in which it occurs."""
    sentence: str
    examples: tuple[int, ...]
    """Indices of counterfactuals that show it best."""


def attribute_findings(shifts: Mapping[str, np.ndarray], looked_at: str = "false counterfactuals") -> list[Finding]:
    """By column, in how many edits it moved by at least half of a whole change; the most frequent first."""
    found = []
    for column, shift in shifts.items():
        moved = np.abs(shift) >= MOVED
        if len(shift) == 0 or not moved.any():
            continue
        rate = Rate.of(int(moved.sum()), len(shift))
        best = np.argsort(-np.abs(shift), kind="stable")[: min(EXAMPLES, int(moved.sum()))]
        sentence = f"{_readable(column)} moved in {rate.value:.0%} of {len(shift)} {looked_at}."
        found.append(Finding("attribute", column, rate, sentence, tuple(int(i) for i in best)))
    return sorted(found, key=lambda finding: -finding.rate.value)


def region_findings(
    edits: Tensor, regions: Mapping[str, Tensor], looked_at: str = "false counterfactuals"
) -> list[Finding]:
    """By named region [N, 1, H, W] in [0, 1], in how many pictures the edit lies there to a tenth or more."""
    weight = edits.float()
    area = weight.sum((1, 2, 3)).clamp(min=1)
    found = []
    for name, region in regions.items():
        share = (weight * region).sum((1, 2, 3)) / area
        touched = share >= TOUCHED
        if not bool(touched.any()):
            continue
        rate = Rate.of(int(touched.sum()), len(touched))
        best = share.argsort(descending=True, stable=True)[: min(EXAMPLES, int(touched.sum()))]
        sentence = (
            f"{_readable(name)} was edited in {rate.value:.0%} of {len(touched)} {looked_at}; "
            f"on average {share.mean():.0%} of the edited area lies there."
        )
        found.append(Finding("region", name, rate, sentence, tuple(best.tolist())))
    return sorted(found, key=lambda finding: -finding.rate.value)


def signatures(x: Tensor, x_cf: Tensor) -> np.ndarray:
    """What an edit does, coarsely and whatever its strength: the signed change on an 8×8 grid, of unit length."""
    change = F.adaptive_avg_pool2d(x_cf - x, SIGNATURE_SIZE).flatten(1).double()
    return (change / change.norm(dim=1, keepdim=True).clamp(min=1e-9)).numpy()


def cluster(points: np.ndarray, seed: int = 0) -> np.ndarray:
    """[N] the cluster of each edit: k-means with the k of the best silhouette, one cluster if none is convincing."""
    n = len(points)
    distinct = len(np.unique(points.round(9), axis=0))
    best, best_score = np.zeros(n, dtype=int), 0.15
    for k in range(2, min(MAX_CLUSTERS, n // MIN_CLUSTER, distinct) + 1):
        _, labels = kmeans2(points, k, seed=seed, minit="++", missing="warn")
        if np.bincount(labels, minlength=k).min() < MIN_CLUSTER:
            continue
        score = silhouette(points, labels)
        if score > best_score:
            best, best_score = labels, score
    order = np.argsort(-np.bincount(best), kind="stable")  # the largest is cluster 0
    return np.argsort(order, kind="stable")[best]


def silhouette(points: np.ndarray, labels: np.ndarray) -> float:
    """Mean of (b - a) / max(a, b): a the mean distance inside a point's cluster, b to the nearest other cluster."""
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    names = np.unique(labels)
    sums = np.stack([distance[:, labels == name].sum(1) for name in names], axis=1)
    sizes = np.array([(labels == name).sum() for name in names])
    own = np.searchsorted(names, labels)
    rows = np.arange(len(points))
    alone = sizes[own] == 1
    a = sums[rows, own] / np.maximum(sizes[own] - 1, 1)
    others = sums / sizes
    others[rows, own] = np.inf
    b = others.min(1)
    return float(np.where(alone, 0.0, (b - a) / np.maximum(np.maximum(a, b), 1e-12)).mean())


def cluster_findings(x: Tensor, x_cf: Tensor, seed: int = 0, looked_at: str = "false counterfactuals") -> list[Finding]:
    """Groups of edits that move the picture alike, the largest first, with the pictures nearest to each centre."""
    if len(x) < MIN_CLUSTER:
        return []
    points = signatures(x, x_cf)
    labels = cluster(points, seed)
    found = []
    for name in range(int(labels.max()) + 1):
        members = np.flatnonzero(labels == name)
        centre = points[members].mean(0)
        near = members[np.argsort(np.linalg.norm(points[members] - centre, axis=1), kind="stable")][:EXAMPLES]
        rate = Rate.of(len(members), len(points))
        where = place(torch.from_numpy(np.abs(points[members]).mean(0)))
        sentence = f"{rate.value:.0%} of {len(points)} {looked_at} change the picture alike, mostly {where}."
        found.append(Finding("cluster", f"group {name + 1}", rate, sentence, tuple(int(i) for i in near)))
    return found


def place(change: Tensor) -> str:
    """In words, where a coarse change [3·8·8] is concentrated."""
    grid = change.view(3, SIGNATURE_SIZE, SIGNATURE_SIZE).sum(0)
    grid = grid / grid.sum().clamp(min=1e-12)
    third = torch.linspace(0, 1, SIGNATURE_SIZE)
    if float(grid.max()) < 3 / SIGNATURE_SIZE**2:
        return "all over"
    row, column = float((grid.sum(1) * third).sum()), float((grid.sum(0) * third).sum())
    vertical = "at the top" if row < 0.4 else "at the bottom" if row > 0.6 else "in the middle"
    horizontal = " left" if column < 0.4 else " right" if column > 0.6 else ""
    return vertical + horizontal


def headline(attributes: Sequence[Finding]) -> str | None:
    """The two most frequent attributes in one sentence, as a person would say it."""
    top = [finding for finding in attributes if finding.rate.value >= 0.3][:2]
    if not top:
        return None
    names = " and ".join(_readable(finding.name) for finding in top)
    return f"{names} moved in {min(finding.rate.value for finding in top):.0%} of false counterfactuals."


def _readable(column: str) -> str:
    words = column.replace("_", " ").strip()
    return words[:1].upper() + words[1:]
