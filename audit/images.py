"""Picture files from strangers: opened within limits, brought to RGB, and refused with one clear sentence.

Shapes: an image is [3, H, W] in [0, 1].
"""

import io
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from engine.errors import ImageError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_BYTES = 64 * 2**20
MAX_PIXELS = 64 * 10**6
MIN_SIDE = 16
MAX_ASPECT = 8


def read_image(file: Path | str) -> Tensor:
    """An image file as RGB: turned as its EXIF says, transparency on white, 16 bits brought to [0, 1]."""
    file = Path(file)
    if not file.is_file():
        raise ImageError(f"{file} is not a file.")
    size = file.stat().st_size
    if size == 0:
        raise ImageError(f"{file} is empty.")
    if size > MAX_BYTES:
        raise ImageError(f"{file} has {size / 2**20:.0f} MiB; images may have at most {MAX_BYTES // 2**20}.")
    return _decoded(file, str(file))


def decode_image(content: bytes, name: str = "The image") -> Tensor:
    """An image in memory, read as `read_image` reads a file."""
    if not content:
        raise ImageError(f"{name} is empty.")
    if len(content) > MAX_BYTES:
        raise ImageError(f"{name} has {len(content) / 2**20:.0f} MiB; images may have at most {MAX_BYTES // 2**20}.")
    return _decoded(io.BytesIO(content), name)


def _decoded(source: Path | io.BytesIO, name: str) -> Tensor:
    try:
        with warnings.catch_warnings():
            # Pillow's own bomb check is a warning; the limits below are ours and are errors.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(source, formats=FORMATS) as picture:
                _check_header(picture, name)
                picture.load()
                return _to_rgb(picture)
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"{name} is not an image in one of the formats {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError:
        raise ImageError(f"{name} has too many pixels; at most {MAX_PIXELS // 10**6} million are read.") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise ImageError(f"{name} is cut short or damaged: {error}.") from None


def _check_header(picture: Image.Image, file: str) -> None:
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise ImageError(f"{file} has {width}x{height} pixels; at most {MAX_PIXELS // 10**6} million are read.")
    if min(width, height) < MIN_SIDE:
        raise ImageError(f"{file} has {width}x{height} pixels; each side needs at least {MIN_SIDE}.")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"{file} has {width}x{height} pixels; no side may be over {MAX_ASPECT} times the other.")
    if getattr(picture, "n_frames", 1) > 1:
        raise ImageError(f"{file} is animated; save one frame of it.")


def _to_rgb(picture: Image.Image) -> Tensor:
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I") or picture.mode == "F":
        grey = np.asarray(picture, dtype=np.float32) / 65535
        return torch.from_numpy(grey).clamp(0, 1).expand(3, -1, -1).clone()
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    array = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def to_square(image: Tensor, size: int) -> Tensor:
    """The centre of an image as [3, size, size], quantised to 8 bits; an image of that size is returned as it is."""
    _, height, width = image.shape
    if (height, width) == (size, size):
        return image
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = image[:, top : top + side, left : left + side]
    resized = F.interpolate(square[None], size=(size, size), mode="bicubic", antialias=True)[0]
    return (resized.clamp(0, 1) * 255).round() / 255


def read_folder(folder: Path | str, size: int, limit: int | None = None) -> Tensor:
    """The images of a folder and its subfolders in the order of their names, as [N, 3, size, size]."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ImageError(f"{folder} is not a folder of images.")
    endings = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in endings)[:limit]
    if not files:
        raise ImageError(f"{folder} holds no image ({', '.join(sorted(endings))}).")
    return torch.stack([to_square(read_image(file), size) for file in files])
