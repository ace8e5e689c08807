"""Numbers and names out of range: refused with the field that is wrong, and nothing is queued."""

import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from audit.images import decode_image, to_square
from service.cases import open_classifier_id
from service.http.explanations import Explanations, Shelf
from tests.service.http.conftest import Counted, Service, base64_of, envelope_of, png

AUDIT: dict[str, Any] = {"classifier": "portraits/student"}
EXPLAIN: dict[str, Any] = {"classifier": "portraits/student", "image": base64_of(png())}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", 0),
        ("k", -1),
        ("k", 1.5),
        ("k", True),
        ("k", "two"),
        ("k", None),
        ("steps", 0),
        ("steps", -3),
        ("steps", 10**6),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 10**400),
        ("seed", 0.5),
        ("prior", ""),
        ("prior", "a\nb"),
        ("classifier", "../../etc/passwd"),
        ("classifier", "portraits/.."),
        ("classifier", "/etc/passwd"),
        ("classifier", ""),
        ("classifier", 7),
        ("classifier", "x" * 10_000),
    ],
)
def test_a_wrong_setting_is_refused(service: Service, field: str, value: Any) -> None:
    for address, body in (("/v1/audits", AUDIT), ("/v1/gate", AUDIT), ("/v1/explain", EXPLAIN)):
        service.refuses(422, "invalid", "POST", address, json={**body, field: value}, field=field)


@pytest.mark.parametrize(
    ("field", "value", "audited", "explained"),
    [
        ("k", 5, "bad_input", "invalid"),
        ("steps", 51, "bad_input", "invalid"),
        ("prior", "sepia", "bad_input", "unknown_prior"),
        ("prior", "../portraits", "bad_input", "unknown_prior"),
        ("prior", "stabilityai/stable-diffusion-3-medium", "bad_input", "unknown_prior"),
        ("classifier", "portraits/oracle", "unknown_classifier", "unknown_classifier"),
        ("classifier", "nobody", "unknown_classifier", "unknown_classifier"),
        ("classifier", "f" * 32, "unknown_classifier", "unknown_classifier"),
    ],
)
def test_a_setting_that_this_service_does_not_allow_is_refused(
    service: Service, field: str, value: Any, audited: str, explained: str
) -> None:
    named = field if audited == explained else None
    for address in ("/v1/audits", "/v1/gate"):
        message = service.refuses(422, audited, "POST", address, json={**AUDIT, field: value}, field=named)
        assert field in message
    service.refuses(422, explained, "POST", "/v1/explain", json={**EXPLAIN, field: value}, field=field)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("batch", 0, "invalid"),
        ("batch", 9, "bad_input"),
        ("dataset", "nothing", "unknown_dataset"),
        ("dataset", "../data", "invalid"),
        ("dataset", "f" * 32, "unknown_dataset"),
        ("teacher", "nobody", "unknown_classifier"),
        ("teacher", "portraits/twin", "bad_input"),
        ("runtime", "abacus", "invalid"),
        ("policy", {"limit": 0}, "bad_input"),
        ("policy", {"limit": 1.5}, "bad_input"),
        ("policy", {"limit": "NaN"}, "bad_input"),
        ("policy", {"limit": True}, "bad_input"),
        ("policy", {"alpha": 0.5}, "bad_input"),
        ("policy", {"min_images": 0}, "bad_input"),
        ("policy", {"min_images": 300}, "bad_input"),
        ("policy", {"accepted": [{"direction": "a -> b"}]}, "bad_input"),
        ("policy", [], "invalid"),
        ("policy", "strict", "invalid"),
    ],
)
def test_a_wrong_setting_of_an_audit_is_refused(service: Service, field: str, value: Any, code: str) -> None:
    named = None if code == "bad_input" else field
    service.refuses(422, code, "POST", "/v1/audits", json={**AUDIT, field: value}, field=named)
    service.refuses(422, code, "POST", "/v1/gate", json={**AUDIT, field: value}, field=named)


@pytest.mark.parametrize("seconds", [-1, 601, "long", None, True])
def test_a_gate_waits_for_a_sensible_time(service: Service, seconds: Any) -> None:
    body = {**AUDIT, "wait_seconds": seconds}
    service.refuses(422, "invalid", "POST", "/v1/gate", json=body, field="wait_seconds")


@pytest.mark.parametrize("seconds", [0, -1, 601, "NaN"])
def test_an_explanation_waits_for_a_sensible_time(service: Service, seconds: Any) -> None:
    body = {**EXPLAIN, "timeout_seconds": seconds}
    service.refuses(422, "invalid", "POST", "/v1/explain", json=body, field="timeout_seconds")


@pytest.mark.parametrize("target", [1.5, -1, 100_001, 10**400, [], {}, True, "", "a\0b", "x" * 300])
def test_a_target_is_an_index_or_a_name(service: Service, target: Any) -> None:
    service.refuses(422, "invalid", "POST", "/v1/explain", json={**EXPLAIN, "target": target}, field="target")


@pytest.fixture
def judging(service: Service, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the embedded classifier says of the picture. The device asks it too, and an edit that is begun is a 500."""
    classifier = open_classifier_id("portraits/student", service.backend.configuration)
    shelf: Shelf[Any] = Shelf()
    shelf.get("portraits", lambda: SimpleNamespace(size=64))
    monkeypatch.setattr(service.backend.explanations, "priors", shelf)
    monkeypatch.setattr(Counted, "__call__", Explanations.__call__)
    monkeypatch.setattr(Counted, "_explainer", lambda *_: SimpleNamespace(classifier=classifier))

    def begun(*_: Any, **__: Any) -> None:
        raise AssertionError("an edit was begun")

    monkeypatch.setattr("audit.answers.explain_together", begun)
    shown = to_square(decode_image(png()), 64)
    return classifier.labels[int(classifier.probabilities(shown[None]).argmax())]


def test_a_target_that_is_the_class_already_or_is_none_is_refused(
    service: Service, judging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = ("dark", "blond").index(judging)
    for target, sentence in (
        (judging, f"The classifier says {judging!r} already; choose another target."),
        (index, f"The classifier says {judging!r} already; choose another target."),
        (2, "The target 2 is out of range; the classifier has 2 classes."),
        (100_000, "The target 100000 is out of range; the classifier has 2 classes."),
        ("grey", "The target 'grey' is unknown; the classifier knows: dark, blond."),
        ("Dark", "The target 'Dark' is unknown; the classifier knows: dark, blond."),
    ):
        asked = EXPLAIN | {"target": target}
        assert service.refuses(422, "bad_target", "POST", "/v1/explain", json=asked) == sentence
        form: dict[str, Any] = {
            "files": {"image": ("a.png", png())},
            "data": {"settings": json.dumps({"classifier": "portraits/student", "target": target})},
        }
        assert service.refuses(422, "bad_target", "POST", "/v1/explain/upload", **form) == sentence
    monkeypatch.undo()
    assert service.client.post("/v1/explain", json=EXPLAIN).status_code == 200


def as_written(service: Service, method: str, address: str) -> httpx.Response:
    """The answer to an address that no client tidied up: dots and percent signs arrive as they are written."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(address),  # as a server hands it on
        "raw_path": address.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:3000")],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 3000),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    assert service.client.portal is not None
    service.client.portal.call(service.client.app, scope, receive, send)
    start, *parts = sent
    return httpx.Response(start["status"], headers=start["headers"], content=b"".join(p["body"] for p in parts))


def refused_as_written(service: Service, status: int, code: str, method: str, address: str) -> None:
    before = service.traces()
    answer = as_written(service, method, address)
    assert (answer.status_code, envelope_of(answer)["code"]) == (status, code), (address, answer.text)
    assert service.traces() == before
    assert as_written(service, "GET", "/v1/audits").status_code == 200


@pytest.mark.parametrize(
    "id",
    [
        "..",
        "%2e%2e",
        ".",
        "%00",
        "x",
        "0" * 31,
        "0" * 33,
        "A" * 32,
        "0" * 32 + "%0a",
        "..%2f..%2fetc",
        "0" * 32 + "/..",
    ],
)
def test_an_id_that_is_none_is_refused(service: Service, id: str) -> None:
    """A slash makes two parts of an id, and there is nothing at such an address; every other id is judged."""
    status, code = (404, "not_found") if "/" in unquote(id) else (422, "invalid")
    for method, address in (
        ("GET", f"/v1/audits/{id}"),
        ("GET", f"/v1/audits/{id}/report.html"),
        ("GET", f"/v1/cfkd/{id}/dataset.zip"),
        ("GET", f"/v1/gate/{id}"),
        ("POST", f"/v1/audits/{id}/cancel"),
        ("DELETE", f"/v1/classifiers/{id}"),
        ("DELETE", f"/v1/datasets/{id}"),
    ):
        refused_as_written(service, status, code, method, address)


def test_an_address_is_not_walked_up(service: Service) -> None:
    """Each of these would be a list, a job or an upload if its dots were followed."""
    job = service.client.post("/v1/audits", json=AUDIT).json()["id"]
    assert as_written(service, "GET", f"/v1/audits/{job}").json()["id"] == job
    for up in ("..", "%2e%2e", ".%2E"):
        for address in (
            f"/v1/audits/{job}/{up}",
            f"/v1/audits/{job}/{up}/{job}",
            f"/v1/audits/{job}%2f{up}",
            f"/v1/audits/{up}/classifiers",
            f"/v1/audits/{up}/{up}/metrics",
            f"/v1/{up}",
            f"/v1/{up}/metrics",
        ):
            refused_as_written(service, 404, "not_found", "GET", address)
        refused_as_written(service, 422, "invalid", "GET", f"/v1/audits/{up}")
        refused_as_written(service, 404, "not_found", "POST", f"/v1/audits/{job}/{up}/cancel")
    assert as_written(service, "GET", f"/v1/audits/{job}").json()["state"] == "queued"


@pytest.mark.parametrize("query", ["limit=0", "limit=201", "limit=x", "state=lost", "before=..", "limit=9" + "9" * 400])
def test_a_wrong_query_is_refused(service: Service, query: str) -> None:
    service.refuses(422, "invalid", "GET", f"/v1/audits?{query}")


def test_a_page_before_an_unknown_job_is_refused(service: Service) -> None:
    service.refuses(404, "not_found", "GET", f"/v1/audits?before={'0' * 32}")


def test_settings_reach_the_device_as_they_were_given(service: Service) -> None:
    body = {**EXPLAIN, "k": 2, "steps": 7, "seed": 2**63 - 1, "target": "blond", "prior": "portraits"}
    found = service.client.post("/v1/explain", json=body)
    assert found.status_code == 200
    assert len(found.json()["counterfactuals"]) == 2
    ((kind, (question,)),) = service.explained
    assert (kind.classifier, kind.prior, kind.k, kind.steps) == ("portraits/student", "portraits", 2, 7)
    assert (question.target, question.seed) == ("blond", 2**63 - 1)
