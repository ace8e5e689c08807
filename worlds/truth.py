"""Which factor an edit moved: the ground truth that only a procedural world can give.

Shapes: images [N, 3, H, W] in [0, 1], masks [N, 1, H, W].
"""

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from worlds.world import VISIBLE_CHANGE, World


@dataclass(frozen=True)
class EditShares:
    """Shares of each edited area by factor, [N] each; they add up to one, or are NaN where nothing was edited."""

    label: Tensor
    confounder: Tensor
    elsewhere: Tensor


def edit_shares(world: World, factors: pd.DataFrame, x: Tensor, x_cf: Tensor, edit: Tensor) -> EditShares:
    """Where the edit lies: in the label's region, in the confounder's, or elsewhere.

    A factor's region is what it could change: the confounder by being turned over, the label in one of its ways. Pixels
    in both regions (long hair is hair of some colour; every nucleus is stained by some hospital) go to the factor whose
    change the edit resembles more: the one on which the pixel's colour change has the longer projection.
    """
    size = x.shape[-1]
    by_label, by_confounder = world.label_changes(factors, size), world.change(factors, "confounder", size)
    in_label = torch.stack([_visible(change) for change in by_label]).any(dim=0)
    in_confounder = _visible(by_confounder)
    moved = x_cf - x

    def projection(change: Tensor) -> Tensor:
        length = change.norm(dim=1, keepdim=True).clamp(min=1e-6)
        return (moved * change).sum(1, keepdim=True) / length

    towards_label = torch.stack([projection(change) for change in by_label]).amax(dim=0)
    label = in_label & (~in_confounder | (towards_label >= projection(by_confounder)))
    confounder = in_confounder & ~label
    weight = edit.float()
    total = weight.sum((1, 2, 3))

    def share(region: Tensor) -> Tensor:
        return torch.where(total > 0, (weight * region).sum((1, 2, 3)) / total.clamp(min=1), torch.nan)

    return EditShares(share(label), share(confounder), share(~in_label & ~in_confounder))


def _visible(change: Tensor) -> Tensor:
    return change.abs().amax(1, keepdim=True) > VISIBLE_CHANGE
