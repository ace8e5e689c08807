"""Remote classifiers against real servers on loopback: right answers, and every bad server refused in one sentence."""

import base64
import gzip
import io
import ipaddress
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from audit.remote_classifier import RemoteClassifier, RemoteEndpoint, is_private
from engine.errors import ClassifierError
from engine.guidance import gradient_source
from engine.recipe import Recipe
from engine.tries import query

LABELS = ["red", "green", "blue"]
KSERVE: dict[str, Any] = {
    "protocol": "kserve-v2",
    "model": "colours",
    "labels": LABELS,
    "size": 8,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
}
JSON: dict[str, Any] = {"protocol": "json", "labels": LABELS}
METADATA: dict[str, Any] = {
    "name": "colours",
    "versions": ["3"],
    "platform": "test",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3, 8, 8]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
}


@dataclass
class Server:
    """A server in a thread that answers with `reply(handler, body)` and remembers what it was asked."""

    reply: Callable[["Handler", Any], None]
    asked: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def endpoint(self, settings: dict[str, Any], **changed: Any) -> RemoteEndpoint:
        private = {"allowed_hosts": ["127.0.0.1"], "allow_private": True}
        return RemoteEndpoint(
            **{"url": self.url, **private, "timeout": 5, "retries": 0, **settings, **changed},
        )

    def open(self, settings: dict[str, Any], **changed: Any) -> RemoteClassifier:
        return RemoteClassifier(self.endpoint(settings, **changed))


class Handler(BaseHTTPRequestHandler):
    backend: Server

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        self._handle(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _handle(self, body: Any) -> None:
        self.backend.asked.append((self.command, self.path, dict(self.headers), body))
        with suppress(OSError):
            self.backend.reply(self, body)

    def send(self, content: Any, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


@contextmanager
def serving(reply: Callable[[Handler, Any], None], tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    backend = Server(reply)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"backend": backend}))
    if tls is not None:
        http.socket = tls.wrap_socket(http.socket, server_side=True)
    backend.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield backend
    finally:
        backend.closing.set()
        http.shutdown()
        thread.join()
        http.server_close()


def colours(pictures: np.ndarray) -> np.ndarray:
    """The truth of these servers: four times the mean colour."""
    return 4 * pictures.mean(axis=(2, 3))


def kserve(handler: Handler, body: Any) -> None:
    if body is None:
        handler.send(METADATA)
        return
    (image,) = body["inputs"]
    logits = colours(np.array(image["data"], dtype=np.float32).reshape(image["shape"]))
    output = {"name": "y", "datatype": "FP32", "shape": list(logits.shape), "data": logits.flatten().tolist()}
    handler.send({"model_name": "colours", "model_version": "3", "outputs": [output]})


def pictures(body: Any) -> np.ndarray:
    files = [Image.open(io.BytesIO(base64.b64decode(image, validate=True))) for image in body["images"]]
    return np.stack([np.asarray(file).transpose(2, 0, 1) / 255 for file in files])


def plain(handler: Handler, body: Any) -> None:
    logits = torch.from_numpy(colours(pictures(body)))
    handler.send({"probabilities": logits.softmax(1).tolist()})


@pytest.fixture
def images() -> torch.Tensor:
    """Whole numbers of 255ths, so that a PNG loses nothing."""
    return torch.randint(0, 256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(1)) / 255


def test_kserve_gets_normalised_images_in_batches(images: torch.Tensor) -> None:
    with serving(kserve) as server:
        classifier = server.open(KSERVE, batch=2)
        server.asked.clear()
        logits = query(classifier, images)
        assert [body["inputs"][0]["shape"] for *_, body in server.asked] == [[2, 3, 8, 8], [2, 3, 8, 8], [1, 3, 8, 8]]
    assert {path for _, path, *_ in server.asked} == {"/v2/models/colours/infer"}
    truth = 4 * ((images - 0.5) / 0.25).mean((2, 3))
    assert torch.allclose(logits, truth, atol=1e-4)
    assert classifier.labels == tuple(LABELS)
    assert classifier.size == (8, 8)


def test_a_fixed_batch_is_filled_up(images: torch.Tensor) -> None:
    def reply(handler: Handler, body: Any) -> None:
        if body is not None:
            return kserve(handler, body)
        shape = [4, 3, 8, 8]
        handler.send({**METADATA, "inputs": [{"name": "x", "datatype": "FP32", "shape": shape}]})

    with serving(reply) as server:
        logits = server.open(KSERVE)(images)
        assert {tuple(body["inputs"][0]["shape"]) for *_, body in server.asked if body} == {(4, 3, 8, 8)}
    assert torch.allclose(logits, 4 * ((images - 0.5) / 0.25).mean((2, 3)), atol=1e-4)


def test_plain_json_sends_pictures_and_reads_probabilities(images: torch.Tensor) -> None:
    with serving(plain) as server:
        classifier = server.open(JSON)
        probabilities = classifier.probabilities(images, batch=3)
        logits = classifier(images)
    truth = (4 * images.mean((2, 3))).log_softmax(1)
    assert torch.allclose(probabilities, truth.exp(), atol=1e-5)
    assert torch.allclose(logits, truth, atol=1e-4)


def test_a_certain_classifier_has_finite_logits(images: torch.Tensor) -> None:
    def reply(handler: Handler, body: Any) -> None:
        handler.send({"probabilities": [[1, 0, 0]] * len(body["images"])})

    with serving(reply) as server:
        logits = query(server.open(JSON), images)
    assert torch.allclose(logits.softmax(1), torch.tensor([[1.0, 0.0, 0.0]]).expand(5, 3), atol=1e-6)


def test_no_gradient_is_to_be_had(images: torch.Tensor) -> None:
    with serving(kserve) as server:
        classifier = server.open(KSERVE)
        server.asked.clear()
        assert not classifier.differentiable
        with pytest.raises(ClassifierError, match="'surrogate'"):
            source = gradient_source(Recipe(gradient="vanilla"), classifier, classifier)
            source(images, torch.zeros(5, dtype=torch.long))
        assert server.asked == []


def test_the_hash_follows_the_settings_and_the_reported_version() -> None:
    version = "3"

    def reply(handler: Handler, body: Any) -> None:
        handler.send({"logits": [[1, 2, 3]] * len(body["images"]), "model_version": version})

    with serving(reply) as server:
        before = server.open(JSON).content_hash
        assert server.open(JSON, timeout=4, batch=3).content_hash == before
        assert server.open(JSON, labels=["a", "b", "c"]).content_hash != before
        version = "4"
        assert server.open(JSON).content_hash != before


def test_a_model_that_is_exchanged_while_it_is_asked_is_an_error(images: torch.Tensor) -> None:
    version = "3"

    def reply(handler: Handler, body: Any) -> None:
        handler.send({"logits": [[1, 2, 3]] * len(body["images"]), "model_version": version})

    with serving(reply) as server:
        classifier = server.open(JSON)
        version = "4"
        with pytest.raises(ClassifierError, match="from version '3' to '4'"):
            classifier(images)


def test_trouble_that_passes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("audit.remote_classifier.time.sleep", waits.append)
    statuses = [(503, {}), (429, {"Retry_After": "2"}), (500, {"Retry_After": "Wed, 01 Jan 2020 00:00:00 GMT"})]

    def reply(handler: Handler, body: Any) -> None:
        if statuses:
            status, headers = statuses.pop(0)
            handler.send({}, status, **headers)
        else:
            plain(handler, body)

    with serving(reply) as server:
        server.open(JSON, retries=3)
        assert len(server.asked) == 4
    assert 0.1 < waits[0] < 0.3
    assert waits[1:] == [2.0, 0.0]


def test_retries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("audit.remote_classifier.time.sleep", waits.append)
    with serving(lambda handler, body: handler.send({}, 503)) as server:
        with pytest.raises(ClassifierError, match=r"status 503\. It was asked 3 times"):
            server.open(JSON, retries=2)
        assert len(server.asked) == 3
    assert 0 < waits[0] < waits[1]


def test_a_wait_beyond_the_time_that_is_left_is_not_begun() -> None:
    with serving(lambda handler, body: handler.send({}, 429, Retry_After="3600")) as server:
        with pytest.raises(ClassifierError, match=r"status 429\. It was asked once"):
            server.open(JSON, retries=5)
        assert len(server.asked) == 1


def silent(handler: Handler, body: Any) -> None:
    handler.backend.closing.wait(10)


def dripping_body(handler: Handler, body: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    while not handler.backend.closing.wait(0.05):
        handler.wfile.write(b" ")


def dripping_headers(handler: Handler, body: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not handler.backend.closing.wait(0.05):
        handler.wfile.write(b"x")


def endless_continue(handler: Handler, body: Any) -> None:
    while not handler.backend.closing.wait(0.001):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize("reply", [silent, dripping_body, dripping_headers, endless_continue])
def test_a_server_that_takes_too_long_is_left(reply: Callable[[Handler, Any], None]) -> None:
    with serving(reply) as server:
        start = time.monotonic()
        with pytest.raises(ClassifierError, match=r"did not answer within 0\.3 s"):
            server.open(JSON, timeout=0.3)
        assert time.monotonic() - start < 5


def test_the_total_time_bounds_all_attempts() -> None:
    with serving(silent) as server:
        start = time.monotonic()
        with pytest.raises(ClassifierError, match="did not answer"):
            server.open(JSON, timeout=0.3, total_timeout=0.8, retries=20)
        assert time.monotonic() - start < 5
        assert len(server.asked) <= 3


def endless(handler: Handler, body: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    while not handler.backend.closing.is_set():
        handler.wfile.write(b" " * 65536)


def endless_chunks(handler: Handler, body: Any) -> None:
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while not handler.backend.closing.is_set():
        handler.wfile.write(b"10000\r\n" + b" " * 65536 + b"\r\n")


def announced(handler: Handler, body: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(2**30))
    handler.end_headers()
    handler.backend.closing.wait(10)


@pytest.mark.parametrize("reply", [endless, endless_chunks, announced])
def test_a_body_beyond_the_limit_is_not_read(reply: Callable[[Handler, Any], None]) -> None:
    with serving(reply) as server, pytest.raises(ClassifierError, match="more than the 100000 bytes"):
        server.open(JSON, max_response_bytes=100_000)


def test_an_endless_error_page_is_cut_to_an_excerpt() -> None:
    def reply(handler: Handler, body: Any) -> None:
        handler.send_response(404)
        handler.end_headers()
        while not handler.backend.closing.is_set():
            handler.wfile.write(b"no such model \x1b[31m\n")

    with serving(reply) as server, pytest.raises(ClassifierError, match="status 404: 'no such model") as caught:
        server.open(JSON)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_a_body_that_breaks_off_is_no_answer() -> None:
    def reply(handler: Handler, body: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"{}")

    with serving(reply) as server, pytest.raises(ClassifierError, match="broke off"):
        server.open(JSON)


def test_a_redirect_is_not_followed() -> None:
    with serving(plain) as other:
        with (
            serving(lambda handler, body: handler.send({}, 307, Location=other.url)) as server,
            pytest.raises(ClassifierError, match="redirects, which is not followed"),
        ):
            server.open(JSON)
        assert other.asked == []


ROW = [0.2, 0.3, 0.5]


@pytest.mark.parametrize(
    ("content", "sent", "sentence"),
    [
        (b"<html>Sign in</html>", {"kind": "text/html"}, "'text/html' where JSON is expected"),
        (b"{}", {"kind": "application/octet-stream"}, "where JSON is expected"),
        (gzip.compress(b"{}", mtime=0), {"Content_Encoding": "gzip"}, "compressed"),
        (b"<html>", {}, "no JSON"),
        (b"[" * 100_000, {}, "no JSON"),
        (b"[1]", {}, "JSON object"),
        ({"labels": []}, {}, "either 'probabilities' or 'logits'"),
        ({"probabilities": [ROW, ROW], "logits": [ROW, ROW]}, {}, "either 'probabilities' or 'logits'"),
        ({"logits": [ROW, [0.1, 0.2]]}, {}, "no table of numbers"),
        ({"logits": [ROW, ["a", "b", "c"]]}, {}, "no table of numbers"),
        ({"logits": {"0": ROW}}, {}, "no table of numbers"),
        ({"logits": ROW}, {}, r"answered \[3\] for 2 images"),
        ({"logits": [ROW]}, {}, r"answered \[1, 3\] for 2 images"),
        ({"logits": [ROW, ROW, ROW]}, {}, r"answered \[3, 3\] for 2 images"),
        ({"logits": [[0.1, 0.9]] * 2}, {}, r"answered \[2, 2\] for 2 images and 3 labels"),
        ({"logits": [[0.1]] * 2}, {}, "A single logit"),
        ({"logits": [[float("nan"), 0.0, 1.0]] * 2}, {}, "NaN or infinity"),
        ({"logits": [[1e300, 0.0, 1.0]] * 2}, {}, "NaN or infinity"),
        ({"logits": [ROW, ROW]}, {}, "say output: probabilities"),
        ({"probabilities": [[2.0, 1.0, 0.5]] * 2}, {}, "no probabilities"),
        ({"detail": "who are you?"}, {"status": 401}, "status 401: .*who are you"),
        (b"", {"status": 400}, "status 400: nothing more was said"),
        (b"", {"status": 204}, "status 204"),
    ],
)
def test_a_bad_answer_is_named_and_the_next_classifier_works(content: Any, sent: dict[str, Any], sentence: str) -> None:
    with serving(lambda handler, body: handler.send(content, **sent)) as server:
        with pytest.raises(ClassifierError, match=sentence):
            server.open(JSON)
        assert len(server.asked) == 1
        server.reply = plain
        server.open(JSON)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"inputs": []}, "one of 'inputs'; it names 0"),
        ({"outputs": "y"}, "one of 'outputs'"),
        ({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [-1, 3, 8, 8]}]}, "has to take FP32"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 8, 8, 3]}]}, r"takes \[-1, 8, 8, 3\]"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 192]}]}, r"takes \[-1, 192\]"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": None}]}, "no list of numbers"),
        ({"outputs": [{"name": "y", "datatype": "BYTES", "shape": [-1, 3]}]}, "has to give floats"),
        ({"outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1000]}]}, "name 3 classes"),
        ({"outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3, 1, 1]}]}, "name 3 classes"),
    ],
)
def test_a_model_that_does_not_fit_its_settings_is_refused(changed: dict[str, Any], sentence: str) -> None:
    with serving(lambda handler, body: handler.send({**METADATA, **changed})) as server:
        with pytest.raises(ClassifierError, match=sentence):
            server.open(KSERVE)
        assert [method for method, *_ in server.asked] == ["GET"]


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ({"shape": [2, 3], "data": [1.0] * 5}, r"5 numbers and called them \[2, 3\]"),
        ({"shape": [6], "data": [1.0] * 6}, r"6 numbers and called them \[6\]"),
        ({"shape": [-2, -3], "data": [1.0] * 6}, "called them"),
        ({"shape": [1, 3], "data": [1.0] * 3}, r"answered \[1, 3\] for 2 images"),
        ({"shape": [2, 3]}, "called them|NaN"),
    ],
)
def test_an_inference_of_wrong_shape_is_refused(output: dict[str, Any], sentence: str) -> None:
    def reply(handler: Handler, body: Any) -> None:
        handler.send(METADATA if body is None else {"outputs": [output]})

    with serving(reply) as server, pytest.raises(ClassifierError, match=sentence):
        server.open(KSERVE)


def test_names_of_models_stay_one_part_of_the_path() -> None:
    with serving(kserve) as server:
        server.open(KSERVE, model="../admin?x=1", version="2/../3")
    assert server.asked[0][1] == "/v2/models/..%2Fadmin%3Fx%3D1/versions/2%2F..%2F3"


# Hosts


@pytest.mark.parametrize(
    "allowed",
    [
        {"allowed_hosts": [], "allow_private": False},
        {"allowed_hosts": [], "allow_private": True},
        {"allowed_hosts": ["127.0.0.1"], "allow_private": False},
    ],
)
def test_a_private_address_needs_to_be_named_and_allowed(allowed: dict[str, Any]) -> None:
    with serving(plain) as server:
        with pytest.raises(ClassifierError, match="private, loopback or link-local"):
            server.open(JSON, **allowed)
        assert server.asked == []


def test_the_operators_word_goes_before_the_endpoints_own() -> None:
    with serving(plain) as server:
        endpoint = server.endpoint(JSON)
        with pytest.raises(ClassifierError, match="not among the allowed hosts"):
            RemoteClassifier(endpoint, allowed_hosts=["models.example"])
        with pytest.raises(ClassifierError, match="private, loopback or link-local"):
            RemoteClassifier(endpoint, allowed_hosts=[], allow_private=False)
        assert server.asked == []
        strict = server.endpoint(JSON, allowed_hosts=[], allow_private=False)
        RemoteClassifier(strict, allowed_hosts=[f"127.0.0.1:{server.port}"], allow_private=True)


@pytest.mark.parametrize("host", ["localhost", "2130706433", "0x7f.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]"])
def test_other_ways_to_write_loopback_are_seen_through(host: str) -> None:
    with serving(plain) as server:
        with pytest.raises(ClassifierError, match="private, loopback or link-local"):
            server.open(JSON, url=f"http://{host}:{server.port}", allowed_hosts=[], allow_private=False)
        assert server.asked == []


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("8.8.8.8", False),
        ("2606:4700:4700::1111", False),
        ("10.1.2.3", True),
        ("172.16.0.1", True),
        ("192.168.0.1", True),
        ("169.254.169.254", True),
        ("100.64.0.1", True),
        ("0.0.0.0", True),
        ("::1", True),
        ("fe80::1", True),
        ("fd00::1", True),
        ("::ffff:10.0.0.1", True),
        ("64:ff9b::a9fe:a9fe", True),
        ("2002:7f00:1::", True),
    ],
)
def test_private_addresses_are_known(address: str, private: bool) -> None:
    assert is_private(ipaddress.ip_address(address)) == private


@contextmanager
def names(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> Iterator[list[str]]:
    """A name server of our own that knows these addresses for every name."""
    looked_up: list[str] = []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", look_up)
        yield looked_up


def test_the_checked_address_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(plain) as server, names(monkeypatch, ["127.0.0.1"]) as looked_up:
        url = f"http://Classifier.Example.:{server.port}"
        server.open(JSON, url=url, allowed_hosts=["classifier.example"])
    assert looked_up == ["classifier.example"]  # once: there is no second look-up that could differ
    assert server.asked[0][2]["Host"] == f"classifier.example:{server.port}"


def test_one_private_address_among_public_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(plain) as server:
        url = f"http://classifier.example:{server.port}"
        with (
            names(monkeypatch, ["8.8.8.8", "127.0.0.1"]),
            pytest.raises(ClassifierError, match="private, loopback or link-local"),
        ):
            server.open(JSON, url=url, allowed_hosts=["classifier.example"], allow_private=False)
        assert server.asked == []


def test_a_slow_name_server_does_not_hold_us_up(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: done.wait(10) and [])
    with pytest.raises(ClassifierError, match="was not found within"):
        RemoteClassifier(RemoteEndpoint(url="http://slow.example", timeout=0.3, retries=0, **JSON))
    done.set()


def test_an_unknown_name_and_a_closed_port_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(plain) as server:
        endpoint = server.endpoint(JSON)
    with pytest.raises(ClassifierError, match="cannot be reached: Connection refused"):
        RemoteClassifier(endpoint)

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ClassifierError, match="host name that is not known"):
        RemoteClassifier(RemoteEndpoint(url="http://nowhere.example", retries=0, **JSON))


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(plain) as proxy, serving(plain) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        server.open(JSON)
        assert proxy.asked == []


# Secrets

TOKEN = "s3cret-t0ken"


def test_the_token_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLASSIFIER_TOKEN", TOKEN)
    with serving(plain) as server:
        classifier = server.open(JSON, token_env="CLASSIFIER_TOKEN")
        assert server.asked[0][2]["Authorization"] == f"Bearer {TOKEN}"
        assert TOKEN not in repr(classifier.endpoint)
        server.reply = lambda handler, body: handler.send({"you sent": handler.headers["Authorization"]}, 403)
        with pytest.raises(ClassifierError, match=r"Bearer \[token\]") as caught:
            server.open(JSON, token_env="CLASSIFIER_TOKEN")
    assert TOKEN not in str(caught.value)


def test_a_token_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(plain) as server:
        monkeypatch.delenv("CLASSIFIER_TOKEN", raising=False)
        with pytest.raises(ClassifierError, match="environment variable CLASSIFIER_TOKEN"):
            server.open(JSON, token_env="CLASSIFIER_TOKEN")
        monkeypatch.setenv("CLASSIFIER_TOKEN", f"{TOKEN}\r\nX-Other: 1")
        with pytest.raises(ClassifierError, match="environment variable CLASSIFIER_TOKEN") as caught:
            server.open(JSON, token_env="CLASSIFIER_TOKEN")
        assert TOKEN not in str(caught.value)
        assert server.asked == []


def test_a_token_is_not_sent_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLASSIFIER_TOKEN", TOKEN)
    with pytest.raises(ClassifierError, match="over https only"):
        RemoteClassifier(RemoteEndpoint(url="http://models.example", token_env="CLASSIFIER_TOKEN", **JSON))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"url": "file:///etc/passwd"}, "http:// or https://"),
        ({"url": "http://"}, "name a host"),
        ({"url": f"https://user:{TOKEN}@models.example"}, "must not hold a user"),
        ({"url": f"https://models.example/?key={TOKEN}"}, "must not hold a query"),
        ({"url": "https://models.example/a b"}, "blanks"),
        ({"url": "https://models.example/\r\nX: 1"}, "blanks"),
        ({"url": "https://models.example:99999"}, "no address"),
        ({"protocol": "grpc"}, "'protocol' is wrong"),
        ({"token": TOKEN}, "has no setting 'token'"),
        ({"token_env": "A=B"}, "'token_env' is wrong"),
        ({"timeout": 0}, "'timeout' is wrong"),
        ({"timeout": float("nan")}, "'timeout' is wrong"),
        ({"batch": 0}, "'batch' is wrong"),
        ({"retries": -1}, "'retries' is wrong"),
        ({"mean": [0, 0, 0], "std": [1, 1, 1]}, "belong to the server"),
        ({"protocol": "kserve-v2"}, "model is missing"),
        ({"labels": ["one"]}, "'labels' is wrong"),
        ({"labels": [True, False]}, "'labels.0' is wrong"),
    ],
)
def test_a_wrong_setting_is_named_and_its_value_is_not(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ClassifierError, match=sentence) as caught:
        RemoteEndpoint(**{"url": "https://models.example", **JSON, **changed})
    assert TOKEN not in str(caught.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is needed to make a certificate")
def test_certificates_are_checked_under_the_hosts_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    command += f" -addext subjectAltName=DNS:classifier.example -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # has no say
    monkeypatch.setenv("CLASSIFIER_TOKEN", TOKEN)
    with serving(plain, tls) as server, names(monkeypatch, ["127.0.0.1"]):
        known = {"allowed_hosts": ["classifier.example", "other.example"], "token_env": "CLASSIFIER_TOKEN"}
        good = {"url": f"https://classifier.example:{server.port}", **known}
        server.open(JSON, ca_file=certificate, **good)
        with pytest.raises(ClassifierError, match="certificate that is not trusted"):
            server.open(JSON, **good)
        with pytest.raises(ClassifierError, match="certificate that is not trusted"):
            server.open(JSON, ca_file=certificate, **{**good, "url": f"https://other.example:{server.port}"})
        assert len(server.asked) == 1
        with pytest.raises(ClassifierError, match="cannot be read"):
            server.open(JSON, ca_file=tmp_path / "gone.pem", **good)
