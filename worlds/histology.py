"""Histology: tumour or normal tissue in H&E-like patches, confounded with the hospital they come from.

The label is the nuclei: few, small, round and even (normal, 0) against crowded, large, irregular ones with nucleoli
(tumour, 1). The confounder is the hospital: stain hue, brightness and the sharpness of its scanner. It mirrors
Camelyon17 poisoned with the hospital of origin. Light passes two stains as Beer and Lambert say: I = exp(−Σ c·od).
"""

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from worlds.drawing import coverage, ellipse, grid, hashed, rotate, waves
from worlds.world import World

CELLS = 6
"""Nuclei are candidates on a jittered grid of CELLS × CELLS places; a density decides which of them exist."""
SPACING = 2.3 / CELLS
REACH = 0.31 * SPACING + 0.34
"""Jitter plus the longest half-axis of a nucleus plus the strongest warp."""

# Optical density of the two stains in red, green and blue, for either hospital.
HAEMATOXYLIN = torch.tensor([[0.72, 0.66, 0.30], [0.46, 0.78, 0.22]])
EOSIN = torch.tensor([[0.10, 0.62, 0.28], [0.05, 0.50, 0.52]])
BRIGHTNESS = torch.tensor([0.97, 0.88])
BLUR = torch.tensor([0.10, 0.75])


class Histology(World):
    """Stained tissue from jittered nuclei over fibrous stroma."""

    name = "histology"
    labels = ("normal", "tumour")
    confounders = ("hospital A", "hospital B")
    confounder_name = "hospital"
    label_region = "nuclei"

    def nuisances(self, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        def uniform(low: float, high: float) -> np.ndarray:
            return rng.uniform(low, high, n)

        return {
            "tissue_seed": rng.integers(0, 2**31, n),
            "density": uniform(0, 1),
            "nucleus_size": uniform(0, 1),
            "irregularity": uniform(0, 1),
            "fibre_angle": uniform(0, math.pi),
            "fibre_strength": uniform(0.3, 1),
            "eosin": uniform(0.30, 0.55),
            "haematoxylin": uniform(0.85, 1.2),
            "gap_x": uniform(-1.3, 1.3),
            "gap_y": uniform(-1.3, 1.3),
            "gap_size": uniform(0.05, 0.45),
            "exposure": uniform(0.96, 1.03),
            "warmth": uniform(-0.025, 0.025),
        }

    def draw(self, column: dict[str, Tensor], size: int) -> tuple[Tensor, dict[str, Tensor]]:
        c = column
        x, y = grid(size)
        seed = c["tissue_seed"]
        tumour = c["label"].float()

        # Stroma: eosin in fibres along one direction; a gap where the slide shows through.
        along, across = rotate(x, y, c["fibre_angle"])
        fibres = waves(0.25 * along, across, seed, [(9.0, 3), (16.0, 2)])
        clouds = waves(x, y, seed, [(3.0, 3)], index=20)
        eosin = c["eosin"] * (1 + c["fibre_strength"] * 0.16 * fibres + 0.14 * clouds)
        wobble = 0.10 * waves(x, y, seed, [(5.0, 2)], index=40)
        gap = coverage(ellipse(x - c["gap_x"], y - c["gap_y"], c["gap_size"], c["gap_size"]) + wobble, size, 3.0)
        eosin = eosin * (1 - 0.9 * gap)

        nuclei, chromatin, nucleoli = self._nuclei(c, x, y, tumour, size)
        haematoxylin = c["haematoxylin"] * chromatin + 0.05 * (1 - gap)
        eosin = eosin * (1 - 0.6 * nuclei)

        hospital = c["confounder"][:, 0, 0]
        density = (
            haematoxylin[:, None] * HAEMATOXYLIN[hospital][:, :, None, None]
            + eosin[:, None] * EOSIN[hospital][:, :, None, None]
        )
        light = (c["exposure"] * BRIGHTNESS[hospital][:, None, None])[:, None]
        warm = torch.cat([1 + c["warmth"], torch.ones_like(c["warmth"]), 1 - c["warmth"]], dim=1)[..., None]
        image = (light * warm * torch.exp(-density)).clamp(0, 1)
        share = BLUR[hospital][:, None, None, None]
        image = image + share * (_blur(image, 0.016 * size) - image)
        parts = {
            "nuclei": nuclei,
            "nucleoli": nucleoli,
            "gap": gap * (1 - nuclei),
            "stroma": (1 - gap) * (1 - nuclei),
        }
        return image, parts

    def label_changes(self, factors: pd.DataFrame, size: int | None = None) -> list[Tensor]:
        """Turning the label over changes the nuclei that are there; but they may come and go anywhere in the tissue.

        So any pixel may turn to nucleus or to bare stroma as well, stained as its own hospital does.
        """
        here = self.render(factors, size).images
        crowded = self.intervene(factors, label=0, density=3.0, nucleus_size=6.0)
        bare = self.intervene(factors, density=-3.0)
        return [
            *super().label_changes(factors, size),
            *(self.render(other, size).images - here for other in (crowded, bare)),
        ]

    def _nuclei(
        self, c: dict[str, Tensor], x: Tensor, y: Tensor, tumour: Tensor, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Coverage of all nuclei, their haematoxylin, and coverage of the nucleoli."""
        seed = c["tissue_seed"]
        # Irregular outlines: space itself is warped, more so in tumour.
        rough = (0.006 + 0.006 * c["irregularity"]) + tumour * (0.020 + 0.016 * c["irregularity"])
        wx = x + rough * waves(x, y, seed, [(13.0, 3)], index=100)
        wy = y + rough * waves(x, y, seed, [(13.0, 3)], index=120)
        # Density alone does not tell the classes apart: inflamed normal tissue is crowded too.
        share = 0.40 + 0.34 * c["density"] + 0.12 * tumour
        base = 0.082 + 0.020 * c["nucleus_size"] + tumour * (0.036 + 0.020 * c["nucleus_size"])
        spread = 0.10 + 0.22 * tumour
        covered = torch.zeros_like(wx)
        stained = torch.zeros_like(wx)
        nucleoli = torch.zeros_like(wx)
        for cell in range(CELLS * CELLS):
            row, place = divmod(cell, CELLS)
            u = [hashed(seed, 1000 + 10 * cell + k) for k in range(8)]
            present = (u[0] < share).float()
            cx = -1.15 + SPACING * (place + 0.5 + 0.62 * (u[1] - 0.5))
            cy = -1.15 + SPACING * (row + 0.5 + 0.62 * (u[2] - 0.5))
            radius = base * (1 + spread * (2 * u[3] - 1))
            stretch = 1 + (0.18 + 0.30 * tumour) * u[4]
            # Only a window around the place can be touched; drawing there alone is five times faster.
            rows, columns = _window(row, size), _window(place, size)
            dx, dy = rotate(wx[:, rows, columns] - cx, wy[:, rows, columns] - cy, u[5] * math.pi)
            here = coverage(ellipse(dx, dy, radius * stretch, radius / stretch), size, 1.8) * present
            # Even and dark when normal; paler inside with a dark rim and a nucleolus when tumour.
            inner = 1 - ((dx / (radius * stretch)) ** 2 + (dy * stretch / radius) ** 2).clamp(0, 1)
            tone = (0.95 + 0.25 * u[6]) * (1 - 0.30 * tumour * inner)
            spot = coverage(ellipse(dx - 0.3 * radius * (u[7] - 0.5), dy, 0.30 * radius, 0.30 * radius), size, 2.0)
            spot = spot * tumour * present
            stained[:, rows, columns] += (tone + 0.45 * spot - stained[:, rows, columns]) * here
            nucleoli[:, rows, columns] += (spot - nucleoli[:, rows, columns]) * here
            covered[:, rows, columns] += (1 - covered[:, rows, columns]) * here
        grain = 1 + 0.07 * waves(wx, wy, seed, [(26.0, 3)], index=140)
        return covered, stained * grain, nucleoli


def _window(place: int, size: int) -> slice:
    """Pixels along one axis that a nucleus of grid place `place` can reach."""
    centre = -1.15 + SPACING * (place + 0.5)
    low, high = centre - REACH, centre + REACH
    return slice(max(0, math.floor((low + 1) / 2 * size)), min(size, math.ceil((high + 1) / 2 * size)))


def _blur(image: Tensor, sigma: float) -> Tensor:
    """Gaussian blur with reflected borders; sigma in pixels."""
    reach = max(1, math.ceil(3 * sigma))
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float32)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = (kernel / kernel.sum()).expand(3, 1, -1)
    image = F.pad(image, (reach, reach, reach, reach), mode="reflect")
    image = F.conv2d(image, kernel[:, :, None, :], groups=3)
    return F.conv2d(image, kernel[:, :, :, None], groups=3)
