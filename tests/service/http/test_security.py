"""Who may ask what: tokens, scopes, owners, and the loopback interface where there are no tokens."""

import hmac
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InputError
from service.configuration import Configuration
from service.http import security
from service.jobs import JobState
from tests.service.http.conftest import Service, as_, base64_of, envelope_of, png
from tests.service.http.test_job_routes import finish

AUDIT = {"classifier": "portraits/student"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer nobody"},
        {"Authorization": "Bearer alice-secre"},
        {"Authorization": "Bearer alice-secret2"},
        {"Authorization": "Basic alice-secret"},
        {"Authorization": "alice-secret"},
        {"Authorization": "Bearer " + "x" * 5000},
    ],
)
def test_without_a_token_nothing_is_told(guarded: Service, headers: dict[str, str]) -> None:
    for address in ("/v1/classifiers", "/v1/audits", "/metrics", "/v1/openapi.json", "/v1/nothing", "/nothing"):
        answer = guarded.client.get(address, headers=headers)
        assert answer.status_code == 401
        assert envelope_of(answer)["code"] == "unauthorized"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert guarded.client.get("/v1/classifiers", headers=as_("alice")).status_code == 200


def test_a_body_is_not_read_before_the_token(guarded: Service) -> None:
    read: list[int] = []

    def body() -> Any:
        read.append(1)
        yield b"{}"

    answer = guarded.client.post("/v1/audits", content=body(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 401
    assert guarded.traces()[0]["queued"] == 0


def test_scopes_open_what_they_name(guarded: Service) -> None:
    post = guarded.client.post
    assert guarded.client.get("/v1/audits", headers=as_("watcher")).status_code == 200
    answer = post("/v1/audits", json=AUDIT, headers=as_("watcher"))
    assert answer.status_code == 403
    assert envelope_of(answer)["code"] == "forbidden"
    body = AUDIT | {"image": base64_of(png())}
    assert post("/v1/explain", json=body, headers=as_("watcher")).status_code == 403
    assert post("/v1/audits", json=AUDIT, headers=as_("alice")).status_code == 202
    assert post("/v1/classifiers", json={"source": "portraits/twin"}, headers=as_("alice")).status_code == 403
    assert guarded.traces()[0]["queued"] == 1


def test_another_tokens_job_is_404(guarded: Service) -> None:
    job = guarded.client.post("/v1/audits", json=AUDIT, headers=as_("alice")).json()
    home = f"/v1/audits/{job['id']}"
    for method, address in (
        ("GET", home),
        ("GET", f"{home}/events"),
        ("GET", f"{home}/result"),
        ("GET", f"{home}/report.html"),
        ("GET", f"{home}/junit.xml"),
        ("GET", f"{home}/summary.md"),
        ("GET", f"{home}/archive.zip"),
        ("GET", f"/v1/gate/{job['id']}"),
        ("POST", f"{home}/cancel"),
    ):
        for other in ("bob", "root"):
            answer = guarded.client.request(method, address, headers=as_(other))
            assert answer.status_code == 404, (other, address)
            assert envelope_of(answer)["code"] == "not_found"
    learn = {"audit": job["id"]}
    assert guarded.client.post("/v1/cfkd", json=learn, headers=as_("bob")).status_code == 404
    assert guarded.client.get("/v1/audits", headers=as_("bob")).json()["jobs"] == []
    assert guarded.client.get(home, headers=as_("alice")).json()["state"] == "queued"


def test_another_tokens_finished_jobs_are_404(guarded: Service, tmp_path: Path) -> None:
    """All files are there and their owner gets them, an audit's and a cfkd job's; nobody else does, nor can cancel."""
    audit = guarded.client.post("/v1/audits", json=AUDIT, headers=as_("alice")).json()
    finish(guarded, audit["id"], tmp_path)
    asked = {"audit": audit["id"], "finetune": True, "steps": 50}
    answer = guarded.client.post("/v1/cfkd", json=asked, headers=as_("alice"))
    assert answer.status_code == 202, answer.text
    learned = answer.json()
    assert guarded.backend.jobs.claim("worker") is not None
    (tmp_path / "packed").write_bytes(b"PK")
    for name in ("set.zip", "classifier.zip"):
        guarded.backend.artifacts.put(learned["id"], name, tmp_path / "packed")
    guarded.backend.jobs.finish(learned["id"], "worker", JobState.SUCCEEDED, {"counterfactuals": 3})
    for job, parts in (
        (audit, ("result", "report.html", "junit.xml", "summary.md", "archive.zip", "events")),
        (learned, ("result", "dataset.zip", "classifier.zip", "events")),
    ):
        home = job["links"]["self"]
        addresses = [("GET", home), *(("GET", f"{home}/{part}") for part in parts)]
        for other in ("bob", "watcher", "root"):
            for method, address in (*addresses, ("POST", f"{home}/cancel")):
                before = guarded.traces()
                refused = guarded.client.request(method, address, headers=as_(other))
                no_scope = (other, method) == ("watcher", "POST")
                expected = (403, "forbidden") if no_scope else (404, "not_found")
                assert (refused.status_code, envelope_of(refused)["code"]) == expected, (other, address)
                assert guarded.traces() == before
                assert guarded.client.get("/v1/audits", headers=as_(other)).json()["jobs"] == []
        for method, address in addresses:
            assert guarded.client.request(method, address, headers=as_("alice")).status_code == 200, address
    assert guarded.client.get("/v1/cfkd", headers=as_("bob")).json()["jobs"] == []


def test_an_idempotency_key_is_its_owners(guarded: Service) -> None:
    ids = [
        guarded.client.post("/v1/audits", json=AUDIT, headers=as_(name) | {"Idempotency-Key": "same"}).json()["id"]
        for name in ("alice", "bob", "alice")
    ]
    assert ids[0] == ids[2] != ids[1]


def test_every_token_is_compared_in_constant_time(guarded: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    class Watched:
        @staticmethod
        def compare_digest(a: str, b: str) -> bool:
            compared.append(a)
            return hmac.compare_digest(a, b)

    monkeypatch.setattr(security, "hmac", Watched)
    assert guarded.client.get("/v1/audits", headers=as_("alice")).status_code == 200
    assert compared == [token.sha256 for token in guarded.backend.configuration.tokens]


def test_secrets_are_stored_and_logged_nowhere(guarded: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "pfungst"):
        guarded.client.get("/v1/audits?secret=alice-secret", headers=as_("alice"))
        guarded.client.get("/v1/audits", headers={"Authorization": "Bearer wrong-secret"})
    assert "GET /audits 200" in caplog.text or "GET /v1/audits 200" in caplog.text
    assert "secret" not in caplog.text
    stored = b"".join(path.read_bytes() for path in guarded.folder.rglob("*") if path.is_file())
    assert b"alice-secret" not in stored


def local(service: Service, headers: dict[str, str]) -> int:
    return int(service.client.get("/v1/classifiers", headers=headers).status_code)


def test_without_tokens_only_this_machine_is_answered(service: Service) -> None:
    door = service.client.app
    headers = [(b"host", b"127.0.0.1:3000")]
    for server, client in ((("10.0.0.5", 3000), ("10.0.0.7", 1)), (("127.0.0.1", 3000), ("10.0.0.7", 1))):
        scope = {"type": "http", "path": "/", "headers": headers, "server": server, "client": client}
        with pytest.raises(security.Refused) as refusal:
            door.guard.caller(scope)  # type: ignore[union-attr]
        assert refusal.value.status_code == 403
    for address in ("127.0.0.1", "127.8.8.8", "::1"):
        scope = {"type": "http", "path": "/", "headers": headers, "server": (address, 1), "client": (address, 2)}
        assert door.guard.caller(scope) == security.LOCAL  # type: ignore[union-attr]


def test_without_tokens_other_web_pages_are_not_served(service: Service) -> None:
    for host in ("127.0.0.1:3000", "localhost:3000", "localhost", "[::1]:3000", "[::1]"):
        assert local(service, {"Host": host}) == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:3000", "", "10.0.0.1"):
        assert local(service, {"Host": host}) == 403, host
    assert local(service, {"Host": "localhost:3000", "Origin": "http://localhost:3000"}) == 200
    for origin in ("http://evil.example", "null", "http://localhost:3001", "http://localhost:3000.evil.example"):
        assert local(service, {"Host": "localhost:3000", "Origin": origin}) == 403, origin


def test_any_other_address_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs tokens"):
        Configuration(folder=tmp_path, host="0.0.0.0")


def test_health_is_asked_without_a_token(guarded: Service) -> None:
    """BentoML answers these; here it is enough that the door lets them through to the application's 404."""
    for address in ("/livez", "/readyz", "/healthz"):
        assert guarded.client.get(address).status_code == 404
