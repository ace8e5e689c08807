"""Bodies that are too large, broken, doubled or something else: none gets further than the door or the parser."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.audit import test_onnx_classifier as onnx
from tests.service.http.conftest import Service, base64_of, envelope_of, png, zip_of

JSON = {"Content-Type": "application/json"}
AUDIT = {"classifier": "portraits/student"}


def test_a_body_over_the_limit_is_refused_with_its_length_stated(service: Service) -> None:
    service.refuses(413, "too_large", "POST", "/v1/audits", content=b" " * 200_001, headers=JSON)


def test_a_body_over_the_limit_is_refused_without_its_length(service: Service) -> None:
    sent = []

    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            sent.append(1)
            yield b" " * 10_000

    service.refuses(413, "too_large", "POST", "/v1/audits", content=endless(), headers=JSON)


def test_an_upload_over_the_limit_is_refused(service: Service) -> None:
    for address in ("/v1/classifiers/upload", "/v1/datasets/upload"):
        files = {"file": ("a.zip", b"PK" + bytes(6_100_000))}
        service.refuses(413, "too_large", "POST", address, files=files)
        parts = (bytes(500_000) for _ in range(40))
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        service.refuses(413, "too_large", "POST", address, content=parts, headers=headers)


@pytest.mark.parametrize("length", ["-1", "1e3", "²", "9" * 30])
def test_a_stated_length_that_is_no_number_is_refused(service: Service, length: str) -> None:
    status, code = (413, "too_large") if length.isascii() and length.isdigit() else (400, "bad_request")
    headers = [("content-type", b"application/json"), ("content-length", length.encode())]
    service.refuses(status, code, "POST", "/v1/audits", content=b"{}", headers=headers)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid"),
        (b"{", "bad_json"),
        (b"\xff\xfe{}", "bad_json"),
        (b'{"classifier": "portraits/student", "k": NaN}', "bad_json"),
        (b'{"classifier": "portraits/student", "k": -Infinity}', "bad_json"),
        (b'{"classifier": "portraits/student", "classifier": "portraits/twin"}', "duplicate_field"),
        (b'{"policy": {"limit": 0.1, "limit": 0.9}, "classifier": "portraits/student"}', "duplicate_field"),
        (b"[" * 40 + b"]" * 40, "bad_json"),
        (b"[" * 50_000 + b"]" * 50_000, "bad_json"),
        (b'{"a":' * 30_000, "bad_json"),
        (b"[]", "invalid"),
        (b"null", "invalid"),
        (b'"text"', "invalid"),
        (b"9" * 5_000, "bad_json"),
        (b'{"classifier": "portraits/student", "unknown": 1}', "invalid"),
        (b'{"classifier": "portraits/student", "policy": {"unknown": 1}}', "bad_input"),
    ],
)
def test_bad_json_is_refused(service: Service, content: bytes, code: str) -> None:
    status = 422 if code in ("invalid", "bad_input") else 400
    service.refuses(status, code, "POST", "/v1/audits", content=content, headers=JSON)


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/octet-stream",
        "application/vnd.bentoml+pickle",
        "application/x-python-pickle",
        "application/json; charset=utf-16",
        "",
    ],
)
def test_another_content_type_is_refused(service: Service, kind: str) -> None:
    content = b'{"classifier": "portraits/student"}'
    service.refuses(415, "wrong_content_type", "POST", "/v1/audits", content=content, headers={"Content-Type": kind})
    body = {"classifier": "portraits/student", "image": base64_of(png())}
    service.refuses(415, "wrong_content_type", "POST", "/v1/explain/upload", json=body)


def multipart(*parts: bytes, boundary: bytes = b"x") -> dict[str, Any]:
    content = b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"
    return {"content": content, "headers": {"Content-Type": "multipart/form-data; boundary=x"}}


def part(name: str, content: bytes, file: str | None = None) -> bytes:
    named = f'; filename="{file}"' if file is not None else ""
    return f'Content-Disposition: form-data; name="{name}"{named}'.encode() + b"\r\n\r\n" + content


SETTINGS = b'{"classifier": "portraits/student"}'


def test_a_whole_form_is_taken(service: Service) -> None:
    sent = multipart(part("image", png(), "a.png"), part("settings", SETTINGS))
    assert service.client.post("/v1/explain/upload", **sent).status_code == 200


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (multipart(part("image", png(), "a.png"), part("settings", SETTINGS), boundary=b"other"), 400, "bad_form"),
        (
            {"content": b"--x\r\nnonsense", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
            422,
            "invalid",
        ),
        ({"content": b"--x--\r\n", "headers": {"Content-Type": "multipart/form-data"}}, 400, "bad_form"),
        (
            multipart(part("image", png(), "a.png"), part("settings", SETTINGS), part("settings", SETTINGS)),
            422,
            "duplicate_field",
        ),
        (
            multipart(part("image", png(), "a.png"), part("image", png(), "b.png"), part("settings", SETTINGS)),
            422,
            "duplicate_field",
        ),
        (multipart(part("image", png(), "a.png"), part("settings", SETTINGS), part("unknown", b"1")), 422, "invalid"),
        (
            multipart(part("image", png(), "a.png"), part("settings", b'{"classifier": 1, "classifier": 2}')),
            422,
            "bad_json",
        ),
        (multipart(part("image", png(), "a.png"), part("settings", b"[" * 5000)), 422, "bad_json"),
        (multipart(part("image", png(), "a.png"), part("settings", b'{"unknown": 1}')), 422, "invalid"),
        (multipart(part("image", png(), "a.png"), part("settings", b" " * 70_000)), 400, "bad_form"),
        (multipart(*(part(f"f{i}", b"1") for i in range(40))), 400, "bad_form"),
        (multipart(part("settings", SETTINGS)), 422, "invalid"),
        (multipart(part("image", b"https://example.org/a.png"), part("settings", SETTINGS)), 422, "invalid"),
    ],
)
def test_a_broken_form_is_refused(service: Service, request_: dict[str, Any], status: int, code: str) -> None:
    service.refuses(status, code, "POST", "/v1/explain/upload", **request_)


@pytest.fixture
def uploads(tmp_path: Path) -> dict[str, tuple[str, bytes, bytes]]:
    """By address: the field of the file, a file that is taken there, and the part that goes with it."""
    faces = {"manifest.csv": b"image,label\na.png,dark\nb.png,blond\n", "a.png": png(), "b.png": png()}
    model = onnx.save(tmp_path / "model.onnx").read_bytes()
    return {
        "/v1/explain/upload": ("image", png(), part("settings", SETTINGS)),
        "/v1/classifiers/upload": ("file", model, part("settings", json.dumps(onnx.SETTINGS).encode())),
        "/v1/datasets/upload": ("file", zip_of(faces), part("name", b"faces")),
    }


Uploads = dict[str, tuple[str, bytes, bytes]]


def test_a_file_with_a_plain_name_is_taken_by_every_upload(service: Service, uploads: Uploads) -> None:
    for name in ("a.png", "caf\u00e9 (1).zip", "n" * 255):
        for address, (field, content, other) in uploads.items():
            answer = service.client.post(address, **multipart(part(field, content, name), other))
            assert answer.status_code == (200 if field == "image" else 201), answer.text


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        *(
            (name, "The file's name has to be one plain name without folders.")
            for name in ("../b.png", "../../etc/passwd", "/etc/passwd", "a/b.png", "..\\b.png", "..", ".", "a\0b.png")
        ),
        ("a\x1b.png", "The file's name has to be one plain name without folders."),
        ("http://127.0.0.1:9/a.png", "The file's name has to be one plain name without folders."),
        ("n" * 300, "The file needs a name of 1 to 255 bytes."),
        ("\u00e9" * 128, "The file needs a name of 1 to 255 bytes."),
        ("", "The file needs a name of 1 to 255 bytes."),
    ],
)
def test_a_files_name_is_one_plain_name(service: Service, uploads: Uploads, name: str, sentence: str) -> None:
    for address, (field, content, other) in uploads.items():
        sent = multipart(part(field, content, name), other)
        assert service.refuses(422, "bad_name", "POST", address, field=field, **sent) == sentence


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is opened and no name is looked up."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_sockets")
@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:9/a.png", "file:///etc/passwd", "data:image/png;base64,AAAA", "s3://a/b"]
)
def test_an_address_is_not_fetched(service: Service, text: str) -> None:
    body = {"classifier": "portraits/student", "image": text}
    service.refuses(422, "bad_base64", "POST", "/v1/explain", json=body, field="image")
    service.refuses(422, "invalid", "POST", "/v1/classifiers", json={"source": text}, field="source")


@pytest.mark.usefixtures("no_sockets")
def test_an_address_in_place_of_a_file_is_not_fetched(service: Service, uploads: Uploads, tmp_path: Path) -> None:
    """The file:// addresses are of files that would be taken if they were read."""
    wrong = {"image": "bad_image", "/v1/classifiers/upload": "bad_model", "/v1/datasets/upload": "bad_archive"}
    for address, (field, content, other) in uploads.items():
        (tmp_path / "good").write_bytes(content)
        for text in (
            "http://127.0.0.1:9/a.png",
            "https://example.org/a.zip",
            f"file://{tmp_path}/good",
            str(tmp_path / "good"),
            "file:///etc/passwd",
            f"data:application/octet-stream;base64,{base64_of(content)}",
        ):
            as_field = multipart(part(field, text.encode()), other)
            message = service.refuses(422, "invalid", "POST", address, field=field, **as_field)
            assert message == f"{field} has to be sent as a file, not as text; an address is not fetched."
            as_file = multipart(part(field, text.encode(), "a.png"), other)
            service.refuses(422, wrong.get(field) or wrong[address], "POST", address, **as_file)


@pytest.mark.parametrize("text", ["%%%%", "QUJD\n", "QUJD ", "QUI", "QR==", "QUJD====", "Ä", "-_-_"])
def test_base64_is_strict(service: Service, text: str) -> None:
    body = {"classifier": "portraits/student", "image": text}
    service.refuses(422, "bad_base64", "POST", "/v1/explain", json=body, field="image")


@pytest.mark.parametrize(
    "address", ["/", "/nothing", "/v1", "/v1/", "/v1/audits/", "/docs", "/docs.json", "/schema.json"]
)
def test_unknown_addresses_are_told_in_the_envelope(service: Service, address: str) -> None:
    service.refuses(404, "not_found", "GET", address)


def test_an_unknown_method_is_told_in_the_envelope(service: Service) -> None:
    service.refuses(405, "method_not_allowed", "PUT", "/v1/audits", json=AUDIT)
    service.refuses(405, "method_not_allowed", "DELETE", "/v1/explain")


def test_requests_have_ids_and_answers_have_security_headers(service: Service) -> None:
    answer = service.client.get("/v1/priors", headers={"X-Request-Id": "build-7"})
    assert answer.headers["x-request-id"] == "build-7"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["cache-control"] == "no-store"
    injected = service.client.get("/v1/priors", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]
    assert len(injected) == 32


def test_what_breaks_inside_is_500_without_a_word_of_the_inside(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the inside")

    monkeypatch.setattr(service.backend.jobs, "list", fail)
    answer = service.client.get("/v1/audits", headers={"X-Request-Id": "build-8"})
    assert answer.status_code == 500
    assert "the inside" not in envelope_of(answer)["message"]
    assert "build-8" in caplog.text and "the inside" in caplog.text
    monkeypatch.undo()
    assert service.client.get("/v1/audits").status_code == 200


def test_a_full_disk_is_said(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("service.http.uploads.tempfile.mkdtemp", full)
    service.folder.joinpath("uploads", "datasets").mkdir(parents=True)
    service.refuses(503, "disk_full", "POST", "/v1/datasets/upload", files={"file": ("a.zip", b"PK")})
