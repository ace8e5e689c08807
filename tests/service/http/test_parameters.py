"""Numbers and names out of range: refused with the field that is wrong, and nothing is queued."""

from typing import Any

import pytest

from tests.service.http.conftest import Service, base64_of, png

AUDIT: dict[str, Any] = {"classifier": "portraits/student"}
EXPLAIN: dict[str, Any] = {"classifier": "portraits/student", "image": base64_of(png())}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", 0),
        ("k", -1),
        ("k", 5),
        ("k", 1.5),
        ("k", True),
        ("k", "two"),
        ("k", None),
        ("steps", 0),
        ("steps", -3),
        ("steps", 51),
        ("steps", 10**6),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 10**400),
        ("seed", 0.5),
        ("prior", "sepia"),
        ("prior", "../portraits"),
        ("prior", ""),
        ("prior", "a\nb"),
        ("prior", "stabilityai/stable-diffusion-3-medium"),
        ("classifier", "portraits/oracle"),
        ("classifier", "nobody"),
        ("classifier", "../../etc/passwd"),
        ("classifier", "portraits/.."),
        ("classifier", "/etc/passwd"),
        ("classifier", ""),
        ("classifier", "f" * 32),
        ("classifier", 7),
        ("classifier", "x" * 10_000),
    ],
)
def test_a_wrong_setting_is_refused(service: Service, field: str, value: Any) -> None:
    for address, body in (("/v1/audits", AUDIT), ("/v1/gate", AUDIT), ("/v1/explain", EXPLAIN)):
        if address == "/v1/audits" and field == "k" and value == 5:
            assert "at most 4" in service.refuses(422, "bad_input", "POST", address, json={**body, field: value})
        service.refuses(422, None, "POST", address, json={**body, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch", 0),
        ("batch", 9),
        ("dataset", "nothing"),
        ("dataset", "../data"),
        ("dataset", "f" * 32),
        ("teacher", "nobody"),
        ("teacher", "portraits/twin"),
        ("runtime", "abacus"),
        ("policy", {"limit": 0}),
        ("policy", {"limit": 1.5}),
        ("policy", {"limit": "NaN"}),
        ("policy", {"limit": True}),
        ("policy", {"alpha": 0.5}),
        ("policy", {"min_images": 0}),
        ("policy", {"min_images": 300}),
        ("policy", {"accepted": [{"direction": "a -> b"}]}),
        ("policy", []),
        ("policy", "strict"),
    ],
)
def test_a_wrong_setting_of_an_audit_is_refused(service: Service, field: str, value: Any) -> None:
    service.refuses(422, None, "POST", "/v1/audits", json={**AUDIT, field: value})
    service.refuses(422, None, "POST", "/v1/gate", json={**AUDIT, field: value})


@pytest.mark.parametrize("seconds", [-1, 601, "long", None, True])
def test_a_gate_waits_for_a_sensible_time(service: Service, seconds: Any) -> None:
    body = {**AUDIT, "wait_seconds": seconds}
    service.refuses(422, "invalid", "POST", "/v1/gate", json=body, field="wait_seconds")


@pytest.mark.parametrize("seconds", [0, -1, 601, "NaN"])
def test_an_explanation_waits_for_a_sensible_time(service: Service, seconds: Any) -> None:
    body = {**EXPLAIN, "timeout_seconds": seconds}
    service.refuses(422, "invalid", "POST", "/v1/explain", json=body, field="timeout_seconds")


@pytest.mark.parametrize("target", [1.5, -1, [], {}, True, "", "a\0b", "x" * 300])
def test_a_target_is_an_index_or_a_name(service: Service, target: Any) -> None:
    service.refuses(422, "invalid", "POST", "/v1/explain", json={**EXPLAIN, "target": target})


@pytest.mark.parametrize("id", ["..", "%2e%2e", "x", "0" * 31, "0" * 33, "A" * 32, "..%2f..%2fetc", "0" * 32 + "/.."])
def test_an_id_that_is_none_is_refused(service: Service, id: str) -> None:
    for address in (f"/v1/audits/{id}", f"/v1/audits/{id}/report.html", f"/v1/cfkd/{id}/dataset.zip", f"/v1/gate/{id}"):
        before = service.traces()
        answer = service.client.get(address)
        assert answer.status_code in (404, 422) or address.endswith(".."), (address, answer.text)
        assert "root:" not in answer.text
        assert service.traces() == before
    assert service.client.delete(f"/v1/classifiers/{id}").status_code in (404, 405, 422)


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
