"""Policies: read from YAML, refused with one sentence that names the setting."""

import datetime
import math
import pathlib
from typing import Any

import pytest
from pydantic import ValidationError

from audit import policy as module
from audit.policy import Policy, direction_name
from engine.errors import InputError

DAY = datetime.date(2030, 6, 30)
FINDING = {"direction": "dark → blond", "reason": "known since spring", "expires": DAY}


def written(folder: pathlib.Path, text: str) -> pathlib.Path:
    file = folder / "policy.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_every_public_name_exists() -> None:
    assert all(hasattr(module, name) for name in module.__all__)


def test_defaults() -> None:
    policy = Policy()
    assert (policy.limit, policy.alpha, policy.min_images, policy.max_images) == (0.2, 0.05, 20, 200)
    assert (policy.min_flip_rate, policy.min_evaluator_agreement, policy.min_teacher_accuracy) == (0.8, 0.9, 0.95)
    assert policy.max_bad_files_share == 0.05 and policy.accepted == ()


def test_a_policy_is_read_from_yaml(tmp_path: pathlib.Path) -> None:
    policy = Policy.load(
        written(
            tmp_path,
            """
            limit: 0.15   # ours
            alpha: 1e-2   # a string for YAML, a number for people
            accepted:
              - direction: dark -> blond
                reason: " known since spring "
                limit: 0.5
                expires: 2030-06-30
            """,
        )
    )
    assert policy == Policy(limit=0.15, alpha=0.01, accepted=[{**FINDING, "limit": 0.5}])
    assert policy.accepted[0].direction == direction_name("dark", "blond")
    assert policy.accepted[0].reason == "known since spring"


def test_an_accepted_finding_raises_the_limit_until_its_last_day() -> None:
    policy = Policy(accepted=[{**FINDING, "limit": 0.5}])
    after = DAY + datetime.timedelta(days=1)
    assert policy.limit_of("dark → blond", DAY) == 0.5
    assert policy.limit_of("dark → blond", after) == 0.2
    assert policy.limit_of("blond → dark", DAY) == 0.2
    assert policy.finding("blond → dark") is None
    assert Policy(accepted=[FINDING]).limit_of("dark → blond", DAY) == 1


def test_the_digest_is_of_the_content(tmp_path: pathlib.Path) -> None:
    first = Policy.load(written(tmp_path, "limit: 0.3\nalpha: 0.1\n"))
    second = Policy.load(written(tmp_path, "# the same\nalpha: 0.1\nlimit: 0.3\n"))
    assert first.digest == second.digest != Policy().digest
    assert len(first.digest) == 64
    assert Policy(**first.model_dump(mode="json")) == first


def test_a_policy_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Policy().limit = 0.9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit": 0}, "'limit' should be greater than 0, but is 0"),
        ({"limit": 1}, "'limit'"),
        ({"limit": math.nan}, "'limit'.*finite"),
        ({"limit": "high"}, "'limit'.*number.*'high'"),
        ({"limit": True}, "'limit' should be a number"),
        ({"limit": None}, "'limit'"),
        ({"alpha": 0.5}, "'alpha'"),
        ({"alpha": -math.inf}, "'alpha'"),
        ({"min_images": 0}, "'min_images'"),
        ({"min_images": 2.5}, "'min_images'"),
        ({"min_images": 300}, "min_images .300. should not be above max_images .200."),
        ({"max_images": 10**9}, "'max_images'"),
        ({"min_flip_rate": 1.1}, "'min_flip_rate'"),
        ({"tolerance": 1}, "no setting 'tolerance'; it knows limit"),
        ({"accepted": "all"}, "'accepted'"),
        ({"accepted": [{"direction": "a → b", "expires": DAY}]}, "'accepted.0.reason' is missing"),
        ({"accepted": [{**FINDING, "expires": "soon"}]}, "'accepted.0.expires'.*date"),
        ({"accepted": [{**FINDING, "reason": "  "}]}, "'accepted.0.reason'"),
        ({"accepted": [{**FINDING, "until": DAY}]}, "no setting 'accepted.0.until'; it knows direction"),
        ({"accepted": [{**FINDING, "limit": 0.1}]}, "accepted should raise the limit of 0.2"),
        ({"accepted": [FINDING, FINDING]}, "dark → blond' is there twice"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        Policy(**settings)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "by name"),
        ("# nothing\n", "by name"),
        ("- limit\n", "by name"),
        ("1: 2\n", "by name"),
        ("limit: [0.2\n", "as YAML.*line"),
        ("limit: 0.2\nlimit: 0.9\n", "'limit' is there twice in line 1"),
        ("accepted: &a [*a]\n", "aliases are not allowed"),
        ("limit: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("limit: \x00\n", "as YAML"),
        ("accepted: [{direction: a, reason: b, expires: 2030-13-45}]\n", "as YAML.*month"),
        ("limit: " + "[" * 5000 + "\n", "nested too deeply"),
        ("# " + "x" * (1 << 20) + "\n", "larger than"),
        ("limit: 7\n", "'limit' should be less than 1, but is 7"),
    ],
)
def test_a_malformed_file_is_refused_in_one_sentence(tmp_path: pathlib.Path, text: str, words: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(InputError, match=words) as caught:
        Policy.load(file)
    assert "\n" not in str(caught.value)
    assert Policy.load(written(tmp_path, "limit: 0.2\n")) == Policy()


def test_a_file_that_is_no_text_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "policy.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match="as YAML"):
        Policy.load(tmp_path / "policy.yaml")
    with pytest.raises(InputError, match="cannot be read: "):
        Policy.load(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="cannot be read: "):
        Policy.load(tmp_path)
