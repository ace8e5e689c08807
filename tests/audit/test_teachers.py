"""Teachers judge by what they were given, and say how good they are."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from audit.teachers import (
    AttributeTeacher,
    Judgement,
    MajorityTeacher,
    OracleTeacher,
    Pairs,
    RegionTeacher,
    StoredTeacher,
    fit_probe,
)
from engine.errors import InputError

TRUE, FALSE, OOD = Judgement.TRUE, Judgement.FALSE, Judgement.OUT_OF_DISTRIBUTION


def brightness(images: Tensor) -> Tensor:
    """A classifier of two classes: p(bright) is the mean of the picture."""
    p = images.mean((1, 2, 3))
    return torch.stack([1 - p, p], dim=1)


def grey(*values: float) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 3, 16, 16).clone()


def pairs(x: Tensor, x_cf: Tensor, edits: Tensor | None = None, target: int = 1) -> Pairs:
    edits = (x != x_cf).any(1, keepdim=True) if edits is None else edits
    names = tuple(f"image-{i}" for i in range(len(x)))
    return Pairs(x, x_cf, edits, names, tuple(range(len(x))), (target,) * len(x))


def test_the_oracle_tells_true_false_and_strange_apart() -> None:
    x = grey(0.1, 0.1, 0.1)
    teacher = OracleTeacher.tested(brightness, grey(0.1, 0.9, 0.2, 0.7), torch.tensor([0, 1, 1, 1]))
    assert teacher(pairs(x, grey(0.95, 0.05, 0.55))) == [TRUE, FALSE, OOD]
    assert teacher.accuracy.value == 0.75
    assert teacher.accuracy.n == 4
    assert teacher(pairs(grey(), grey())) == []


def test_the_oracle_has_no_opinion_where_the_class_moved_away_from_the_target() -> None:
    teacher = OracleTeacher.tested(brightness, grey(0.1, 0.9), torch.tensor([0, 1]))
    assert teacher(pairs(grey(0.9, 0.1), grey(0.05, 0.95), target=1)) == [None, TRUE]


def test_an_oracle_of_fewer_classes_is_refused() -> None:
    with pytest.raises(InputError, match="fewer classes"):
        OracleTeacher.tested(brightness, grey(0.1, 0.9), torch.tensor([0, 2]))


def test_regions_judge_by_the_share_inside() -> None:
    x = grey(0.5, 0.5, 0.5)
    edits = torch.zeros(3, 1, 16, 16, dtype=torch.bool)
    edits[0, :, :8] = True  # wholly inside
    edits[1, :, 6:] = True  # 2 of 10 rows inside

    def upper_half(rows: object) -> Tensor:
        mask = torch.zeros(3, 1, 16, 16)
        mask[:, :, :8] = 1
        return mask

    assert RegionTeacher(upper_half)(pairs(x, x, edits)) == [TRUE, FALSE, None]
    with pytest.raises(InputError, match="one mask"):
        RegionTeacher(lambda rows: torch.zeros(3, 1, 8, 8))(pairs(x, x, edits))


def test_probes_find_the_direction_of_a_column_and_its_shift() -> None:
    g = torch.Generator().manual_seed(0)
    latents = torch.randn(400, 6, generator=g)
    label, beard = (latents[:, 0] > 0).long(), (latents[:, 3] > 0).long()
    probe, other = fit_probe("blond", latents, label), fit_probe("beard", latents, beard)
    assert probe.accuracy.value >= 0.97
    assert probe.accuracy.n == 100
    assert torch.cosine_similarity(probe.weight, torch.eye(6)[0], dim=0) > 0.95
    teacher = AttributeTeacher(lambda z: z, probe, (other,))
    assert teacher.accuracy is probe.accuracy
    x = torch.zeros(2, 6)
    x[:, 0], x[:, 3] = -1.0, -1.0
    x_cf = x.clone()
    x_cf[0, 0] = 1.0
    x_cf[1, 3] = 1.0
    seen = Pairs(x, x_cf, torch.ones(2, 1, 1, 1, dtype=torch.bool), ("a", "b"), (0, 1), (1, 1))
    assert teacher(seen) == [TRUE, FALSE]
    shifts = teacher.shifts(x, x_cf)
    assert list(shifts) == ["blond", "beard"]
    # The means of the two halves of a normal lie 2·sqrt(2/π) ≈ 1.6 apart, so a way of 2 is a shift of about 1.25.
    assert np.allclose(shifts["blond"], [1.25, 0.0], atol=0.15)
    assert np.allclose(shifts["beard"], [0.0, 1.25], atol=0.15)


def test_a_column_that_cannot_be_probed_is_refused() -> None:
    with pytest.raises(InputError, match="two-valued"):
        fit_probe("age", torch.randn(50, 2), torch.arange(50))
    with pytest.raises(InputError, match="fewer than 10"):
        fit_probe("hat", torch.randn(50, 2), torch.zeros(50))


def test_stored_verdicts_are_looked_up_by_name(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    file.write_text(json.dumps({"image-1": "false", "image-0": "out_of_distribution"}))
    x = grey(0.1, 0.1, 0.1)
    assert StoredTeacher.load(file)(pairs(x, x)) == [OOD, FALSE, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "one JSON object"), ("{", "cannot be read"), ('{"a": "maybe"}', "unknown one.*maybe.*known are true")],
)
def test_bad_stored_verdicts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "verdicts.json").write_text(text)
    with pytest.raises(InputError, match=message):
        StoredTeacher.load(tmp_path / "verdicts.json")


def test_a_majority_needs_more_than_half_of_those_with_an_opinion() -> None:
    x = grey(0.1, 0.1, 0.1, 0.1)

    def says(**verdicts: Judgement) -> StoredTeacher:
        return StoredTeacher({f"image-{key[1:]}": verdict for key, verdict in verdicts.items()})

    teacher = MajorityTeacher((says(_0=TRUE, _1=TRUE, _3=OOD), says(_0=TRUE, _1=FALSE), says(_0=FALSE)))
    assert teacher(pairs(x, x)) == [TRUE, None, None, OOD]
    assert teacher.accuracy is None
    oracle = OracleTeacher.tested(brightness, grey(0.1, 0.9), torch.tensor([0, 1]))
    assert MajorityTeacher((teacher, oracle)).accuracy is oracle.accuracy
    with pytest.raises(InputError, match="at least one"):
        MajorityTeacher(())


def test_teachers_of_one_name_are_told_apart_by_their_content() -> None:
    first, second = StoredTeacher({"a": TRUE, "b": FALSE}), StoredTeacher({"b": FALSE, "a": TRUE})
    other = StoredTeacher({"a": TRUE, "b": TRUE})
    assert first.content_hash == second.content_hash != other.content_hash
    oracle = OracleTeacher.tested(brightness, grey(0.1, 0.9), torch.tensor([0, 1]), content_hash="weights")
    assert oracle.content_hash == "weights"
    assert MajorityTeacher((first, oracle)).content_hash != MajorityTeacher((other, oracle)).content_hash
