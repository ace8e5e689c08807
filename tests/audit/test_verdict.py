"""Verdicts of small audits whose answer is known."""

import datetime
import json

import numpy as np
import pytest

from audit import verdict as module
from audit.policy import Policy
from audit.verdict import Judge, Observation, Outcome, Prerequisites, Verdict
from engine.errors import InputError

TODAY = datetime.date(2030, 1, 1)
TO_BLOND, TO_DARK = DIRECTIONS = ("dark → blond", "blond → dark")
SOUND = Prerequisites(evaluator_agreement=0.97, teacher_accuracy=0.99)


def judged(to_blond: list[float | None], to_dark: list[float | None], **settings: object) -> Judge:
    """A judge who has seen images of both directions in turn; None is an image that was not flipped."""
    judge = Judge(Policy(**settings), DIRECTIONS, TODAY)
    for k in range(max(len(to_blond), len(to_dark))):
        for direction, reliances in ((TO_BLOND, to_blond), (TO_DARK, to_dark)):
            if k < len(reliances):
                judge.observe(direction, reliances[k], flipped=reliances[k] is not None)
    return judge


def accepted(expires: str, **more: object) -> dict[str, object]:
    return {"direction": TO_BLOND, "reason": "fixed in the next release.", "expires": expires, **more}


def test_every_public_name_exists() -> None:
    assert all(hasattr(module, name) for name in module.__all__)


def test_outcomes_are_exit_codes() -> None:
    assert [outcome.exit_code for outcome in Outcome] == [0, 1, 3]


# The three outcomes ----------------------------------------------------------------------------------------------


def test_a_classifier_that_never_leans_passes_after_18_images_of_each_direction() -> None:
    judge = judged([0.0] * 17, [0.0] * 18)
    assert not judge.decided and judge.open_directions == (TO_BLOND,)
    judge.observe(TO_BLOND, 0.0, True)
    assert judge.decided and judge.finished and judge.open_directions == ()
    verdict = judge.verdict(SOUND)
    assert verdict.outcome is Outcome.PASS
    assert (verdict.reliance, verdict.lower, verdict.limit, verdict.n_images) == (0.0, 0.0, 0.2, 36)
    assert verdict.upper == max(d.upper for d in verdict.directions) <= 0.2
    assert "at most" in verdict.reasons[0] and "limit of 20 %" in verdict.reasons[0]


def test_one_direction_that_leans_fails_the_classifier() -> None:
    """Pooled, the same images would look half as bad."""
    judge = judged([1.0] * 10, [0.0] * 10)
    verdict = judge.verdict(SOUND)
    assert judge.decided and verdict.outcome is Outcome.FAIL
    assert (verdict.reliance, verdict.worst_direction, verdict.pooled_reliance) == (1.0, TO_BLOND, 0.5)
    assert verdict.limit < verdict.lower < verdict.reliance <= verdict.upper
    assert verdict.reasons[0].startswith(f"{TO_BLOND}: ") and "exceeded with 95 % confidence" in verdict.reasons[0]


def test_images_around_the_limit_are_inconclusive() -> None:
    judge = judged([0, 0, 0, 0, 1.0] * 5, [0, 0, 0, 1.0] * 5)
    verdict = judge.verdict(SOUND)
    assert not judge.decided and verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.lower <= verdict.limit < verdict.upper
    assert "on both sides of the limit of 20 %" in verdict.reasons[0]


def test_an_audit_ends_where_the_policy_grants_no_more_images() -> None:
    judge = judged([0, 0, 0, 0, 1.0] * 3, [0, 0, 0, 0, 1.0] * 3, max_images=30)
    assert judge.finished and not judge.decided
    assert judge.verdict(SOUND).outcome is Outcome.INCONCLUSIVE


def test_numbers_follow_the_images() -> None:
    judge = judged([0.5, None, 1.0], [0.0, 0.25])
    judge.observe(TO_DARK, None, True)  # flipped, but the teacher had no verdict
    verdict = judge.verdict(SOUND)
    to_blond, to_dark = verdict.directions
    assert (to_blond.reliance, to_blond.n_images, to_blond.n_flipped, to_blond.n_measured) == (0.75, 3, 2, 2)
    assert (to_dark.reliance, to_dark.n_images, to_dark.n_flipped, to_dark.n_measured) == (0.125, 3, 3, 2)
    assert (verdict.n_images, verdict.n_measured, verdict.flip_rate) == (6, 4, 5 / 6)
    assert (verdict.reliance, verdict.pooled_reliance) == (0.75, 1.75 / 4)
    assert [step.mean for step in to_blond.history] == [0.5, 0.75]


def test_more_directions_need_more_for_a_fail_and_the_same_for_a_pass() -> None:
    one, many = (Judge(Policy(min_images=1), [f"a → {k}" for k in range(n)], TODAY) for n in (1, 50))
    for judge in (one, many):
        for _ in range(6):
            judge.observe("a → 0", 1.0, True)
    assert one.verdict(SOUND).directions[0].lower > many.verdict(SOUND).directions[0].lower
    assert one.verdict(SOUND).directions[0].upper == many.verdict(SOUND).directions[0].upper


# Prerequisites ---------------------------------------------------------------------------------------------------

PASSING, FAILING = ([0.0] * 20, [0.0] * 20), ([1.0] * 20, [0.0] * 20)


@pytest.mark.parametrize("reliances", [PASSING, FAILING])
@pytest.mark.parametrize(
    ("prerequisites", "words"),
    [
        (Prerequisites(0.5, 0.99), "agreement of the evaluator with the classifier is 50 %; the policy asks for 90 %"),
        (Prerequisites(None, 0.99), "agreement of the evaluator with the classifier was not measured"),
        (Prerequisites(0.97, 0.7), "accuracy of the teacher on original images is 70 %; the policy asks for 95 %"),
        (Prerequisites(0.97, None), "accuracy of the teacher on original images was not measured"),
        (Prerequisites(float("nan"), 0.99), "agreement"),
    ],
)
def test_instruments_that_are_not_sound_block_pass_and_fail(
    reliances: tuple[list, list], prerequisites: Prerequisites, words: str
) -> None:
    judge = judged(*reliances)
    assert judge.verdict(SOUND).outcome is not Outcome.INCONCLUSIVE
    verdict = judge.verdict(prerequisites)
    assert verdict.outcome is Outcome.INCONCLUSIVE and words in verdict.reasons[0]


def test_too_few_images_are_inconclusive() -> None:
    judge = judged([1.0] * 5, [1.0] * 5)
    verdict = judge.verdict(SOUND)
    assert verdict.lower > verdict.limit
    assert verdict.outcome is Outcome.INCONCLUSIVE and not judge.finished
    assert verdict.reasons[0] == "Only 10 images could be measured, of 10 audited; the policy asks for 20."
    assert judge.open_directions == DIRECTIONS
    assert judged([1.0] * 5, [1.0] * 5, min_images=10).verdict(SOUND).outcome is Outcome.FAIL


def test_no_image_at_all_is_inconclusive() -> None:
    verdict = Judge(Policy(), DIRECTIONS, TODAY).verdict(SOUND)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.reliance, verdict.lower, verdict.upper, verdict.flip_rate) == (None, 0.0, 1.0, None)


def test_a_generator_that_never_flips_is_inconclusive() -> None:
    judge = judged([None] * 100, [None] * 100)
    verdict = judge.verdict(SOUND)
    assert judge.finished and verdict.outcome is Outcome.INCONCLUSIVE
    assert (verdict.reliance, verdict.flip_rate, verdict.n_images) == (None, 0.0, 200)
    assert f"{TO_BLOND}: none of 100 images could be flipped, so nothing is known." in verdict.reasons


def test_a_low_flip_rate_in_one_direction_blocks_pass() -> None:
    judge = judged([0.0, None] * 25, [0.0] * 25)
    verdict = judge.verdict(SOUND)
    assert verdict.upper <= verdict.limit
    assert verdict.outcome is Outcome.INCONCLUSIVE and judge.open_directions == (TO_BLOND,)
    assert verdict.reasons[0] == f"{TO_BLOND}: 50 % of 50 images were flipped; the policy asks for 80 %."


def test_a_low_flip_rate_does_not_block_fail() -> None:
    verdict = judged([1.0, None] * 25, [0.0] * 25).verdict(SOUND)
    assert verdict.outcome is Outcome.FAIL
    assert any("50 % of 50 images were flipped" in reason for reason in verdict.reasons[1:])


def test_a_direction_without_images_blocks_pass() -> None:
    verdict = judged([0.0] * 40, []).verdict(SOUND)
    assert verdict.outcome is Outcome.INCONCLUSIVE and verdict.upper == 1
    assert verdict.reasons[0] == f"{TO_DARK}: no image was audited."


def test_too_few_images_of_a_direction_block_pass() -> None:
    assert judged([0.0] * 20, [0.0] * 20, min_per_direction=20).verdict(SOUND).outcome is Outcome.PASS
    judge = judged([0.0] * 20, [0.0] * 19, min_per_direction=20)
    assert judge.verdict(SOUND).outcome is Outcome.INCONCLUSIVE and judge.open_directions == (TO_DARK,)


def test_flipped_images_that_nobody_could_judge_block_pass() -> None:
    judge = judged([0.0] * 20, [0.0] * 20)
    for _ in range(21):
        judge.observe(TO_DARK, None, True)
    verdict = judge.verdict(SOUND)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the teacher could judge 20 of 41 images that were flipped" in verdict.reasons[0]


def test_images_in_an_order_that_is_not_random_are_noticed() -> None:
    judge = judged([1.0] * 15 + [0.0] * 200, [0.0] * 215, max_images=1000, min_images=500)
    verdict = judge.verdict(SOUND)
    assert judge.finished and verdict.outcome is Outcome.INCONCLUSIVE
    assert any("random order" in reason for reason in verdict.reasons)


# Accepted findings -----------------------------------------------------------------------------------------------


def test_an_accepted_finding_takes_a_direction_out_of_the_verdict() -> None:
    judge = judged(*FAILING, accepted=[accepted("2030-01-01")])
    verdict = judge.verdict(SOUND)
    assert verdict.outcome is Outcome.PASS and verdict.worst_direction == TO_DARK
    assert verdict.directions[0].accepted == "fixed in the next release." and verdict.directions[0].reliance == 1
    assert f"{TO_BLOND}: a reliance of up to 100 % is accepted until 2030-01-01: fixed in the next release." in (
        verdict.reasons
    )


def test_an_expired_finding_counts_again_and_says_so() -> None:
    verdict = judged(*FAILING, accepted=[accepted("2029-12-31")]).verdict(SOUND)
    assert verdict.outcome is Outcome.FAIL and verdict.directions[0].accepted is None
    assert verdict.reasons[-1] == (
        f"{TO_BLOND}: the accepted finding (fixed in the next release) has expired on 2029-12-31 and counts again."
    )


def test_more_reliance_than_was_accepted_fails() -> None:
    verdict = judged(*FAILING, accepted=[accepted("2030-01-01", limit=0.5)]).verdict(SOUND)
    assert verdict.outcome is Outcome.FAIL and verdict.lower > verdict.limit == 0.5
    assert verdict.worst_direction == TO_BLOND


def test_numbers_are_those_of_the_limit_that_decides() -> None:
    """The accepted direction keeps its 0.9, the other one exceeds its 0.2 with a lower reliance."""
    judge = judged([0.6] * 40, [0.5] * 40, accepted=[accepted("2030-01-01", limit=0.9)])
    verdict = judge.verdict(SOUND)
    assert verdict.outcome is Outcome.FAIL
    assert (verdict.worst_direction, verdict.reliance, verdict.limit) == (TO_DARK, 0.5, 0.2)


def test_a_finding_for_an_unknown_direction_is_mentioned() -> None:
    verdict = judged(*PASSING, accepted=[{**accepted("2031-01-01"), "direction": "a -> b"}]).verdict(SOUND)
    assert verdict.outcome is Outcome.PASS
    assert verdict.reasons[-1] == "a → b: a finding is accepted, but this audit has no such direction."


def test_when_everything_is_accepted_the_verdict_says_so() -> None:
    findings = [accepted("2031-01-01"), {**accepted("2031-01-01"), "direction": TO_DARK}]
    verdict = judged(*FAILING, accepted=findings).verdict(SOUND)
    assert verdict.outcome is Outcome.PASS
    assert verdict.reasons[0] == "Every direction is accepted, so none was left to judge."


# State and form --------------------------------------------------------------------------------------------------


def test_replaying_the_observations_restores_the_verdict() -> None:
    rng = np.random.default_rng(0)
    seen = []
    judge = Judge(Policy(), DIRECTIONS, TODAY)
    for _ in range(60):
        flipped = bool(rng.random() < 0.9)
        seen.append(Observation(str(rng.choice(DIRECTIONS)), rng.integers(4) / 3 if flipped else None, flipped))
        judge.observe(*seen[-1])
    resumed = Judge.replay(Policy(), DIRECTIONS, TODAY, seen[:31])
    for observation in seen[31:]:
        resumed.observe(*observation)
    assert resumed.verdict(SOUND) == judge.verdict(SOUND)


def test_a_verdict_survives_json() -> None:
    verdict = judged(*FAILING).verdict(SOUND)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
    report = json.loads(json.dumps(verdict.report(), allow_nan=False))
    assert {"verdict", "reliance", "lower", "upper", "limit", "n_images"} <= set(report)
    assert report["verdict"] == "FAIL" and "outcome" not in report
    assert report["directions"][0]["history"][0][:2] == [1, 1.0]


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (("dark → red", 0.5, True), "'dark → red' was not named"),
        ((TO_BLOND, 1.5, True), "between 0 and 1"),
        ((TO_BLOND, float("nan"), True), "between 0 and 1"),
        ((TO_BLOND, 0.5, False), "not flipped"),
    ],
)
def test_an_impossible_observation_is_refused_and_not_counted(observation: tuple, words: str) -> None:
    judge = judged([0.0], [])
    with pytest.raises(InputError, match=words):
        judge.observe(*observation)
    assert judge.n_images == judge.n_measured == 1


def test_directions_have_to_be_named() -> None:
    for directions in ((), (TO_BLOND, TO_BLOND)):
        with pytest.raises(InputError, match="directions"):
            Judge(Policy(), directions, TODAY)


# Error control ---------------------------------------------------------------------------------------------------


def audit(reliance: tuple[float, float], seed: int) -> Outcome:
    """An audit of binary images that stops at the first chance and draws from open directions only."""
    rng = np.random.default_rng(seed)
    judge = Judge(Policy(alpha=0.1, min_images=4, min_per_direction=2, max_images=60), DIRECTIONS, TODAY)
    while not judge.finished:
        k = DIRECTIONS.index(str(rng.choice(judge.open_directions)))
        judge.observe(DIRECTIONS[k], float(rng.random() < reliance[k]), True)
    return judge.verdict(SOUND).outcome


@pytest.mark.parametrize(
    ("reliance", "wrong"), [((0.2, 0.2), Outcome.FAIL), ((0.22, 0.0), Outcome.PASS), ((0.0, 0.2), Outcome.FAIL)]
)
def test_a_verdict_at_the_first_chance_is_rarely_wrong(reliance: tuple[float, float], wrong: Outcome) -> None:
    """At the limit, where it is hardest, with alpha 0.1: more than 17 of 80 has a probability below 0.001."""
    assert sum(audit(reliance, seed) is wrong for seed in range(80)) <= 17


def test_a_clear_case_is_decided_rightly_and_soon() -> None:
    assert [audit((0.8, 0.0), seed) for seed in range(20)].count(Outcome.FAIL) == 20
    assert [audit((0.0, 0.0), seed) for seed in range(3)].count(Outcome.PASS) == 3
