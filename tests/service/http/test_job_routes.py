"""Jobs over HTTP, without workers: submit, list, follow, cancel, and what finished jobs show."""

import base64
import hashlib
import io
import json
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

from service.jobs import JobState
from tests.service.http.conftest import Service

AUDIT: dict[str, Any] = {"classifier": "portraits/student"}
RESULT = {"verdict": "FAIL", "exit_code": 1, "headline": "It leans on earrings.", "reasons": ["too much"]}
PAGE = "<html><head><style>p { color: red }</style></head><body><p>&lt;script&gt;</p></body></html>"


def submit(service: Service, **headers: str) -> dict[str, Any]:
    answer = service.client.post("/v1/audits", json=AUDIT, headers=headers)
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


def finish(service: Service, id: str, tmp_path: Path, state: JobState = JobState.SUCCEEDED, **values: Any) -> None:
    """What a worker does at its end."""
    job = service.backend.jobs.claim("worker")
    assert job is not None and job.id == id
    if state is JobState.SUCCEEDED:
        files = {
            "report.json": json.dumps(RESULT),
            "report.html": PAGE,
            "junit.xml": "<testsuites/>",
            "summary.md": "#",
        }
        for name, text in {**files, "counterfactuals/1.png": "png", "surrogates/a.json": "{}"}.items():
            (tmp_path / "file").write_text(text)
            service.backend.artifacts.put(id, name, tmp_path / "file")
        values = {"result": RESULT, **values}
    assert service.backend.jobs.finish(id, "worker", state, **values)


def test_an_audit_is_queued_with_every_default_filled_in(service: Service) -> None:
    answer = service.client.post("/v1/audits", json=AUDIT)
    job = answer.json()
    assert answer.headers["location"] == job["links"]["self"] == f"/v1/audits/{job['id']}"
    assert job["state"] == "queued"
    assert (job["request"]["dataset"], job["request"]["k"], job["request"]["seed"]) == ("portraits", 1, 0)
    assert job["request"]["policy"]["limit"] == 0.2
    assert service.client.get(f"/v1/audits/{job['id']}").json() == job
    assert set(job["links"]) == {"self", "events", "cancel"}


def test_the_same_key_runs_once(service: Service) -> None:
    key = {"Idempotency-Key": "build-7"}
    first = service.client.post("/v1/audits", json=AUDIT, headers=key)
    again = service.client.post("/v1/audits", json=AUDIT, headers=key)
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["id"] == again.json()["id"]
    gate = service.client.post("/v1/gate", json=AUDIT, headers=key)
    assert gate.json()["audit"] == first.json()["id"]
    assert service.backend.jobs.counts()["queued"] == 1
    other = {"json": AUDIT | {"k": 2}, "headers": key}
    service.refuses(409, "idempotency_conflict", "POST", "/v1/audits", field="Idempotency-Key", **other)
    for bad in ("", "a b", "x" * 201):
        service.refuses(422, "invalid", "POST", "/v1/audits", json=AUDIT, headers={"Idempotency-Key": bad})


def test_a_key_that_many_send_at_once_runs_once(service: Service) -> None:
    ids: list[str] = []

    def send() -> None:
        answer = service.client.post("/v1/audits", json=AUDIT, headers={"Idempotency-Key": "race"})
        ids.append(answer.json()["id"])

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 6 and len(set(ids)) == 1
    assert service.backend.jobs.counts()["queued"] == 1


def test_a_full_queue_refuses_and_still_tells(service: Service) -> None:
    first, *_ = (submit(service) for _ in range(5))
    service.refuses(503, "queue_full", "POST", "/v1/audits", json=AUDIT)
    service.refuses(503, "queue_full", "POST", "/v1/gate", json=AUDIT)
    assert service.client.get(first["links"]["self"]).json()["state"] == "queued"


def test_jobs_are_listed_by_pages_newest_first(service: Service) -> None:
    ids = [submit(service)["id"] for _ in range(5)]
    page = service.client.get("/v1/audits?limit=2").json()
    assert [job["id"] for job in page["jobs"]] == ids[:2:-1]
    rest = service.client.get(f"/v1/audits?limit=200&before={page['next']}").json()
    assert [job["id"] for job in rest["jobs"]] == ids[2::-1]
    assert rest["next"] is None
    assert service.client.get("/v1/audits?state=running").json()["jobs"] == []
    assert service.client.get("/v1/cfkd").json()["jobs"] == []
    service.refuses(404, "not_found", "GET", f"/v1/cfkd/{ids[0]}")


def test_cancel_queued_running_finished_and_unknown(service: Service) -> None:
    queued = submit(service)
    told = service.client.post(queued["links"]["cancel"])
    assert (told.status_code, told.json()["state"]) == (202, "cancelled")
    assert service.backend.jobs.claim("worker") is None
    message = service.refuses(409, "finished", "POST", queued["links"]["cancel"])
    assert message == "The job has ended already: it is cancelled."
    running = submit(service)
    assert service.backend.jobs.claim("worker") is not None
    told = service.client.post(running["links"]["cancel"])
    assert told.status_code == 202
    assert (told.json()["state"], told.json()["cancel_requested"]) == ("running", True)
    assert service.client.post(running["links"]["cancel"]).status_code == 202
    service.refuses(404, "not_found", "POST", f"/v1/audits/{'0' * 32}/cancel")
    service.refuses(404, "not_found", "POST", f"/v1/cfkd/{running['id']}/cancel")


def test_a_job_that_succeeded_or_failed_is_not_cancelled(service: Service, tmp_path: Path) -> None:
    for state, values in (
        (JobState.SUCCEEDED, {}),
        (JobState.FAILED, {"error": {"code": "bad_model", "message": "The classifier answered with NaN."}}),
    ):
        job = submit(service)
        finish(service, job["id"], tmp_path, state, **values)
        before = service.client.get(job["links"]["self"]).json()
        events = service.client.get(job["links"]["events"]).text
        message = service.refuses(409, "finished", "POST", job["links"]["cancel"])
        assert message == f"The job has ended already: it is {state}."
        assert service.client.get(job["links"]["self"]).json() == before
        assert (before["state"], before["cancel_requested"]) == (state, False)
        assert service.client.get(job["links"]["events"]).text == events


def test_progress_and_time_left_are_told(service: Service) -> None:
    job = submit(service)
    service.backend.jobs.claim("worker")
    progress = {"stage": "auditing", "done": 3, "total": 20, "seconds_left": 51.0}
    service.backend.jobs.beat(job["id"], "worker", progress)
    told = service.client.get(job["links"]["self"]).json()
    assert (told["state"], told["progress"]) == ("running", progress)
    assert service.client.get(f"/v1/gate/{job['id']}").json()["progress"] == progress


def test_events_are_streamed_until_the_end_and_can_be_taken_up_again(service: Service, tmp_path: Path) -> None:
    job = submit(service)
    finish(service, job["id"], tmp_path)
    answer = service.client.get(job["links"]["events"])
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in answer.text.strip().split("\n\n")]
    assert [event["id"] for event in events] == ["1", "2", "3"]
    assert [json.loads(event["data"])["state"] for event in events] == ["queued", "running", "succeeded"]
    rest = service.client.get(job["links"]["events"], headers={"Last-Event-ID": "2"}).text
    assert rest == service.client.get(f"{job['links']['events']}?after=2").text
    assert rest.startswith("id: 3\n") and rest.count("id: ") == 1
    assert service.client.get(job["links"]["events"], headers={"Last-Event-ID": "nonsense"}).text == answer.text


def test_what_an_audit_left_behind(service: Service, tmp_path: Path) -> None:
    job = submit(service)
    for part in ("result", "report.html", "junit.xml", "summary.md", "archive.zip"):
        service.refuses(409, "not_finished", "GET", f"{job['links']['self']}/{part}")
    finish(service, job["id"], tmp_path)
    links = service.client.get(job["links"]["self"]).json()["links"]
    assert service.client.get(links["result"]).json() == RESULT
    assert service.client.get(links["junit"]).headers["content-type"] == "application/xml"
    assert service.client.get(links["summary"]).text == "#"
    with zipfile.ZipFile(io.BytesIO(service.client.get(links["archive"]).content)) as packed:
        assert set(packed.namelist()) == {
            "report.json",
            "report.html",
            "junit.xml",
            "summary.md",
            "counterfactuals/1.png",
        }


def test_a_report_may_show_its_pictures_and_its_style_and_nothing_else(service: Service, tmp_path: Path) -> None:
    job = submit(service)
    finish(service, job["id"], tmp_path)
    answer = service.client.get(f"{job['links']['self']}/report.html")
    assert answer.text == PAGE
    policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert "script-src" not in policy and "unsafe-inline" not in answer.headers["content-security-policy"]
    assert policy["img-src"] == "data:"
    digest = base64.b64encode(hashlib.sha256(b"p { color: red }").digest()).decode()
    assert policy["style-src"] == f"'sha256-{digest}'"
    assert "sandbox" in policy and policy["frame-ancestors"] == "'none'"


def test_a_failed_audit_says_why(service: Service, tmp_path: Path) -> None:
    job = submit(service)
    error = {"code": "bad_model", "message": "The classifier answered with NaN."}
    finish(service, job["id"], tmp_path, JobState.FAILED, error=error)
    assert service.client.get(job["links"]["self"]).json()["error"] == error
    message = service.refuses(409, "failed", "GET", f"{job['links']['self']}/result")
    assert "answered with NaN" in message
    gate = service.client.get(f"/v1/gate/{job['id']}")
    assert gate.status_code == 200
    assert (gate.json()["verdict"], gate.json()["exit_code"], gate.json()["error"]) == (None, 4, error)


def test_the_gate_answers_at_once_later_or_not_yet(service: Service, tmp_path: Path) -> None:
    early = service.client.post("/v1/gate", json=AUDIT)
    assert early.status_code == 202
    assert (early.json()["verdict"], early.json()["exit_code"]) == (None, None)
    id = early.json()["audit"]
    start = time.monotonic()
    assert service.client.get(f"/v1/gate/{id}?wait_seconds=0.3").status_code == 202
    assert time.monotonic() - start >= 0.3
    later = threading.Timer(0.3, finish, (service, id, tmp_path))
    later.start()
    found = service.client.get(f"/v1/gate/{id}?wait_seconds=60")
    later.join()
    assert found.status_code == 200
    assert (found.json()["verdict"], found.json()["exit_code"]) == ("FAIL", 1)
    assert found.json()["headline"] == RESULT["headline"]
    assert found.json()["links"]["report"] == f"/v1/audits/{id}/report.html"


def test_a_debiasing_set_needs_an_audit_that_succeeded(service: Service, tmp_path: Path) -> None:
    job = submit(service)
    learn: dict[str, Any] = {"audit": job["id"]}
    service.refuses(409, "conflict", "POST", "/v1/cfkd", json=learn)
    service.refuses(404, "not_found", "POST", "/v1/cfkd", json={"audit": "0" * 32})
    finish(service, job["id"], tmp_path)
    wrongs: list[tuple[str, Any, str]] = [
        ("steps", 0, "invalid"),
        ("rate", 2, "invalid"),
        ("rounds", 0, "invalid"),
        ("audit", "..", "invalid"),
        ("train", "nothing", "unknown_dataset"),
        ("test", "nothing", "unknown_dataset"),
    ]
    for field, value, code in wrongs:
        service.refuses(422, code, "POST", "/v1/cfkd", json=learn | {field: value}, field=field)
    service.refuses(422, "bad_input", "POST", "/v1/cfkd", json=learn | {"steps": 51})
    answer = service.client.post("/v1/cfkd", json=learn | {"steps": 50})
    assert answer.status_code == 202, answer.text
    made = answer.json()
    service.refuses(409, "not_finished", "GET", f"{made['links']['self']}/dataset.zip")
    claimed = service.backend.jobs.claim("worker")
    assert claimed is not None
    (tmp_path / "set.zip").write_bytes(b"PK")
    service.backend.artifacts.put(made["id"], "set.zip", tmp_path / "set.zip")
    service.backend.jobs.finish(made["id"], "worker", JobState.SUCCEEDED, {"counterfactuals": 3})
    links = service.client.get(made["links"]["self"]).json()["links"]
    assert "classifier" not in links
    packed = service.client.get(links["dataset"])
    assert (packed.content, packed.headers["content-length"]) == (b"PK", "2")
    assert packed.headers["content-disposition"] == 'attachment; filename="set.zip"'
    service.refuses(404, "not_found", "GET", f"{made['links']['self']}/classifier.zip")
    assert service.client.get(links["result"]).json() == {"counterfactuals": 3}


def test_priors_and_runtimes_are_listed(service: Service) -> None:
    priors = service.client.get("/v1/priors").json()["priors"]
    assert [(one["name"], one["ready"]) for one in priors] == [("portraits", True), ("histology", True)]
    runtimes = {one["name"]: one["ready"] for one in service.client.get("/v1/runtimes").json()["runtimes"]}
    assert set(runtimes) == {"torch", "onnxruntime", "tensorrt"}
    assert runtimes["torch"] and runtimes["onnxruntime"]


def test_figures_for_prometheus(alone: Service) -> None:
    submit(alone)
    text = alone.client.get("/metrics").text
    assert 'pfungst_jobs{state="queued"} 1.0' in text
    assert 'pfungst_questions_waiting{kind="explain"} 0.0' in text
    assert 'pfungst_request_seconds_count{method="POST"' in text
    assert "process_resident_memory_bytes" in text
