"""Portraits: blond or dark hair, confounded with male- or female-coded presentation.

The label is the colour of the hair on the head and nothing else: brows and beard have tones of their own. The
confounder is presentation: beard, short hair, heavy brows and bare lips (male-coded, 0) against no beard, long hair,
thin brows and red lips (female-coded, 1). It mirrors CelebA-Blond poisoned with gender.
"""

import math

import numpy as np
import torch
from torch import Tensor

from worlds.drawing import (
    Canvas,
    Colour,
    coverage,
    ellipse,
    grid,
    hashed,
    hsv,
    mix,
    rotate,
    segment,
    shade,
    smooth_union,
    waves,
)
from worlds.world import World


def _rgb(red: float, green: float, blue: float) -> Colour:
    return torch.tensor(red), torch.tensor(green), torch.tensor(blue)


PALE, DEEP = _rgb(0.96, 0.80, 0.70), _rgb(0.47, 0.30, 0.21)
BLOND_LIGHT, BLOND_DEEP = _rgb(0.96, 0.85, 0.55), _rgb(0.83, 0.65, 0.30)
DARK_LIGHT, DARK_DEEP = _rgb(0.31, 0.18, 0.11), _rgb(0.09, 0.07, 0.07)
BROW, BEARD = _rgb(0.20, 0.13, 0.10), _rgb(0.33, 0.21, 0.15)
BROWN_EYE, BLUE_EYE = _rgb(0.33, 0.20, 0.10), _rgb(0.28, 0.52, 0.80)
LIPSTICK, EYE_WHITE, INK = _rgb(0.80, 0.14, 0.22), _rgb(0.96, 0.96, 0.95), _rgb(0.08, 0.06, 0.06)


class Portraits(World):
    """Faces from signed distance fields."""

    name = "portraits"
    labels = ("dark", "blond")
    confounders = ("male-coded", "female-coded")
    confounder_name = "presentation"
    label_region = "hair colour"

    def nuisances(self, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        def uniform(low: float, high: float) -> np.ndarray:
            return rng.uniform(low, high, n)

        return {
            "hair_tone": uniform(0, 1),
            "hair_parting": uniform(-1, 1),
            "hair_fringe": uniform(0, 1),
            "hair_length": uniform(0, 1),
            "hair_seed": rng.integers(0, 2**31, n),
            "beard_fullness": uniform(0, 1),
            "skin": rng.beta(1.2, 1.2, n),
            "eye_blue": rng.integers(0, 2, n).astype(np.float64),
            "smile": uniform(-0.6, 1),
            "x": uniform(-0.16, 0.16),
            "y": uniform(-0.10, 0.10),
            "roll": uniform(-0.22, 0.22),
            "yaw": uniform(-1, 1),
            "scale": uniform(1.08, 1.32),
            "jaw": uniform(0, 1),
            "background_hue": uniform(0, 1),
            "background_saturation": uniform(0.1, 0.5),
            "background_value": uniform(0.35, 0.8),
            "background_tilt": uniform(0, 2 * math.pi),
            "clothes_hue": uniform(0, 1),
            "clothes_saturation": uniform(0.2, 0.8),
            "clothes_value": uniform(0.3, 0.8),
            "neckline": uniform(0, 1),
            "light_angle": uniform(0, 2 * math.pi),
            "light": uniform(0.05, 0.22),
            "exposure": uniform(0.88, 1.1),
            "warmth": uniform(-0.08, 0.08),
        }

    def draw(self, column: dict[str, Tensor], size: int) -> tuple[Tensor, dict[str, Tensor]]:
        c = column
        x, y = grid(size)
        male = (c["confounder"] == 0).float()
        female = 1 - male

        # Head frame: (u, v) turns and scales with the head; (fu, v) also follows the gaze to the side.
        u, v = rotate(x - c["x"], y - c["y"] + 0.04, c["roll"])
        u, v = u / c["scale"], v / c["scale"]
        fu = u - 0.055 * c["yaw"]

        skin = mix(PALE, DEEP, c["skin"])
        canvas = self._background(c, x, y)
        strands = self._strands(c, u, v)
        hair = mix(
            mix(DARK_LIGHT, DARK_DEEP, c["hair_tone"]),
            mix(BLOND_LIGHT, BLOND_DEEP, c["hair_tone"]),
            c["label"].float(),
        )
        hair = shade(hair, strands)

        # Behind the head: long hair, then neck and clothes, then the locks that fall over the shoulders.
        reach = 0.46 + 0.22 * c["hair_length"]
        crown = ellipse(u, v + 0.08, 0.50, 0.54)
        fall = ellipse(u, v - 0.10, 0.50 + 0.05 * c["hair_length"], reach)
        long_hair = smooth_union(crown, fall, 0.12)
        canvas.paint(shade(hair, torch.tensor(0.82)), coverage(long_hair, size) * female, "hair")
        neck = torch.maximum((u.abs() - 0.165).expand_as(v), (v - 0.95).abs() - 0.75)
        canvas.paint(shade(skin, torch.tensor(0.78)), coverage(neck, size), "skin")
        self._clothes(canvas, c, x, y, skin, size)
        locks = torch.maximum(long_hair, 0.27 + 0.05 * (v - 0.4) - u.abs())
        locks = torch.maximum(locks, 0.16 - v)
        canvas.paint(hair, coverage(locks, size) * female, "hair")

        # Head with ears; the jaw narrows the lower half.
        taper = 1 - (0.10 + 0.14 * c["jaw"] - 0.05 * male) * (v.clamp(min=0) / 0.5) ** 2
        head = ellipse(u / taper, v, 0.385, 0.50)
        ears = ellipse(u.abs() - 0.395, v - 0.02, 0.06, 0.10)
        canvas.paint(shade(skin, torch.tensor(0.90)), coverage(ears, size), "skin")
        light = 1 + c["light"] * (torch.cos(c["light_angle"]) * u + torch.sin(c["light_angle"]) * v) * 1.6
        rim = 1 - 0.16 * ((u / 0.385) ** 2 + (v / 0.50) ** 2).clamp(0, 1) ** 2
        face = shade(skin, light * rim)
        cheeks = torch.exp(-(((fu.abs() - 0.21) / 0.09) ** 2) - (((v - 0.13) / 0.07) ** 2))
        face = mix(face, shade(_rgb(0.88, 0.42, 0.38), 1 - 0.45 * c["skin"]), 0.22 * cheeks)
        canvas.paint(face, coverage(head, size), "skin")

        self._beard(canvas, c, fu, v, head, male, light, size)
        self._eyes(canvas, c, fu, v, male, skin, size)
        self._nose_and_mouth(canvas, c, fu, v, female, skin, size)

        # Hair on top: the crown of the head above a hairline that is parted and runs down the temples.
        part = 0.20 * c["hair_parting"]
        temple = (u.abs() - 0.27).clamp(min=0)
        hairline = (
            -0.33
            + 0.10 * c["hair_fringe"]
            + 0.28 * ((u - part).abs() - 0.06).clamp(min=0)
            + temple * (1.2 * male + 2.6 * female)
        )
        cap_outer = ellipse(u, v + 0.05, 0.425 + 0.04 * female, 0.505 + 0.03 * female)
        cap = torch.maximum(torch.maximum(cap_outer, v - hairline), v - (0.02 * male + 0.36 * female))
        canvas.paint(hair, coverage(cap, size), "hair")

        room_light = c["exposure"] * (1 + 0.5 * c["light"] * (torch.cos(c["light_angle"]) * x))
        canvas.tint((room_light * (1 + c["warmth"]), room_light, room_light * (1 - c["warmth"])))
        return canvas.image(), canvas.parts

    def _background(self, c: dict[str, Tensor], x: Tensor, y: Tensor) -> Canvas:
        wall = hsv(c["background_hue"], c["background_saturation"], c["background_value"])
        slope = 1 + 0.16 * (torch.cos(c["background_tilt"]) * x + torch.sin(c["background_tilt"]) * y)
        red, green, blue = (channel * slope for channel in wall)
        return Canvas(red, green, blue, {"background": torch.ones_like(red)})

    def _strands(self, c: dict[str, Tensor], u: Tensor, v: Tensor) -> Tensor:
        """Lightness of the hair: strands that run from the parting outwards, and a band of shine."""
        angle = torch.atan2(u - 0.20 * c["hair_parting"], v + 1.0)
        wobble = 0.25 * waves(u, v, c["hair_seed"], [(4.0, 2)])
        phase = hashed(c["hair_seed"], 50) * 2 * math.pi
        stripes = torch.sin(angle * 26 + phase + wobble) + 0.5 * torch.sin(angle * 47 + 2 * phase)
        shine = torch.exp(-(((torch.sqrt(u**2 + v**2) - 0.43) / 0.06) ** 2)) * (v < 0.1)
        return 1 + 0.09 * stripes + 0.12 * shine

    def _clothes(self, canvas: Canvas, c: dict[str, Tensor], x: Tensor, y: Tensor, skin: Colour, size: int) -> None:
        cloth = hsv(c["clothes_hue"], c["clothes_saturation"], c["clothes_value"])
        sx = x - 0.7 * c["x"]
        shoulders = ellipse(sx, y - 1.18 - 0.5 * c["y"], 0.80, 0.52)
        fold = 1 + 0.10 * torch.cos(sx * 5.0) - 0.10 * (y - 0.8)
        canvas.paint(shade(cloth, fold), coverage(shoulders, size), "clothes")
        opening = ellipse(sx, y - 0.66 - 0.5 * c["y"], 0.20, 0.07 + 0.16 * c["neckline"])
        bare = torch.maximum(opening, shoulders)
        canvas.paint(shade(skin, torch.tensor(0.86)), coverage(bare, size), "skin")

    def _beard(
        self,
        canvas: Canvas,
        c: dict[str, Tensor],
        fu: Tensor,
        v: Tensor,
        head: Tensor,
        male: Tensor,
        light: Tensor,
        size: int,
    ) -> None:
        full = c["beard_fullness"]
        # Below a line that rises towards the ears, inside the jaw, open around the mouth; a moustache above it.
        line = 0.25 - 0.05 * full - 0.9 * (fu.abs() - 0.17).clamp(min=0)
        jaw = torch.maximum(head - 0.012, line - v)
        mouth = ellipse(fu, v - 0.275, 0.125, 0.048)
        beard = torch.maximum(jaw, -mouth)
        left = segment(fu.abs(), v, torch.tensor(0.02), torch.tensor(0.195), torch.tensor(0.13), torch.tensor(0.235))
        beard = smooth_union(beard, left - (0.026 + 0.012 * full), 0.04)
        grain = 1 + 0.10 * waves(fu, v, c["hair_seed"], [(22.0, 3)], index=20)
        tone = shade(BEARD, light * grain)
        canvas.paint(tone, coverage(beard, size, 2.5) * male * (0.72 + 0.25 * full), "beard")

    def _eyes(
        self, canvas: Canvas, c: dict[str, Tensor], fu: Tensor, v: Tensor, male: Tensor, skin: Colour, size: int
    ) -> None:
        side = fu.abs() - 0.165
        gaze = torch.sign(fu) * side - 0.018 * c["yaw"]
        ev = v + 0.045
        lids = ellipse(side, ev, 0.088, 0.058)
        canvas.paint(shade(skin, torch.tensor(0.62)), coverage(lids, size), "eyes")
        white = ellipse(side, ev - 0.006, 0.076, 0.043)
        canvas.paint(EYE_WHITE, coverage(white, size), "eyes")
        iris_colour = mix(BROWN_EYE, BLUE_EYE, c["eye_blue"])
        iris = torch.maximum(ellipse(gaze, ev - 0.004, 0.040, 0.040), white)
        canvas.paint(iris_colour, coverage(iris, size), "eyes")
        pupil = torch.maximum(ellipse(gaze, ev - 0.004, 0.018, 0.018), white)
        canvas.paint(INK, coverage(pupil, size), "eyes")
        bend = 0.155 + 0.018 * (side / 0.08) ** 2 * -1
        thickness = 0.017 + 0.016 * male
        brow = segment(side, v + bend, torch.tensor(-0.075), torch.tensor(0.0), torch.tensor(0.085), torch.tensor(0.0))
        canvas.paint(BROW, coverage(brow - thickness, size) * (0.75 + 0.2 * male), "brows")

    def _nose_and_mouth(
        self, canvas: Canvas, c: dict[str, Tensor], fu: Tensor, v: Tensor, female: Tensor, skin: Colour, size: int
    ) -> None:
        nu = fu - 0.02 * c["yaw"]
        ridge = (
            torch.exp(-(((nu - 0.022) / 0.026) ** 2)) * ((v + 0.06) / 0.1).clamp(0, 1) * ((0.16 - v) / 0.04).clamp(0, 1)
        )
        canvas.paint(shade(skin, torch.tensor(0.72)), 0.45 * ridge, "skin")
        tip = ellipse(nu, v - 0.145, 0.058, 0.024)
        canvas.paint(shade(skin, torch.tensor(0.70)), 0.75 * coverage(tip, size), "skin")
        curve = 0.045 * c["smile"] * ((fu / 0.13) ** 2 - 0.5)
        mv = v - 0.275 + curve
        width = 0.115 + 0.02 * c["smile"]
        lips = segment(fu, mv, -width, torch.zeros_like(width), width, torch.zeros_like(width))
        bare = shade(mix(skin, _rgb(0.62, 0.30, 0.28), torch.tensor(0.45)), torch.tensor(0.88))
        canvas.paint(mix(bare, LIPSTICK, 0.92 * female), coverage(lips - 0.021 - 0.010 * female, size), "lips")
        canvas.paint(
            shade(mix(bare, LIPSTICK, 0.6 * female), torch.tensor(0.55)), 0.7 * coverage(lips - 0.005, size), "lips"
        )
