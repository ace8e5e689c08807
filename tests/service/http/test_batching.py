"""The device's thread: questions of many requests in one batch, and nothing that holds it after it was given up."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from starlette.requests import Request

from engine.errors import Cancelled, InputError
from service.http.batching import Closed, Device, Full, NobodyWaits
from service.http.errors import Refused
from service.http.routes.explain import patiently
from tests.service.http.conftest import Service, base64_of, envelope_of, png

Work = Callable[[Any, Sequence[Any], NobodyWaits], Sequence[Any]]


class Steps:
    """Work of many small steps that asks its token at each, as the engine does."""

    def __init__(self) -> None:
        self.started, self.ended = threading.Event(), threading.Event()
        self.batches: list[list[Any]] = []
        self.let_go = threading.Event()

    def __call__(self, kind: Any, questions: Sequence[Any], cancel: NobodyWaits) -> Sequence[Any]:
        self.batches.append(list(questions))
        self.started.set()
        try:
            while not self.let_go.is_set():
                if cancel.is_set():
                    raise Cancelled("the token was set")
                time.sleep(0.002)
            return [f"{kind}: {question}" for question in questions]
        finally:
            self.ended.set()


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def device(steps: Steps) -> Iterator[Device[Any, Any]]:
    found: Device[Any, Any] = Device(steps, batch=3, queue=5, window=0.05)
    found.start()
    yield found
    assert found.stop(20)


def test_questions_of_one_kind_are_answered_together(device: Device[Any, Any], steps: Steps) -> None:
    steps.let_go.set()
    asked = [device.ask("a", i) for i in range(3)] + [device.ask("b", 9)]
    assert [one.answer.result(20) for one in asked] == ["a: 0", "a: 1", "a: 2", "b: 9"]
    assert steps.batches == [[0, 1, 2], [9]]


def test_a_batch_has_its_limit_and_keeps_the_order(device: Device[Any, Any], steps: Steps) -> None:
    first = device.ask("a", 0)
    assert steps.started.wait(20)
    asked = [device.ask("a", i) for i in range(1, 6)]
    with pytest.raises(Full):
        device.ask("a", 6)
    steps.let_go.set()
    assert [one.answer.result(20) for one in [first, *asked]] == [f"a: {i}" for i in range(6)]
    assert steps.batches == [[0], [1, 2, 3], [4, 5]]


def test_a_batch_ends_when_nobody_waits_any_more(device: Device[Any, Any], steps: Steps) -> None:
    one, two = device.ask("a", 1), device.ask("a", 2)
    assert steps.started.wait(20)
    one.give_up()
    time.sleep(0.05)
    assert not steps.ended.is_set()  # the other still waits
    two.give_up()
    assert steps.ended.wait(20)
    with pytest.raises(Cancelled):
        two.answer.result(20)
    steps.let_go.set()
    assert device.ask("b", 3).answer.result(20) == "b: 3"  # the device is free again


def test_what_was_given_up_while_it_waited_is_never_started(device: Device[Any, Any], steps: Steps) -> None:
    first = device.ask("a", 1)
    assert steps.started.wait(20)
    gone, kept = device.ask("a", 2), device.ask("a", 3)
    gone.give_up()
    assert device.waiting == 1
    steps.let_go.set()
    assert (first.answer.result(20), kept.answer.result(20)) == ("a: 1", "a: 3")
    assert steps.batches == [[1], [3]]


def test_one_bad_question_does_not_spoil_the_others() -> None:
    def work(kind: Any, questions: Sequence[Any], cancel: NobodyWaits) -> Sequence[Any]:
        return [InputError("bad") if question == 1 else question for question in questions]

    device: Device[Any, Any] = Device(work, batch=8, queue=8, window=0.05)
    asked = [device.ask("a", i) for i in range(3)]
    device.start()
    assert (asked[0].answer.result(20), asked[2].answer.result(20)) == (0, 2)
    with pytest.raises(InputError, match="bad"):
        asked[1].answer.result(20)
    assert device.stop(20)


def test_work_that_breaks_does_not_end_the_thread() -> None:
    def work(kind: Any, questions: Sequence[Any], cancel: NobodyWaits) -> Sequence[Any]:
        if kind == "broken":
            raise RuntimeError("inside")
        return list(questions)

    device: Device[Any, Any] = Device(work, batch=8, queue=8, window=0.0)
    device.start()
    with pytest.raises(RuntimeError, match="inside"):
        device.ask("broken", 1).answer.result(20)
    assert device.ask("whole", 2).answer.result(20) == 2
    assert device.stop(20)


def test_a_stop_cancels_what_runs_and_what_waits(steps: Steps) -> None:
    device: Device[Any, Any] = Device(steps, batch=1, queue=5, window=0.0)
    device.start()
    running = device.ask("a", 1)
    assert steps.started.wait(20)
    waiting = device.ask("a", 2)
    assert device.stop(20)
    for asked in (running, waiting):
        with pytest.raises(Cancelled):
            asked.answer.result(20)
    with pytest.raises(Closed):
        device.ask("a", 3)


def test_a_batch_waits_for_a_question_that_is_being_read(steps: Steps) -> None:
    device: Device[Any, Any] = Device(steps, batch=3, queue=5, window=0.01, longest=60.0)
    device.start()
    steps.let_go.set()
    with device.expect() as coming:
        first = device.ask("a", 1)
        assert not steps.started.wait(0.2)
        second = device.ask("a", 2)
        coming.arrived()
        assert (first.answer.result(20), second.answer.result(20)) == ("a: 1", "a: 2")
    assert steps.batches == [[1, 2]]
    with device.expect():
        refused = device.ask("a", 3)
        assert not refused.answer.done()  # what is being read turns out to be no question
    assert refused.answer.result(20) == "a: 3"
    assert device.stop(20)


def test_a_batch_does_not_wait_for_one_who_sends_slowly(steps: Steps) -> None:
    device: Device[Any, Any] = Device(steps, batch=3, queue=5, window=0.0, longest=0.2)
    device.start()
    steps.let_go.set()
    with device.expect():
        assert device.ask("a", 1).answer.result(20) == "a: 1"  # after a moment
        assert device.ask("a", 2).answer.result(20) == "a: 2"  # at once: by now that one is known to be slow
    assert device.stop(20)


def test_questions_that_follow_each_other_closely_are_one_batch(steps: Steps) -> None:
    device: Device[Any, Any] = Device(steps, batch=8, queue=8, window=0.5, longest=60.0)
    device.start()
    steps.let_go.set()
    asked = []
    for i in range(4):  # together longer than the window, which begins anew with each
        asked.append(device.ask("a", i))
        time.sleep(0.2)
    assert [one.answer.result(20) for one in asked] == [f"a: {i}" for i in range(4)]
    assert steps.batches == [[0, 1, 2, 3]]
    assert device.stop(20)


def test_a_device_is_prepared_before_its_first_question(steps: Steps) -> None:
    go_on = threading.Event()

    def prepare() -> None:
        assert go_on.wait(20)

    device: Device[Any, Any] = Device(steps, batch=1, queue=1, window=0.0, prepare=prepare)
    device.start()
    steps.let_go.set()
    asked = device.ask("a", 1)
    assert [device.prepared, steps.started.is_set()] == [False, False]
    go_on.set()
    assert asked.answer.result(20) == "a: 1"
    assert [device.prepared, steps.started.is_set()] == [True, True]
    assert device.stop(20)


def test_an_asker_who_went_away_gives_the_question_up(device: Device[Any, Any], steps: Steps) -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    asked = device.ask("a", 1)
    request = Request({"type": "http"}, receive)
    with pytest.raises(Refused, match="went away"):
        asyncio.run(patiently(asked, request, 20.0, threading.Event()))
    assert asked.given_up
    assert steps.started.is_set() == steps.ended.wait(20)


# The same through HTTP


EXPLAIN: dict[str, Any] = {"classifier": "portraits/student", "image": base64_of(png())}


def test_requests_are_batched_across_callers(alone: Service) -> None:
    alone.backend.device.window = 2.0
    answers: list[int] = []

    def ask(seed: int) -> None:
        answer = alone.client.post("/v1/explain", json=EXPLAIN | {"seed": seed})
        answers.append(answer.json()["seed"])

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [0, 1, 2, 3]
    assert max(len(questions) for _, questions in alone.explained) > 1
    text = alone.client.get("/metrics").text
    assert 'pfungst_counterfactuals_total{outcome="flipped"} 4.0' in text
    assert "pfungst_batched_questions_total 4.0" in text


def test_a_request_that_is_refused_is_expected_no_more(alone: Service) -> None:
    alone.backend.device.longest = 60.0  # so long a question would wait for one that never comes
    assert alone.client.post("/v1/explain", json=EXPLAIN | {"image": "no base64"}).status_code == 422
    assert alone.client.post("/v1/explain", content=b"{").status_code in (400, 415)
    assert alone.client.post("/v1/explain", json=EXPLAIN).status_code == 200


def test_a_504_leaves_no_zombie_on_the_device(alone: Service, steps: Steps) -> None:
    alone.backend.device.work = steps
    answer = alone.client.post("/v1/explain", json=EXPLAIN | {"timeout_seconds": 0.5})
    assert answer.status_code == 504
    assert envelope_of(answer)["code"] == "timeout"
    until = time.monotonic() + 20
    while alone.backend.device.waiting or alone.backend.device.busy_seconds:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert steps.started.is_set() == steps.ended.is_set()  # on a busy machine its time may be up before it begins
    assert alone.client.get("/v1/classifiers").status_code == 200
    alone.backend.device.work = alone.backend.explanations
    assert alone.client.post("/v1/explain", json=EXPLAIN).status_code == 200


def test_polling_answers_while_the_device_is_busy_and_its_queue_is_full(alone: Service, steps: Steps) -> None:
    alone.backend.device.work = steps
    alone.backend.device.batch = 1
    job = alone.client.post("/v1/audits", json={"classifier": "portraits/student"}).json()
    asking = [
        threading.Thread(target=alone.client.post, args=("/v1/explain",), kwargs={"json": EXPLAIN}) for _ in range(6)
    ]
    for thread in asking:
        thread.start()
    until = time.monotonic() + 20
    while alone.backend.device.waiting < 5 and time.monotonic() < until:
        time.sleep(0.01)
    refused = alone.client.post("/v1/explain", json=EXPLAIN)
    assert refused.status_code == 503
    assert (envelope_of(refused)["code"], refused.headers["retry-after"]) == ("busy", "5")
    assert alone.client.get(job["links"]["self"]).json()["state"] == "queued"
    steps.let_go.set()
    for thread in asking:
        thread.join()


def test_a_service_that_stops_lets_go_of_those_who_wait(alone: Service, steps: Steps) -> None:
    alone.backend.device.work = steps
    statuses: list[int] = []
    asking = threading.Thread(
        target=lambda: statuses.append(alone.client.post("/v1/explain", json=EXPLAIN).status_code)
    )
    asking.start()
    assert steps.started.wait(20)
    alone.backend.stopping.set()
    asking.join(20)
    assert statuses == [503]
    assert steps.ended.wait(20)
