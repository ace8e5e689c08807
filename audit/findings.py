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

LABEL = "label"
"""The column that a false counterfactual leaves as it was: what other columns are compared with."""
MOVED = 0.2
"""A fifth of a whole change of the attribute: a small edit changes a part, the beard but not the length of the hair."""
TOUCHED = 0.1
"""Share of a region's area, or of the edit's, that has to be edited."""
NOTABLE = 0.3
"""Least share of counterfactuals in which something named in the headline occurs."""
MUCH_MORE = {"attribute": 2.0, "region": 1.5}
"""How many times as much as its comparison something named in the headline moved; half a picture cannot have 2."""
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
    lift: float | None = None
    """How many times as far as the label an attribute moved, how many times as much as its size a region was edited;
    None where there is nothing to compare with."""

    @property
    def notable(self) -> bool:
        """Whether it occurs often, and more than its comparison explains."""
        return self.rate.value >= NOTABLE and (self.lift is None or self.lift >= MUCH_MORE[self.kind])


def attribute_findings(shifts: Mapping[str, np.ndarray], looked_at: str = "false counterfactuals") -> list[Finding]:
    """By column, in how many edits it moved by a fifth of a whole change or more; the farthest moved first.

    A shift is read by a probe, which answers a little to every edit. The column "label" says how much that little is:
    the real label of a false counterfactual is the one thing known not to have changed. It is no finding of its own; an
    edit counts for another column only if that moved farther than the label, and for the label if it is the other way.
    """
    label = None if LABEL not in shifts else np.abs(shifts[LABEL])
    found: list[tuple[float, Finding]] = []
    for column, shift in shifts.items():
        far = np.abs(shift)
        moved = far >= MOVED if label is None else (far >= MOVED) & (far > label)
        if column == LABEL or not moved.any():
            continue
        lead = far if label is None else far - label
        rate, distance = Rate.of(int(moved.sum()), len(far)), float(far.mean())
        best = np.argsort(-lead, kind="stable")[: min(EXAMPLES, int(moved.sum()))]
        compared, lift = "", None
        if label is not None:
            compared = f", the label itself in {_percent(float(((label >= MOVED) & (label >= far)).mean()))}"
            lift = distance / max(float(label.mean()), 1e-6)
        sentence = f"{_readable(column)} moved in {_percent(rate.value)} of {len(far)} {looked_at}{compared}."
        found.append((distance, Finding("attribute", column, rate, sentence, tuple(map(int, best)), lift)))
    return [finding for _, finding in sorted(found, key=lambda pair: -pair[0])]


def region_findings(
    edits: Tensor, regions: Mapping[str, Tensor], looked_at: str = "false counterfactuals"
) -> list[Finding]:
    """By named region [N, 1, H, W] in [0, 1], how much of the edits lies there; most for its size first.

    A large region is edited often whatever the classifier looks at, so its share of the edits is compared with its
    share of the picture. It has to hold a tenth of an edit for that edit to count in its rate.
    """
    weight = edits.float()
    area = weight.sum((1, 2, 3)).clamp(min=1)
    found = []
    for name, region in regions.items():
        share = (weight * region).sum((1, 2, 3)) / area
        touched = share >= TOUCHED
        if not bool(touched.any()):
            continue
        rate, base = Rate.of(int(touched.sum()), len(touched)), float(region.float().mean())
        lift = float(share.mean()) / max(base, 1e-6)
        best = share.argsort(descending=True, stable=True)[: min(EXAMPLES, int(touched.sum()))]
        sentence = (
            f"{_readable(name)}: {_percent(float(share.mean()))} of the edited area lies there, {lift:.1f} times its "
            f"share of the picture ({_percent(base)}); touched in {_percent(rate.value)} of {len(touched)} {looked_at}."
        )
        found.append(Finding("region", name, rate, sentence, tuple(best.tolist()), lift))
    return sorted(found, key=lambda finding: -(finding.lift or 0.0))


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
        sentence = f"{_percent(rate.value)} of {len(points)} {looked_at} change the picture alike, mostly {where}."
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


def headline(findings: Sequence[Finding]) -> tuple[str, str] | None:
    """(what the classifier leans on, the sentence that says how that is known), or None where nothing stands out.

    Attributes come before regions: what moved says more than where. Of several, the one that moved farthest.
    """
    for kind in ("attribute", "region"):
        for finding in findings:
            if finding.kind == kind and finding.notable:
                name = finding.name.replace("_", " ").strip()
                return (name if kind == "attribute" else f"something in the region {name!r}"), finding.sentence
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _readable(column: str) -> str:
    words = column.replace("_", " ").strip()
    return words[:1].upper() + words[1:]
