"""Where a counterfactual may differ from its original: Psi, Phase I, Phase II, and the exact composite.

Shapes: B batch, H W image size, h w latent size.
    x0, x           [B, 3, H, W] in [0, 1]
    psi, masks      [B, 1, H, W] or [B, 1, h, w]

A mask m is 1 where the original is **kept**, as in the paper; an edit mask is 1 where the picture changed.
Nothing here mixes samples, so a result does not depend on its batch mates.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# One grey level: a picture that differs by less has no edit, and its residual must not be blown up to 1.
FLOOR = 1.0 / 255.0


def gaussian_blur(x: Tensor, sigma: float) -> Tensor:
    """x blurred by a Gaussian that ends at three standard deviations; borders are repeated."""
    if sigma <= 0:
        return x
    radius = math.ceil(3 * sigma)
    offsets = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    weights = (kernel / kernel.sum()).unbind()
    # Sums of shifted pictures: a convolution's rounding depends on how many samples it is given.
    wide = F.pad(x, (radius, radius, 0, 0), mode="replicate")
    x = sum((w * wide[..., i : i + x.shape[-1]] for i, w in enumerate(weights)), torch.zeros_like(x))
    tall = F.pad(x, (0, 0, radius, radius), mode="replicate")
    return sum((w * tall[..., i : i + x.shape[-2], :] for i, w in enumerate(weights)), torch.zeros_like(x))


def psi(x0: Tensor, x: Tensor, sigma: float) -> Tensor:
    """Psi(x0, x): the blurred channel-mean absolute difference, relative to each sample's largest unblurred one."""
    residual = (x - x0).abs().mean(dim=1, keepdim=True)
    largest = residual.amax(dim=(1, 2, 3), keepdim=True).clamp_min(FLOOR)
    return gaussian_blur(residual, sigma) / largest


def phase_one(residual: Tensor, tau: float) -> Tensor:
    """m_t = 1[Psi < tau]: 1 keeps the original (Phase I, adaptive masking for sparsity)."""
    return (residual < tau).to(residual.dtype)


def exclusion(cumulative: Tensor, edited: Tensor, tau: float) -> Tensor:
    """m_excl: 1 where the k-th counterfactual may still edit (Phase II, cumulative exclusion for diversity).

    A pixel is closed once C = sum of Psi(x_cf, x0) over all earlier counterfactuals reaches tau, and also when any of
    them changed it at all: the first rule is the paper's, the second makes edits disjoint to the pixel. Where C is 0
    nothing was edited, and the pixel stays open even for tau = 0.
    """
    return (((cumulative < tau) | (cumulative <= 0)) & (edited <= 0)).to(cumulative.dtype)


def frozen(m: Tensor, m_excl: Tensor) -> Tensor:
    """m ∪ (1 - m_excl): what Phase I keeps and what Phase II has closed."""
    return torch.maximum(m, 1.0 - m_excl)


def to_latent(m: Tensor, size: tuple[int, int], rule: str = "all") -> Tensor:
    """m on the latent grid: a cell is kept if all its pixels are ("all"), or if its nearest pixel is ("nearest")."""
    if rule == "nearest":
        return F.interpolate(m, size=size, mode="nearest")
    factor = (m.shape[-2] // size[0], m.shape[-1] // size[1])
    return 1.0 - F.max_pool2d(1.0 - m, kernel_size=factor)


def to_pixels(m: Tensor, size: tuple[int, int]) -> Tensor:
    """A latent mask on the pixel grid, each cell as a block."""
    return F.interpolate(m, size=size, mode="nearest")


def grown(edit: Tensor, pixels: int) -> Tensor:
    """An edit mask [B, 1, H, W] of bool with a rim of some pixels around it."""
    return F.max_pool2d(edit.float(), kernel_size=2 * pixels + 1, stride=1, padding=pixels) > 0


def soft_edit(residual: Tensor, kept: Tensor, m_excl: Tensor, tau: float, feather: float) -> Tensor:
    """The weight in [0, 1] with which the decoded picture replaces the original.

    It is 1 where the residual reaches tau outside the kept cells, falls off over a rim of three `feather`, and is
    exactly 0 beyond the rim and wherever an earlier counterfactual has edited.
    """
    return rimmed((1.0 - phase_one(residual, tau)) * (1.0 - kept), feather) * m_excl


def rimmed(support: Tensor, feather: float) -> Tensor:
    """A support of 0 and 1 with a soft rim around it; exactly 0 beyond three `feather`."""
    # Twice the blur is 1 along a straight border of the support, so the rim lies outside and the edit stays whole.
    rim = (2.0 * gaussian_blur(support, feather)).clamp(0.0, 1.0)
    # The far tail changes no grey level, yet would count as edited area.
    rim = torch.where(rim < FLOOR, 0.0, rim)
    return torch.maximum(support, rim)


def rounded(edit: Tensor, sigma: float, threshold: float) -> Tensor:
    """A bool mask that follows an edit [B, 1, H, W] of bool without its islands, holes and teeth.

    It is where the blurred edit reaches the threshold: 0.5 leaves a straight border where it is, less moves it out. A
    sigma of 0 leaves the edit as it is.
    """
    return gaussian_blur(edit.float(), sigma) >= threshold


def faded(region: Tensor, sigma: float) -> Tensor:
    """Weights of a composite that stays inside a region of 0 and 1: 0 at its border, 1 two sigma further inside."""
    return (2.0 * gaussian_blur(region, sigma) - 1.0).clamp(0.0, 1.0) * region


def composite(x0: Tensor, x: Tensor, soft: Tensor) -> Tensor:
    """x blended into x0 by the soft edit mask; where the mask is 0 the pixels of x0 are returned bit for bit."""
    blended = (x0 + soft * (x - x0)).clamp(0.0, 1.0)
    return torch.where(soft > 0, blended, x0)
