"""Classifiers that fail when they are asked, at an address or in a file: one sentence, exit code 2, nothing half done.

Everything is real and small: servers on loopback, graphs in ONNX Runtime, the embedded prior, three steps of guidance,
and surrogates that were hardly taught.
"""

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from onnx import TensorProto, helper
from PIL import Image

from audit import explain
from audit.pictures import save_png, to_pil
from engine.surrogate import EVALUATOR, GUIDE
from service.cli import main
from service.configuration import Configuration
from service.http.explanations import Explanations
from tests.audit.test_onnx_classifier import SETTINGS, save
from tests.audit.test_remote_classifier import Handler, Server, announced, endless, pictures, serving, silent
from tests.service.http.conftest import LIMITS, Service, base64_of, envelope_of, in_process
from tests.service.test_gate_bad_input import FEW, WORLD, N, recipe, sentence

Reply = Callable[[Handler, Any], None]
LABELS = list(WORLD.labels)


@pytest.fixture(autouse=True)
def hardly_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Surrogates of three steps."""
    quick = functools.partial(explain.distil_pair, guide=GUIDE.changed(**FEW), evaluator=EVALUATOR.changed(**FEW))
    monkeypatch.setattr(explain, "distil_pair", quick)


@pytest.fixture(scope="module")
def portraits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of portraits."""
    folder = tmp_path_factory.mktemp("portraits")
    for row, image in enumerate(WORLD.sample(N, seed=606).images):
        save_png(to_pil(image), folder / f"{row}.png")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One address whose manners the tests change, so that its surrogates are distilled once."""
    with serving(bright) as found:
        yield found


def bright(handler: Handler, body: Any) -> None:
    """The good server: how bright a picture is."""
    light = torch.from_numpy(pictures(body).mean(axis=(1, 2, 3)))
    handler.send({"logits": torch.stack([0.5 - light, light - 0.5], dim=1).tolist()})


def redirects(handler: Handler, body: Any) -> None:
    handler.send({}, 307, Location="http://127.0.0.1:1/")


def html(handler: Handler, body: Any) -> None:
    handler.send(b"<html><script>alert(1)</script></html>", kind="text/html")


def wrong_batch(handler: Handler, body: Any) -> None:
    handler.send({"logits": [[0.0, 1.0]] * (len(body["images"]) + 1)})


def endpoint(server: Server, file: Path, **changed: Any) -> Path:
    """The file that describes a server on loopback, which the operator allows."""
    settings = {
        "url": server.url,
        "protocol": "json",
        "labels": LABELS,
        "allowed_hosts": ["127.0.0.1"],
        "allow_private": True,
        "timeout": 0.5,
        "retries": 0,
    }
    stated = {name: value for name, value in (settings | changed).items() if value is not None}
    file.write_text(yaml.safe_dump(stated))
    return file


def explained(classifier: Path, image: Path, folder: Path, cache: Path, *more: str) -> int:
    """`pfungst explain` into folder/out."""
    what = ["--classifier", str(classifier), "--image", str(image), "--prior", WORLD.name, "--data", str(image.parent)]
    short = ["--recipe", recipe(folder), "--k", "1", "--cache", str(cache), "--out", str(folder / "out")]
    return main(["explain", *what, *short, *more])


def audited(classifier: Path, portraits: Path, folder: Path, cache: Path) -> int:
    """`pfungst audit` into folder/out."""
    (portraits / "all.csv").write_text("image,label\n" + "".join(f"{n}.png,{LABELS[n % 2]}\n" for n in range(N)))
    what = ["--classifier", str(classifier), "--data", str(portraits / "all.csv"), "--prior", WORLD.name]
    return main(["audit", *what, "--cache", str(cache), "--out", str(folder / "out")])


BAD: list[tuple[Reply, dict[str, Any], str, bool]] = [
    (redirects, {}, "redirects, which is not followed", True),
    (silent, {}, "did not answer within 0.5 s", True),
    (endless, {}, "more than the 8388608 bytes", True),
    (announced, {}, "more than the 8388608 bytes", True),
    (html, {}, "'text/html' where JSON is expected", True),
    (wrong_batch, {}, "answered", True),
    (bright, {"allow_private": None}, "private, loopback or link-local", False),
    (bright, {"allow_private": None, "allowed_hosts": None}, "private, loopback or link-local", False),
    (bright, {"allowed_hosts": ["models.example"]}, "127.0.0.1 is not among the allowed hosts", False),
    (bright, {"url": "http://169.254.169.254/", "allowed_hosts": None}, "private, loopback or link-local", False),
]


@pytest.mark.parametrize(("reply", "changed", "said", "asked"), BAD)
def test_a_remote_classifier_that_misbehaves_is_bad_input(
    reply: Reply,
    changed: dict[str, Any],
    said: str,
    asked: bool,
    server: Server,
    portraits: Path,
    tmp_path: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = sorted(cache.iterdir())
    bad = endpoint(server, tmp_path / "bad.yaml", **changed)
    server.asked.clear()
    server.reply = reply
    for command in (explained, audited):
        target = portraits / "0.png" if command is explained else portraits
        assert command(bad, target, tmp_path, cache) == 2
        told = sentence(capsys)
        assert said in told
        assert "<script" not in told
    assert bool(server.asked) == asked  # where an address is not allowed, no connection is made
    assert not (tmp_path / "out").exists()
    assert sorted(cache.iterdir()) == known

    server.reply = bright
    good = endpoint(server, tmp_path / "good.yaml", timeout=20)
    assert explained(good, portraits / "0.png", tmp_path, cache) == 0
    assert json.loads((tmp_path / "out" / "explanation.json").read_text())["recipe"]["k"] == 1


@pytest.mark.parametrize(
    ("reply", "said"), [(silent, "did not answer"), (redirects, "redirects"), (wrong_batch, "answered")]
)
def test_a_remote_classifier_that_breaks_off_later_is_bad_input_too(
    reply: Reply,
    said: str,
    server: Server,
    portraits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is opened and asked for the target; while surrogates are distilled it fails."""

    def at_first(handler: Handler, body: Any) -> None:
        (bright if len(server.asked) <= 3 else reply)(handler, body)

    own = tmp_path / "cache"
    bad = endpoint(server, tmp_path / "bad.yaml")
    server.asked.clear()
    server.reply = at_first
    assert explained(bad, portraits / "0.png", tmp_path, own) == 2
    assert said in sentence(capsys)
    assert len(server.asked) > 3
    assert not (tmp_path / "out").exists()
    assert not own.exists() or list(own.iterdir()) == []
    server.reply = bright
    assert explained(endpoint(server, tmp_path / "good.yaml", timeout=20), portraits / "0.png", tmp_path, own) == 0


# A graph that fails when it is run


def failing(file: Path, above: float) -> Path:
    """A graph that looks up what is not there as soon as all of its pictures' pixels are above a value."""

    def constant(name: str, value: Any, kind: int) -> onnx.NodeProto:
        shape = list(np.shape(value))
        return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, shape, np.ravel(value)))

    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["colour"]),
        helper.make_node("ReduceMin", ["x"], ["least"], keepdims=0),
        constant("above", above, TensorProto.FLOAT),
        helper.make_node("Greater", ["least", "above"], ["yes"]),
        helper.make_node("Cast", ["yes"], ["index"], to=TensorProto.INT64),
        constant("table", [1.0], TensorProto.FLOAT),
        helper.make_node("Gather", ["table", "index"], ["one"], axis=0),
        helper.make_node("Mul", ["colour", "one"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "weights"], ["y"]),
    ]
    return save(file, nodes, settings=SETTINGS | {"mean": [0, 0, 0], "std": [1, 1, 1]})


def white_picture(folder: Path) -> Path:
    Image.new("RGB", (64, 64), "white").save(folder / "white.png")
    return folder / "white.png"


def test_a_graph_that_fails_when_it_is_run_is_bad_input(
    portraits: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its first question, and at a white picture alone."""
    for above, image in ((-1.0, portraits / "0.png"), (0.99, white_picture(tmp_path))):
        graph = failing(tmp_path / "model.onnx", above)
        assert explained(graph, image, tmp_path, cache) == 2
        assert "failed in ONNX Runtime" in sentence(capsys)
        assert not (tmp_path / "out").exists()
    assert explained(graph, portraits / "0.png", tmp_path, cache) == 0
    assert (tmp_path / "out" / "explanation.json").is_file()


# The same over HTTP


@contextmanager
def service_of(folder: Path, **settings: Any) -> Iterator[Service]:
    """A service that explains with the engine, by surrogates that are hardly taught."""
    small = {"surrogate_steps": 2, "surrogate_pictures": 20, "workers": 0, "limits": LIMITS}
    configuration = Configuration(folder=folder, **small, **settings)
    configuration.cache_folder.mkdir(parents=True, exist_ok=True)
    with contextmanager(in_process)(configuration) as service:
        service.backend.device.work = Explanations(configuration)
        yield service


def question(image: bytes, **more: Any) -> dict[str, Any]:
    return {"image": base64_of(image), "prior": WORLD.name, "k": 1, "steps": 2, "timeout_seconds": 120} | more


def test_an_uploaded_graph_that_fails_later_is_no_fault_of_the_server(portraits: Path, tmp_path: Path) -> None:
    def upload(above: float) -> dict[str, Any]:
        file = failing(tmp_path / "model.onnx", above)
        settings = file.with_suffix(".json").read_text()
        return {"files": {"file": ("model", file.read_bytes())}, "data": {"settings": settings}}

    with service_of(tmp_path / "data") as service:
        message = service.refuses(422, "bad_model", "POST", "/v1/classifiers/upload", **upload(-1.0))
        assert "failed in ONNX Runtime" in message
        id = service.client.post("/v1/classifiers/upload", **upload(0.99)).json()["id"]
        portrait = question((portraits / "0.png").read_bytes(), classifier=id)
        assert service.client.post("/v1/explain", json=portrait).status_code == 200
        white = question(white_picture(tmp_path).read_bytes(), classifier=id)
        assert "failed in ONNX Runtime" in service.refuses(422, "bad_model", "POST", "/v1/explain", json=white)
        assert service.client.post("/v1/explain", json=portrait).status_code == 200


def test_a_configured_endpoint_that_fails_is_said_and_leaves_the_device_free(
    server: Server, portraits: Path, tmp_path: Path
) -> None:
    file = endpoint(server, tmp_path / "remote.yaml", timeout=1.5, allow_private=True)
    remote: dict[str, Any] = {"classifiers": {"remote": file}}
    explain_it = question((portraits / "0.png").read_bytes(), classifier="remote")
    requests = [("/v1/explain", explain_it), ("/v1/classifiers", {"source": "remote"})]
    server.reply = bright
    server.asked.clear()
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "list of endpoints is empty"),
        ({"endpoints": ["models.example"], "private_endpoints": True}, "not among the allowed hosts"),
        ({"endpoints": ["127.0.0.1"]}, "private, loopback or link-local"),
    ]
    for place, (listed, said) in enumerate(refused):  # the operator's word counts, not the file's
        with service_of(tmp_path / str(place), **remote, **listed) as service:
            for address, body in requests:
                assert said in service.refuses(422, "bad_model", "POST", address, json=body)
    assert server.asked == []

    listed = {"endpoints": [f"127.0.0.1:{server.port}"], "private_endpoints": True}
    with service_of(tmp_path / "data", **remote, **listed) as service:
        for reply, said in ((redirects, "redirects"), (silent, "did not answer"), (html, "JSON"), (announced, "bytes")):
            server.reply = reply
            for address, body in requests:
                assert said in service.refuses(422, "bad_model", "POST", address, json=body)
        server.reply = bright
        assert service.client.post("/v1/explain", json=explain_it).status_code == 200
        for reply, said in ((wrong_batch, "answered"), (silent, "did not answer"), (redirects, "redirects")):
            server.reply = reply  # it was opened long ago, and is another now
            assert said in service.refuses(422, "bad_model", "POST", "/v1/explain", json=explain_it)
        server.reply = silent
        answer = service.client.post("/v1/explain", json=explain_it | {"timeout_seconds": 0.5})
        assert (answer.status_code, envelope_of(answer)["code"]) == (504, "timeout")
        until = time.monotonic() + 20
        while service.backend.device.waiting or service.backend.device.busy_seconds:
            assert time.monotonic() < until
            time.sleep(0.02)
        server.reply = bright
        assert service.client.post("/v1/explain", json=explain_it).status_code == 200
