"""Pictures that are not what they should be: each refused before anything reaches the device, or converted."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from audit.images import decode_image
from audit.pictures import save_png, to_pil
from tests.service.http.conftest import Service, base64_of, png


def bomb_header(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")


def animated() -> bytes:
    stream = io.BytesIO()
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    frames[0].save(stream, "PNG", save_all=True, append_images=frames[1:])
    return stream.getvalue()


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64"/>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n"
BAD = {
    "empty": b"",
    "text": b"hello",
    "truncated PNG": png()[:60],
    "PNG without its end": png((200, 200))[:-30],
    "truncated JPEG": png((200, 200), "JPEG")[:400],
    "SVG": SVG,
    "EPS": EPS,
    "PDF": b"%PDF-1.7\n",
    "TIFF": png(kind="TIFF"),
    "ICO": png(kind="ICO"),
    "GIF": png(kind="GIF"),
    "60000 squared": bomb_header(60_000, 60_000),
    "144 megapixels": bomb_header(12_000, 12_000),
    "over the configured pixels": bomb_header(2_100, 2_000),
    "1x1": png((1, 1)),
    "1x100000": bomb_header(1, 100_000),
    "animated": animated(),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_bad_picture_is_refused_in_json_and_in_a_form(service: Service, content: bytes) -> None:
    body = {"classifier": "portraits/student", "image": base64_of(content)}
    service.refuses(422, "bad_image", "POST", "/v1/explain", json=body, field="image")
    form: Any = {"files": {"image": ("a.png", content)}, "data": {"settings": '{"classifier": "portraits/student"}'}}
    service.refuses(422, "bad_image", "POST", "/v1/explain/upload", field="image", **form)


def test_a_picture_of_another_type_than_declared_is_refused(service: Service) -> None:
    form: Any = {"data": {"settings": '{"classifier": "portraits/student"}'}}
    sent = {"image": ("a.png", png(kind="JPEG"), "image/png")}
    service.refuses(422, "bad_image", "POST", "/v1/explain/upload", files=sent, field="image", **form)
    sent = {"image": ("a.txt", png(), "image/png")}
    assert service.client.post("/v1/explain/upload", files=sent, **form).status_code == 200


def test_too_many_bytes_are_refused(service: Service) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "PNG")
    body = {"classifier": "portraits/student", "image": base64_of(stream.getvalue())}
    assert len(stream.getvalue()) > service.backend.configuration.limits.image_bytes
    service.refuses(413, "too_large", "POST", "/v1/explain", json=body, field="image")


@pytest.mark.parametrize(
    "content",
    [
        png(kind="JPEG", mode="CMYK"),
        png(mode="I;16"),
        png(mode="LA"),
        png(mode="RGBA"),
        png(mode="P", transparency=0),
        png(mode="1"),
        png(kind="WEBP"),
        png(kind="BMP"),
    ],
)
def test_other_modes_are_converted(service: Service, content: bytes) -> None:
    body = {"classifier": "portraits/student", "image": base64_of(content)}
    assert service.client.post("/v1/explain", json=body).status_code == 200
    image = decode_image(service.explained[-1][1][0].image)
    assert tuple(image.shape) == (3, 64, 64)
    assert 0 <= float(image.min()) <= float(image.max()) <= 1


def test_colours_survive_the_conversion() -> None:
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    stream = io.BytesIO()
    ink.save(stream, "JPEG", quality=100)
    assert decode_image(stream.getvalue()).mean((1, 2)).tolist() == pytest.approx([1, 0, 0], abs=0.03)
    painted = Image.new("P", (16, 16))
    painted.putpalette([255, 0, 0, 0, 0, 255])
    painted.paste(1, (8, 0, 16, 16))
    stream = io.BytesIO()
    painted.save(stream, "PNG", transparency=0)
    image = decode_image(stream.getvalue())
    assert image[:, 0, 0].tolist() == [1, 1, 1], "what is transparent lies on white"
    assert image[:, 0, 15].tolist() == [0, 0, 1]


def test_exif_rotation_is_applied_and_stripped(service: Service, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    exif[0x010E] = "who took it"
    picture = Image.new("RGB", (64, 32), "white")
    picture.paste("black", (0, 0, 32, 32))
    stream = io.BytesIO()
    picture.save(stream, "PNG", exif=exif)
    image = decode_image(stream.getvalue())
    assert tuple(image.shape) == (3, 64, 32)
    assert float(image[:, :32].mean()) < 0.01 < 0.99 < float(image[:, 32:].mean())
    file = tmp_path / "handed-out.png"
    save_png(to_pil(image), file)
    assert b"who took it" not in file.read_bytes()
    assert not Image.open(file).getexif()
    body = {"classifier": "portraits/student", "image": base64_of(stream.getvalue())}
    answer = service.client.post("/v1/explain", json=body)
    assert answer.status_code == 200
    assert "who took it" not in answer.text
