"""Tensors as pictures people look at: rows of images on one sheet, difference heat maps, PNG files.

Shapes: an image is [3, H, W] in [0, 1]; a row is [N, 3, H, W].
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.writing import replacing

GAP = 2


def to_pil(image: Tensor) -> Image.Image:
    """An 8-bit RGB picture of one image."""
    array = image.detach().clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(np.ascontiguousarray(array))


def sheet(rows: Sequence[Tensor], zoom: int = 1) -> Image.Image:
    """Rows of images under each other, with thin white gaps; every row has as many images as the first."""
    if not rows:
        raise ValueError("a sheet needs at least one row")
    columns = rows[0].shape[0]
    height, width = rows[0].shape[2:]
    canvas = torch.ones(3, len(rows) * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    for i, row in enumerate(rows):
        for j in range(columns):
            top, left = i * (height + GAP), j * (width + GAP)
            canvas[:, top : top + height, left : left + width] = row[j].detach().clamp(0, 1)
    picture = to_pil(canvas)
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST)


def heat_map(x: Tensor, x_cf: Tensor) -> Tensor:
    """Where two images [N, 3, H, W] differ: the grey original with the change in red, scaled by each pair's maximum."""
    change = (x_cf - x).abs().mean(1, keepdim=True)
    peak = change.amax((2, 3), keepdim=True).clamp(min=1 / 255)
    heat = (change / peak).sqrt()
    grey = 0.75 * x.mean(1, keepdim=True).expand_as(x) + 0.25
    red = torch.tensor([0.85, 0.10, 0.05]).view(1, 3, 1, 1).to(x)
    return grey * (1 - heat) + red * heat


def save_png(picture: Image.Image, file: Path) -> None:
    """Writes a PNG under a temporary name, then renames it."""
    with replacing(file) as partial:
        picture.save(partial, format="PNG", optimize=True)


def data_uri(picture: Image.Image) -> str:
    """A picture as text for the `src` of an HTML image, so that a page needs no second file."""
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
