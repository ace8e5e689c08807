"""The OpenAPI document tells the truth: whatever is sent by it or against it, answers are as it says, and never 500."""

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.types import ASGIApp, Receive, Scope, Send

from service.configuration import Configuration
from service.http.app import behind_door
from service.http.routes import audits
from service.jobs import Job
from tests.service.http.conftest import LIMITS, open_backend

EXAMPLES = 2_000
"""In all, shared among the operations; half by the schema, half against it."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class FromHere:
    """The test client says another host and no address; without tokens only this machine is served."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [
                (b"host", b"127.0.0.1:3000"),
                *((name, value) for name, value in scope["headers"] if name != b"host"),
            ]
            scope = scope | {"client": ("127.0.0.1", 50_000), "server": ("127.0.0.1", 3000), "headers": headers}
        await self.app(scope, receive, send)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # of schemathesis and what it brings along
def test_no_example_gets_a_500_or_breaks_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_: Any, __: Any, job: Job, seconds: float) -> Job:
        return job  # no worker runs here, so nothing is gained by waiting

    monkeypatch.setattr(audits, "wait_for", at_once)
    # A full queue would answer 503, which the checks could not tell from a fault.
    limits = LIMITS | {"queue": 1_000_000}
    backend = open_backend(Configuration(folder=tmp_path / "data", workers=0, limits=limits))
    backend.start()
    schema = schemathesis.openapi.from_asgi("/v1/openapi.json", FromHere(behind_door(backend)))
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 25
    # Those with the least to vary come first, and what they leave over goes to those with bodies.
    rounds = [
        (operation, mode)
        for operation in sorted(operations, key=lambda one: (len(one.body), len(list(one.iter_parameters()))))
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    ]
    sent = 0
    for i, (operation, mode) in enumerate(rounds):

        @settings(
            max_examples=-(-(EXAMPLES - sent) // (len(rounds) - i)),
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            nonlocal sent
            sent += 1
            case.call_and_validate(checks=CHECKS)

        try:
            send()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # an operation without parameters cannot be asked wrongly
    backend.stop()
    assert sent >= EXAMPLES
