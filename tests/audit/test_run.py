"""The audit as a sequence: it stops when it may, resumes where it stood, and says the same either way."""

import datetime
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from audit.dataset import Dataset, dataset_of_images
from audit.explain import Explainer
from audit.images import read_image
from audit.policy import Policy
from audit.report import Names, build, write
from audit.run import Audit, AuditedImage, audit
from audit.teachers import Judgement, OracleTeacher
from audit.verdict import Outcome
from engine.counterfactual import Cost, CounterfactualSet
from engine.errors import Cancelled, ImageError, InputError
from engine.rate import Rate
from engine.recipe import Recipe
from engine.surrogate import Agreement

SIZE = 16
TODAY = datetime.date(2026, 1, 1)
POLICY = Policy(min_images=10, max_images=60)


def two(p: Tensor) -> Tensor:
    return torch.stack([1 - p, p], dim=1).clamp(1e-4, 1)


class Classifier:
    """Says "bright" where the upper half is bright, or, if it is a Clever Hans, where the lower half is."""

    labels: tuple[str, ...] = ("dark", "bright")
    content_hash = "classifier"

    def __init__(self, hans: bool) -> None:
        self.hans = hans

    def probabilities(self, images: Tensor, batch: int = 256) -> Tensor:
        half = images[:, :, SIZE // 2 :] if self.hans else images[:, :, : SIZE // 2]
        return two(half.mean((1, 2, 3)))


class StubPrior:
    content_hash = "prior"

    def encode(self, images: Tensor) -> Tensor:
        return images


@dataclass
class StubSurrogate:
    classifier: Classifier
    weights_hash: str = "weights"
    agreement: Agreement = field(default_factory=lambda: Agreement(Rate.of(99, 100), 0.01, 0.5))


@dataclass
class StubPair:
    guide: StubSurrogate
    evaluator: StubSurrogate


class StubExplainer:
    """Turns the half that the classifier looks at over: the counterfactual that a perfect prior would find."""

    method = "sce-lite-hq"

    def __init__(self, hans: bool, fail_after: int | None = None, flips: bool = True) -> None:
        self.classifier, self.prior, self.recipe = Classifier(hans), StubPrior(), Recipe(k=2)
        self.surrogates = StubPair(StubSurrogate(self.classifier), StubSurrogate(self.classifier))
        self.calls, self.fail_after, self.flips = 0, fail_after, flips

    def __call__(
        self, images: Tensor, targets: list[int], seeds: list[int], cancel: Any = None
    ) -> list[CounterfactualSet]:
        if self.fail_after is not None and self.calls >= self.fail_after:
            raise Cancelled("stopped")
        self.calls += 1
        return [self._one(x, target, seed) for x, target, seed in zip(images, targets, seeds, strict=True)]

    def _one(self, x: Tensor, target: int, seed: int) -> CounterfactualSet:
        rows = slice(SIZE // 2, None) if self.classifier.hans else slice(0, SIZE // 2)
        edit = torch.zeros(1, SIZE, SIZE)
        edit[:, rows] = 1
        x_cf = torch.where(edit > 0, torch.full_like(x, float(target) if self.flips else 1.0 - target), x)
        p = self.classifier.probabilities(torch.stack([x, x_cf]))
        flipped = bool(p[1].argmax() == target)
        return CounterfactualSet(
            x0=x,
            source=1 - target,
            target=target,
            images=torch.stack([x_cf, x_cf]),
            soft_masks=torch.stack([edit, edit]),
            edit_masks=torch.stack([edit, edit]) > 0,
            flipped=(flipped, flipped),
            logits=p[1].log().expand(2, 2),
            source_logits=p[0].log(),
            seed=seed,
            recipe=self.recipe,
            factors=(1.0, 1.0),
            hashes={},
            costs=(Cost(), Cost()),
            setup=Cost(),
        )

    def evaluator_flipped(self, found: CounterfactualSet) -> list[bool]:
        return list(found.flipped)


def pictures(n: int = 80) -> Dataset:
    """Upper halves are the label; lower halves are drawn without regard to it."""
    g = torch.Generator().manual_seed(3)
    upper, lower = (torch.randint(2, (n,), generator=g) for _ in range(2))
    x = torch.empty(n, 3, SIZE, SIZE)
    x[:, :, : SIZE // 2] = (0.05 + 0.9 * upper).view(-1, 1, 1, 1)
    x[:, :, SIZE // 2 :] = (0.05 + 0.9 * lower).view(-1, 1, 1, 1)
    x = (x * 255).round() / 255
    return dataset_of_images(x, [("dark", "bright")[v] for v in upper.tolist()], {"lower": lower.tolist()})


def oracle() -> OracleTeacher:
    return OracleTeacher(Classifier(hans=False).probabilities, Rate.of(99, 100))


def go(out: Path, stub: StubExplainer, policy: Policy = POLICY, batch: int = 4, seed: int = 0) -> Audit:
    return audit(cast(Explainer, stub), pictures(), oracle(), policy, out, seed=seed, batch=batch, today=TODAY)


def test_a_clever_hans_fails_and_an_honest_classifier_passes_before_the_images_run_out(tmp_path: Path) -> None:
    hans, honest = go(tmp_path / "hans", StubExplainer(True)), go(tmp_path / "honest", StubExplainer(False))
    assert hans.verdict.outcome is Outcome.FAIL
    assert hans.verdict.reliance == 1.0
    assert honest.verdict.outcome is Outcome.PASS
    assert honest.verdict.reliance == 0.0
    assert hans.verdict.n_images < 30
    assert honest.verdict.n_images < 60
    assert len({image.row for image in honest.images}) == len(honest.images)


def test_a_killed_audit_goes_on_and_says_exactly_the_same(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", StubExplainer(False))
    with pytest.raises(Cancelled):
        go(tmp_path / "killed", StubExplainer(False, fail_after=3))
    journal = tmp_path / "killed" / "journal.jsonl"
    with journal.open("ab") as stream:
        stream.write(b'{"row": 17, "na')
    again = go(tmp_path / "killed", StubExplainer(False))
    assert again.resumed == 12
    assert again.verdict == whole.verdict
    assert [image.row for image in again.images] == [image.row for image in whole.images]


def test_an_audit_s_folder_holds_the_originals_beside_their_counterfactuals(tmp_path: Path) -> None:
    found = go(tmp_path, StubExplainer(True))
    data = pictures()
    for image in found.images:
        assert image.original == f"counterfactuals/{image.row:06d}-original.png"
        assert torch.allclose(read_image(tmp_path / image.original), data.image(image.row), atol=1e-6)
    assert AuditedImage.of(json.loads(json.dumps(found.images[0].as_dict()))) == found.images[0]


class SmearingExplainer(StubExplainer):
    """Second counterfactuals that turn the other half over as well: barred from the first edit, they destroy."""

    def _one(self, x: Tensor, target: int, seed: int) -> CounterfactualSet:
        found = super()._one(x, target, seed)
        second = found.images[0].clone()
        second[:, : SIZE // 2] = x[:, : SIZE // 2]
        return replace(found, images=torch.stack([found.images[0], second]), flipped=(found.flipped[0], True))


def test_the_first_counterfactual_alone_speaks_for_an_image(tmp_path: Path) -> None:
    plain, smeared = go(tmp_path / "plain", StubExplainer(False)), go(tmp_path / "smeared", SmearingExplainer(False))
    assert {image.counterfactuals[1].judgement for image in smeared.images} == {Judgement.FALSE}
    assert smeared.verdict == plain.verdict
    assert smeared.verdict.outcome is Outcome.PASS
    content = reported(tmp_path / "report", hans=False, explainer=SmearingExplainer(False))
    assert content["findings"] == []
    assert content["metrics"]["later_false"]["value"] == 1.0


def test_pictures_are_those_that_were_stored_wherever_the_data_went(tmp_path: Path) -> None:
    found = go(tmp_path, StubExplainer(True))
    x, x_cf, edits = found.pictures([(found.images[0], 0), (found.images[1], 1)])
    for n, image in enumerate(found.images[:2]):
        assert torch.equal(x[n], read_image(tmp_path / image.original))
    assert torch.equal(x[:, :, : SIZE // 2], x_cf[:, :, : SIZE // 2])
    assert bool(edits[:, :, SIZE // 2 :].all())
    assert not bool(edits[:, :, : SIZE // 2].any())


def test_another_teacher_of_the_same_name_is_another_audit(tmp_path: Path) -> None:
    stub = cast(Explainer, StubExplainer(True))
    first, second = (replace(oracle(), content_hash=name) for name in ("first", "second"))
    found = audit(stub, pictures(), first, POLICY, tmp_path, batch=4, today=TODAY)
    assert found.identity["teacher_hash"] == "first"
    with pytest.raises(InputError, match=r"another audit \(different: teacher_hash\)"):
        audit(stub, pictures(), second, POLICY, tmp_path, batch=4, today=TODAY)


def test_another_method_is_another_audit_and_the_report_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = reported(tmp_path, hans=True)
    assert content["method"] == content["hashes"]["method"] == "sce-lite-hq"
    page = (tmp_path / "report.html").read_text()
    assert "<td>method</td><td><code>sce-lite-hq</code></td>" in page
    assert "Counterfactuals by SCE-LITE-HQ." in (tmp_path / "summary.md").read_text()
    monkeypatch.setattr(StubExplainer, "method", "ace")
    with pytest.raises(InputError, match=r"another audit \(different: method\)"):
        reported(tmp_path, hans=True)
    assert reported(tmp_path / "ace", hans=True)["method"] == "ace"
    assert "Counterfactuals by ACE." in (tmp_path / "ace" / "summary.md").read_text()


@dataclass(frozen=True)
class Torn:
    """Pictures of which one in ten cannot be read."""

    inner: Any

    def read(self, name: str) -> Tensor:
        if int(name) % 10 == 0:
            raise ImageError(f"{name} is cut short.")
        read: Tensor = self.inner.read(name)
        return read

    def fingerprint(self, name: str) -> str:
        return name


def test_the_policy_says_how_many_files_may_be_unreadable(tmp_path: Path) -> None:
    def torn() -> Dataset:
        whole = pictures()
        return replace(whole, pictures=Torn(whole.pictures))

    stub = cast(Explainer, StubExplainer(False))
    strict, patient = (POLICY.model_copy(update={"max_bad_files_share": share}) for share in (0.05, 0.2))
    with pytest.raises(InputError, match="more than the allowed 5%"):
        audit(stub, torn(), oracle(), strict, tmp_path / "strict", batch=4, today=TODAY)
    data = torn()
    found = audit(stub, data, oracle(), patient, tmp_path / "patient", batch=4, today=TODAY)
    assert found.verdict.outcome is Outcome.PASS
    assert set(data.bad) == {name for name in data.asked if name.endswith("0")}
    assert data.bad
    assert "could not be read" in found.bad_files


def test_where_it_stops_does_not_depend_on_batches(tmp_path: Path) -> None:
    one, many = (go(tmp_path / str(batch), StubExplainer(True), batch=batch) for batch in (1, 16))
    assert one.verdict == many.verdict


def test_a_finished_audit_asks_for_nothing_again(tmp_path: Path) -> None:
    first = go(tmp_path, StubExplainer(True))
    idle = StubExplainer(True, fail_after=0)
    assert go(tmp_path, idle).verdict == first.verdict
    assert idle.calls == 0


def test_another_audit_s_folder_is_refused(tmp_path: Path) -> None:
    go(tmp_path, StubExplainer(True))
    with pytest.raises(InputError, match=r"another audit .*policy"):
        go(tmp_path, StubExplainer(True), Policy(min_images=11, max_images=60))


def test_a_generator_that_never_flips_is_inconclusive(tmp_path: Path) -> None:
    found = go(tmp_path, StubExplainer(False, flips=False))
    assert found.verdict.outcome is Outcome.INCONCLUSIVE
    assert found.verdict.n_images == 60
    assert found.verdict.flip_rate == 0.0


def test_too_few_images_are_inconclusive(tmp_path: Path) -> None:
    found = go(tmp_path, StubExplainer(True), Policy(min_images=20, max_images=500, min_per_direction=45))
    assert found.verdict.outcome is Outcome.FAIL  # what was found stands
    honest = go(tmp_path / "honest", StubExplainer(False), Policy(min_images=20, max_images=500, min_per_direction=45))
    assert honest.verdict.outcome is Outcome.INCONCLUSIVE


def reported(out: Path, hans: bool, explainer: StubExplainer | None = None) -> dict[str, Any]:
    stub, dataset = explainer or StubExplainer(hans), pictures()
    real = cast(Explainer, stub)
    found = audit(real, dataset, oracle(), POLICY, out, batch=8, today=TODAY)

    def lower(rows: Any) -> Tensor:
        mask = torch.zeros(len(rows), 1, SIZE, SIZE)
        mask[:, :, SIZE // 2 :] = 1
        return mask

    record = build(found, real, dataset, oracle(), POLICY, Names(regions={"lower half": lower}))
    write(record, found)
    content: dict[str, Any] = json.loads((out / "report.json").read_text())
    return content


def test_the_report_says_what_was_found(tmp_path: Path) -> None:
    content = reported(tmp_path, hans=True)
    assert content["verdict"] == "FAIL"
    assert {"reliance", "lower", "upper", "limit", "n_images", "findings"} <= content.keys()
    assert content["lower"] > content["limit"]
    region = next(finding for finding in content["findings"] if finding["kind"] == "region")
    assert region["name"] == "lower half"
    assert region["rate"]["value"] == 1.0
    assert region["lift"] == pytest.approx(2.0)
    direction = content["worst_direction"]
    assert content["headline"].startswith(
        f"The classifier leans on something in the region 'lower half' ({direction}). Lower half: 100 % of the edited"
    )
    assert content["metrics"]["flip_rate"]["value"] == 1.0
    page = (tmp_path / "report.html").read_text()
    assert "FAIL" in page
    assert page.count("data:image/png;base64,") > 5
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert len(suite.findall(".//failure")) >= 1
    assert (tmp_path / "summary.md").read_text().startswith("## Pfungst: FAIL")
    assert not list(tmp_path.glob("*.partial"))


def test_a_pass_has_no_findings_and_no_failures(tmp_path: Path) -> None:
    content = reported(tmp_path, hans=False)
    assert content["verdict"] == "PASS"
    assert content["findings"] == []
    assert not ElementTree.parse(tmp_path / "junit.xml").getroot().findall(".//failure")


def test_labels_of_strangers_are_text_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = ("<script>alert(1)</script>", "]]>\x07|`&\u202e")
    monkeypatch.setattr(Classifier, "labels", evil)
    stub = StubExplainer(True)
    plain = pictures()
    dataset = dataset_of_images(
        plain.images(range(80)), [evil[("dark", "bright").index(v)] for v in plain.table["label"]]
    )
    explainer = cast(Explainer, stub)
    found = audit(explainer, dataset, oracle(), POLICY, tmp_path, batch=8, today=TODAY)
    write(build(found, explainer, dataset, oracle(), POLICY, Names()), found)
    for name in ("report.html", "summary.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "<script" not in text
        assert "&lt;script>" in text or "&lt;script&gt;" in text
        assert not {"\x07", "\u202e"} & set(text)
    names = [case.get("name") for case in ElementTree.parse(tmp_path / "junit.xml").getroot().iter("testcase")]
    assert "<script>alert(1)</script> → ]]>|`&\u202e" in names
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "FAIL"
