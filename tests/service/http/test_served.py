"""`bentoml serve` as a process: what BentoML itself decides, a client's walk, and its end."""

import contextlib
import io
import json
import os
import signal
import socket
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from audit.pictures import to_pil
from service.configuration import Configuration
from service.worker import open_table
from tests.service.http.conftest import Served, base64_of, end, envelope_of, png, serve
from worlds import WORLDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POLICY = {"max_images": 4, "min_images": 2, "min_per_direction": 1}
AUDIT: dict[str, Any] = {"classifier": "portraits/student", "k": 1, "steps": 4, "policy": POLICY}
WAITING = ("queued", "running", "interrupted")


def test_health_needs_nothing_and_says_nothing(served: Served) -> None:
    for address in ("/livez", "/readyz", "/healthz"):
        answer = served.client.get(address)
        assert (answer.status_code, answer.text.strip()) == (200, "")
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_bentomls_own_pages_are_not_there(served: Served) -> None:
    for address in ("/", "/docs.json", "/schema.json", "/static_content/index.css", "/v1/docs"):
        answer = served.client.get(address)
        assert answer.status_code == 404
        envelope_of(answer)


def test_only_loopback_is_bound(served: Served) -> None:
    port = served.client.base_url.port
    assert port is not None
    with socket.socket() as probe:
        # 127.0.0.1 alone is taken: with 0.0.0.0 no other loopback address would be free.
        probe.bind(("127.0.0.2", port))


def test_figures_have_no_series_for_every_id(served: Served) -> None:
    for i in range(3):
        served.client.get(f"/v1/audits/{i:032x}")
    text = served.client.get("/metrics").text
    assert "pfungst_request_seconds_bucket" in text
    assert f"{2:032x}" not in text


@pytest.mark.parametrize("length", ["Content-Length: 500000000", "Transfer-Encoding: chunked"])
def test_a_body_over_the_limit_is_answered_before_it_has_ended(served: Served, length: str) -> None:
    """Neither body is ever sent whole: the answer comes at the stated length, or where the limit is passed."""
    port = served.client.base_url.port
    assert port is not None
    with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
        head = f"POST /v1/audits HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        wire.sendall(head.encode())
        if "chunked" in length:
            for _ in range(41):
                wire.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        answer = wire.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert served.client.get("/v1/audits").status_code == 200


def test_a_picture_is_explained(served: Served) -> None:
    stream = io.BytesIO()
    to_pil(WORLDS["portraits"].sample(1, seed=6).images[0]).save(stream, "PNG")
    body = {
        "classifier": "portraits/student",
        "image": base64_of(stream.getvalue()),
        "steps": 4,
        "timeout_seconds": 600,
    }
    served.client.timeout = httpx.Timeout(700)
    answer = served.client.post("/v1/explain", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert {found["source"], found["target"]} == {"dark", "blond"}
    assert found["prior"] == "portraits"
    (one,) = found["counterfactuals"]
    assert 0 <= one["target_probability"] <= 1
    assert set(found["hashes"]) >= {"prior", "classifier", "guide", "evaluator", "recipe", "image"}
    assert all(len(hash) == 64 for hash in found["hashes"].values())
    already = served.client.post("/v1/explain", json=body | {"target": found["source"]})
    assert (already.status_code, envelope_of(already)["code"]) == (422, "bad_target")
    for target in (2, "grey"):
        wrong = served.client.post("/v1/explain", json=body | {"target": target})
        assert (wrong.status_code, envelope_of(wrong)["code"]) == (422, "bad_target")
    truncated = body | {"image": base64_of(png()[:50])}
    assert served.client.post("/v1/explain", json=truncated).status_code == 422
    assert served.client.post("/v1/explain", json=body).json()["hashes"] == found["hashes"]


def test_a_clients_walk(served: Served) -> None:
    """Register, audit, follow, read, learn: with surrogates of two steps the verdict is worth nothing, but comes."""
    client = served.client
    registered = client.post("/v1/classifiers", json={"source": "portraits/student"})
    assert registered.json()["labels"] == ["dark", "blond"]
    job = client.post("/v1/audits", json=AUDIT, headers={"Idempotency-Key": "walk"}).json()
    states = []
    with client.stream("GET", job["links"]["events"], timeout=600) as events:
        for line in events.iter_lines():
            if line.startswith("data: ") and '"state"' in line:
                states.append(line)
    assert len(states) >= 3 and '"succeeded"' in states[-1], states
    links = client.get(job["links"]["self"]).json()["links"]
    report = client.get(links["result"]).json()
    assert report["verdict"] in ("PASS", "FAIL", "INCONCLUSIVE")
    gate = client.get(f"/v1/gate/{job['id']}").json()
    assert gate["exit_code"] == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}[report["verdict"]]
    page = client.get(links["report"])
    assert page.text.startswith("<!doctype html>") and "sandbox" in page.headers["content-security-policy"]
    assert "<testsuites" in client.get(links["junit"]).text
    with zipfile.ZipFile(io.BytesIO(client.get(links["archive"]).content)) as packed:
        assert {"report.json", "journal.jsonl"} <= set(packed.namelist())
    learned = client.post("/v1/cfkd", json={"audit": job["id"], "include_true": True}).json()
    until = time.monotonic() + 120
    while (state := client.get(learned["links"]["self"]).json())["state"] in ("queued", "running"):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert state["state"] == "succeeded", state
    if "dataset" in state["links"]:
        with zipfile.ZipFile(io.BytesIO(client.get(state["links"]["dataset"]).content)) as packed:
            assert "set/set.json" in packed.namelist()


def processes_of(folder: Path) -> dict[int, str]:
    """Every process of the server that was started in a folder, by its environment: workers are sessions of their own,
    and whoever lost its parent is nobody's child."""
    mark = f"PFUNGST_CONFIG={folder / 'pfungst.yaml'}".encode()
    found = {}
    for home in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended just now
            if mark in (home / "environ").read_bytes().split(b"\0"):
                found[int(home.name)] = (home / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def test_sigterm_ends_a_server_with_a_running_job_and_a_follower(tmp_path: Path) -> None:
    """The job goes back to the queue, the follower's stream ends, and nothing is left of the server."""
    (tmp_path / "pfungst.yaml").write_text("folder: data\nworkers: 1\nthreads: 1\nsurrogate_steps: 2\n")
    served = serve(tmp_path)
    job = served.client.post("/v1/audits", json={"classifier": "portraits/student"}).json()
    until = time.monotonic() + 120
    while served.client.get(job["links"]["self"]).json()["state"] != "running":
        assert time.monotonic() < until
        time.sleep(0.1)
    with (
        httpx.Client(base_url=served.client.base_url, trust_env=False, timeout=60) as follower,
        follower.stream("GET", job["links"]["events"]) as events,
    ):
        lines = events.iter_lines()
        assert next(lines) == "id: 1"
        assert end(served) < 10
        assert any("running" in line for line in lines)
    assert processes_of(tmp_path) == {}
    table = open_table(Configuration.load(tmp_path / "pfungst.yaml"))
    assert table.counts()["interrupted"] == 1
    table.close()


@pytest.fixture
def no_survivors(tmp_path: Path) -> Iterator[None]:
    """Ends what a test that failed halfway left of its server."""
    yield
    for pid in processes_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("no_survivors")
@pytest.mark.parametrize("with_workers", [False, True])
def test_a_killed_server_goes_on_after_its_restart(tmp_path: Path, with_workers: bool) -> None:
    """kill -9 of the server, or of the server and its workers as when the machine goes down, amid an audit."""
    (tmp_path / "pfungst.yaml").write_text(
        "folder: data\nworkers: 1\nthreads: 1\nnice: 0\nsurrogate_steps: 2\nsurrogate_pictures: 20\n"
        "sync_images: 2\nheartbeat_seconds: 0.2\nstale_seconds: 3\ngrace_seconds: 2\n"
    )
    audit = AUDIT | {"batch": 1, "steps": 2, "policy": POLICY | {"min_images": 5, "max_images": 5}}
    served = serve(tmp_path)
    job = served.client.post("/v1/audits", json=audit, headers={"Idempotency-Key": "once"}).json()
    journal = tmp_path / "data" / "work" / job["id"] / "journal.jsonl"

    def finished() -> list[bytes]:
        content = journal.read_bytes() if journal.is_file() else b""
        return content[: content.rfind(b"\n") + 1].splitlines()

    wait_for(lambda: len(finished()) >= 3)
    known = processes_of(tmp_path)
    workers = [pid for pid, command in known.items() if "service.worker" in command]
    assert len(workers) == 1 and len(known) > 1
    for pid in known:
        if with_workers or pid not in workers:
            os.kill(pid, signal.SIGKILL)
    served.process.wait(10)
    served.client.close()
    wait_for(lambda: not processes_of(tmp_path), 10)  # a worker does not outlive its server
    after_kill = finished()
    assert 3 <= len(after_kill) < 6, "it ended before it could be killed"

    served = serve(tmp_path)
    try:
        again = served.client.post("/v1/audits", json=audit, headers={"Idempotency-Key": "once"})
        assert (again.status_code, again.json()["id"]) == (200, job["id"])
        wait_for(lambda: served.client.get(job["links"]["self"]).json()["state"] not in WAITING)
        ended = served.client.get(job["links"]["self"]).json()
        assert ended["state"] == "succeeded", ended
        with zipfile.ZipFile(io.BytesIO(served.client.get(ended["links"]["archive"]).content)) as packed:
            lines = packed.read("journal.jsonl").splitlines()
        assert lines[: len(after_kill)] == after_kill
        rows = [json.loads(line)["row"] for line in lines[1:]]
        assert len(set(rows)) == len(rows) == 5
    finally:
        assert end(served) < 10
    assert processes_of(tmp_path) == {}


def wait_for(what: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)
