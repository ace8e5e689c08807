"""The part of an edit that the flip needs: everything else is given back to the original.

A walk to noise and back changes more than the classifier asked for: an eye turns blue, a collar moves. Phase I cannot
tell such changes from the cause, because it sees only how large they are. The guide can: its gradient times the change,
averaged along the line from the original to the counterfactual, says how much each pixel did for the flip. The least
useful pixels are given back, as many as possible while classifier and guide both still give the target with the margin.

Shapes: B batch, H W image size.
    x0, x_cf     [B, 3, H, W] in [0, 1]
    soft         [B, 1, H, W] the weights of the composite
    y            [B] target classes
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.guidance import Model
from engine.masks import gaussian_blur, rimmed, rounded

SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9)
"""Shares of the edited area that are tried; the whole edit is what remains if none is enough."""
POINTS = (0.25, 0.5, 0.75, 1.0)


def relevance(guide: Model, x0: Tensor, x_cf: Tensor, y: Tensor, blur: float) -> Tensor:
    """[B, 1, H, W] how much each pixel's change did for the target's lead in the guide; below 0 it did harm."""
    change = x_cf - x0
    total = torch.zeros_like(x0)
    for point in POINTS:
        with torch.enable_grad():
            x = (x0 + point * change).requires_grad_(True)
            logits = guide(x)
            others = logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)
            ahead = logits.gather(1, y[:, None])[:, 0] - others
            (gradient,) = torch.autograd.grad(ahead.sum(), x)
        total += gradient
    return gaussian_blur((total * change).sum(1, keepdim=True) / len(POINTS), blur)


def part(soft: Tensor, order: Tensor, share: Tensor, feather: float, outline: float = 0.0) -> Tensor:
    """The weights of an edit cut down to a share [B] of its area: the pixels of the lowest `order`, with a soft rim.

    `outline` smooths the border that the order makes; the area is a little more or less then.
    """
    area = (soft > 0).sum((1, 2, 3))
    best = (order < (share * area).ceil().view(-1, 1, 1, 1)) & (soft > 0)
    support = (rounded(best, outline, 0.5) & (soft > 0)).to(soft.dtype)
    return torch.minimum(soft, rimmed(support, feather))


def ranks(values: Tensor, where: Tensor) -> Tensor:
    """[B, 1, H, W] the place of each pixel among those in `where`, the largest value first; all others come after."""
    flat = torch.where(where, values, -torch.inf).flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(1, order, torch.arange(flat.shape[1], device=flat.device).expand_as(order))
    return place.view_as(values)


def smallest(enough: Callable[[Tensor], Tensor], count: int, batch: int, device: torch.device) -> Tensor:
    """[B] the first of `count` growing choices that is enough, found by bisection; `count` where none is.

    `enough` takes choices [B] and says [B] whether each is enough; it is asked at most log2(count) + 1 times.
    """
    low = torch.zeros(batch, dtype=torch.long, device=device)
    high = torch.full_like(low, count)
    while bool((low < high).any()):
        middle = (low + high) // 2
        good = enough(middle.clamp(max=count - 1))
        open_ = low < high
        high = torch.where(open_ & good, middle, high)
        low = torch.where(open_ & ~good, middle + 1, low)
    return high
