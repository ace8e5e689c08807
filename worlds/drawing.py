"""Drawing with signed distance fields in batched torch, at any resolution.

Shapes: every field is [B, H, W] over a canvas that spans [-1, 1] in x (to the right) and y (downwards); a factor
column is [B, 1, 1]. A signed distance is negative inside. Colours are tuples of three broadcastable tensors.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

Colour = tuple[Tensor, Tensor, Tensor]


def grid(size: int) -> tuple[Tensor, Tensor]:
    """Pixel-centre coordinates of a square canvas, each [1, H, W]."""
    axis = (torch.arange(size, dtype=torch.float32) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return x[None], y[None]


def rotate(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates in a frame turned by `angle` (radians)."""
    cos, sin = torch.cos(angle), torch.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def ellipse(x: Tensor, y: Tensor, rx: Tensor | float, ry: Tensor | float) -> Tensor:
    """Distance to an ellipse around the origin, exact on the outline and to first order near it."""
    k0 = torch.sqrt((x / rx) ** 2 + (y / ry) ** 2 + 1e-9)
    k1 = torch.sqrt((x / (rx * rx)) ** 2 + (y / (ry * ry)) ** 2 + 1e-9)
    return k0 * (k0 - 1) / k1


def segment(x: Tensor, y: Tensor, ax: Tensor, ay: Tensor, bx: Tensor, by: Tensor) -> Tensor:
    """Distance to the line segment from a to b; subtract a radius for a capsule."""
    dx, dy = bx - ax, by - ay
    along = (((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy + 1e-9)).clamp(0, 1)
    return torch.sqrt((x - ax - along * dx) ** 2 + (y - ay - along * dy) ** 2 + 1e-9)


def smooth_union(a: Tensor, b: Tensor, radius: float) -> Tensor:
    """Union of two shapes whose joint is rounded by `radius`."""
    h = (0.5 + 0.5 * (b - a) / radius).clamp(0, 1)
    return b + (a - b) * h - radius * h * (1 - h)


def coverage(distance: Tensor, size: int, softness: float = 1.5) -> Tensor:
    """Share of each pixel that a shape covers, with an edge `softness` pixels wide (at 64 px and above)."""
    width = softness * 2 / size
    return (0.5 - distance / width).clamp(0, 1)


def hashed(seed: Tensor, index: int | Tensor) -> Tensor:
    """Uniform numbers in [0, 1) that depend only on integer seeds and indices, alike on every machine."""
    mask = 0xFFFFFFFF
    h = (seed * 0x9E3779B1 + (torch.as_tensor(index, dtype=torch.int64) + 1) * 0x85EBCA77) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = ((h ^ (h >> shift)) * factor) & mask
    h = h ^ (h >> 16)
    return (h.to(torch.float64) / 2**32).to(torch.float32)


def waves(x: Tensor, y: Tensor, seed: Tensor, octaves: list[tuple[float, int]], index: int = 0) -> Tensor:
    """Smooth noise of roughly unit variance: for each (frequency, count), `count` plane waves of that frequency."""
    total = torch.zeros_like(x + y + seed[..., :1, :1].float() * 0)
    terms = 0
    for frequency, count in octaves:
        for _ in range(count):
            angle = hashed(seed, index) * 2 * math.pi
            phase = hashed(seed, index + 1) * 2 * math.pi
            rate = frequency * (0.7 + 0.6 * hashed(seed, index + 2))
            total = total + torch.sin(rate * (torch.cos(angle) * x + torch.sin(angle) * y) + phase)
            index += 3
            terms += 1
    return total * math.sqrt(2 / terms)


def hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Colour:
    """RGB of a hue in turns, saturation and value, each in [0, 1]."""

    def channel(offset: float) -> Tensor:
        k = (offset + hue * 6) % 6
        return value - value * saturation * torch.minimum(k, 4 - k).clamp(0, 1)

    return channel(5.0), channel(3.0), channel(1.0)


def mix(a: Colour, b: Colour, share: Tensor) -> Colour:
    """Colour `a` moved towards `b` by `share`."""
    return (a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share, a[2] + (b[2] - a[2]) * share)


def shade(colour: Colour, factor: Tensor) -> Colour:
    """Colour with all channels multiplied by `factor`."""
    return colour[0] * factor, colour[1] * factor, colour[2] * factor


@dataclass
class Canvas:
    """A picture in the making: paint goes on top, and each named part keeps the share of the pixel it still shows."""

    red: Tensor
    green: Tensor
    blue: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)

    def paint(self, colour: Colour, alpha: Tensor, part: str | None = None) -> None:
        """Covers the picture with `colour` where `alpha` is 1; hides what lies below from its part masks."""
        self.red = self.red + (colour[0] - self.red) * alpha
        self.green = self.green + (colour[1] - self.green) * alpha
        self.blue = self.blue + (colour[2] - self.blue) * alpha
        for name in self.parts:
            self.parts[name] = self.parts[name] * (1 - alpha)
        if part is not None:
            self.parts[part] = self.parts.get(part, torch.zeros_like(alpha)) + alpha

    def tint(self, gains: Colour) -> None:
        """Multiplies the channels by gains."""
        self.red, self.green, self.blue = self.red * gains[0], self.green * gains[1], self.blue * gains[2]

    def image(self) -> Tensor:
        """The picture as [B, 3, H, W] in [0, 1]."""
        return torch.stack([self.red, self.green, self.blue], dim=1).clamp(0, 1)
