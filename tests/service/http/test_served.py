"""`bentoml serve` as a process: what BentoML itself decides, a client's walk, and its end."""

import io
import socket
import time
import zipfile
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
    table = open_table(Configuration.load(tmp_path / "pfungst.yaml"))
    assert table.counts()["interrupted"] == 1
    table.close()
