"""Picture files from strangers: converted where that is honest, refused with one sentence where it is not."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from audit.images import read_folder, read_image, to_square
from engine.errors import ImageError


def _picture(size: tuple[int, int] = (40, 30), mode: str = "RGB") -> Image.Image:
    ramp = np.linspace(0, 255, size[0] * size[1] * 3).reshape(size[1], size[0], 3).astype(np.uint8)
    return Image.fromarray(ramp).convert(mode)


@pytest.mark.parametrize(
    ("mode", "ending"), [("RGB", "png"), ("L", "png"), ("P", "png"), ("CMYK", "jpg"), ("1", "png")]
)
def test_every_common_mode_becomes_rgb(tmp_path: Path, mode: str, ending: str) -> None:
    file = tmp_path / f"picture.{ending}"
    _picture(mode=mode).save(file)
    image = read_image(file)
    assert image.shape == (3, 30, 40)
    assert image.dtype == torch.float32
    assert 0 <= image.min() <= image.max() <= 1


def test_rgb_comes_back_exactly(tmp_path: Path) -> None:
    _picture().save(tmp_path / "a.png")
    assert torch.equal(
        read_image(tmp_path / "a.png"), torch.from_numpy(np.asarray(_picture()) / np.float32(255)).permute(2, 0, 1)
    )


def test_sixteen_bits_are_scaled_not_cut(tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 20), 32768, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png").mean().item() == pytest.approx(0.5, abs=1e-3)


def test_transparency_lies_on_white(tmp_path: Path) -> None:
    Image.new("RGBA", (20, 20), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert torch.equal(read_image(tmp_path / "clear.png"), torch.ones(3, 20, 20))


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    _picture((40, 30)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").shape == (3, 40, 30)


def _refusals(folder: Path) -> dict[str, tuple[Path, str]]:
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("hello")
    _picture().save(folder / "whole.png")
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")
    (folder / "cut.png").write_bytes((folder / "noise.png").read_bytes()[:1500])
    (folder / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    _picture().save(folder / "scan.tiff")
    _picture((32, 32)).save(folder / "icon.ico")
    _picture().save(folder / "page.pdf")
    _picture((1, 1)).save(folder / "dot.png")
    _picture((2000, 20)).save(folder / "strip.png")
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "moving.webp", save_all=True, append_images=frames[1:])
    header = (folder / "whole.png").read_bytes()
    chunk = b"IHDR" + (60000).to_bytes(4, "big") * 2 + header[24:29]
    (folder / "bomb.png").write_bytes(header[:12] + chunk + zlib.crc32(chunk).to_bytes(4, "big") + header[33:])
    return {
        "nothing": (folder / "nothing.png", "not a file"),
        "empty": (folder / "empty.png", "is empty"),
        "text": (folder / "text.png", "not an image"),
        "cut": (folder / "cut.png", "cut short"),
        "svg": (folder / "drawing.svg", "not an image"),
        "tiff": (folder / "scan.tiff", "not an image"),
        "ico": (folder / "icon.ico", "not an image"),
        "pdf": (folder / "page.pdf", "not an image"),
        "dot": (folder / "dot.png", "at least 16"),
        "strip": (folder / "strip.png", "8 times"),
        "moving": (folder / "moving.webp", "animated"),
        "bomb": (folder / "bomb.png", "pixels"),
    }


@pytest.mark.parametrize(
    "case", ["nothing", "empty", "text", "cut", "svg", "tiff", "ico", "pdf", "dot", "strip", "moving", "bomb"]
)
def test_what_cannot_be_used_is_refused_with_one_sentence(tmp_path: Path, case: str) -> None:
    file, words = _refusals(tmp_path)[case]
    with pytest.raises(ImageError, match=words) as refused:
        read_image(file)
    assert file.name in str(refused.value)


def test_the_centre_square_is_kept() -> None:
    image = torch.zeros(3, 30, 50)
    image[:, :, 10:40] = 1
    assert to_square(image, 30).min() == 1
    assert torch.equal(to_square(image[:, :, :30], 30), image[:, :, :30])
    assert to_square(image, 16).shape == (3, 16, 16)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, grey in (("b.png", 200), ("a.png", 100)):
        Image.new("L", (20, 20), grey).save(tmp_path / name)
    images = read_folder(tmp_path, 20)
    assert torch.allclose(images.mean((1, 2, 3)), torch.tensor([100.0, 200.0]) / 255)
    assert len(read_folder(tmp_path, 20, limit=1)) == 1


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="holds no image"):
        read_folder(tmp_path, 20)
