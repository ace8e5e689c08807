"""Counterfactual knowledge distillation: a tiny network that reads a corner patch learns to read the picture."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

from audit.cfkd import (
    DebiasingSet,
    FinishedAudit,
    TestData,
    build_set,
    folder_name,
    ordinary_split,
    real_class,
    repair,
)
from audit.classifier import HuggingFaceClassifier, load_classifier
from audit.dataset import dataset_of_images, open_dataset
from audit.finetune import (
    Finetuned,
    Labelled,
    at_temperature,
    expected_calibration_error,
    finetune,
    fit_temperature,
    save_classifier,
)
from audit.finetune_settings import FinetuneSettings
from audit.images import read_image
from audit.journal import Journal
from audit.metrics import group_accuracies
from audit.pictures import save_png, to_pil
from audit.policy import Policy
from audit.run import AuditedImage, Counterfactual
from audit.teachers import Judgement
from engine.errors import ClassifierError, InputError
from engine.recipe import Recipe
from service.commands import cfkd as command

SIZE = 16
LABELS = ("horizontal", "vertical")
SETTINGS = FinetuneSettings(steps=60, batch=32, rate=3e-3, every=10)
PREPROCESSING = {
    "do_resize": True,
    "size": {"height": SIZE, "width": SIZE},
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.25] * 3,
}


def draw(labels: Tensor, patches: Tensor, seed: int) -> Tensor:
    """Faint noisy stripes, horizontal or vertical, are the label; a corner patch, dark or white, is the shortcut."""
    g = torch.Generator().manual_seed(seed)
    n = len(labels)
    phase = torch.randint(4, (n, 1), generator=g)
    wave = ((torch.arange(SIZE) + phase) // 2 % 2).float() - 0.5
    stripes = torch.where((labels == 1).view(-1, 1, 1), wave[:, None, :], wave[:, :, None])
    x = 0.5 + 0.3 * stripes + 0.05 * torch.randn(n, SIZE, SIZE, generator=g)
    x[:, :6, :6] = patches.view(-1, 1, 1).float()
    return (x.clamp(0, 1)[:, None].expand(-1, 3, -1, -1) * 255).round() / 255


def pictures(n: int, seed: int, rho: float) -> tuple[Tensor, Tensor, Tensor]:
    """(images, labels, patches) where label and patch agree with probability rho."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (n,), generator=g)
    patches = torch.where(torch.rand(n, generator=g) < rho, labels, 1 - labels)
    return draw(labels, patches, seed + 1), labels, patches


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ResNet trained where the patch tells the label: a Clever Hans."""
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        id2label=dict(enumerate(LABELS)),
        label2id={name: i for i, name in enumerate(LABELS)},
    )
    model = ResNetForImageClassification(config)
    x, y, _ = pictures(256, 1, rho=1.0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(40):
        rows = torch.randint(len(x), (32,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model.train()(pixel_values=(x[rows] - 0.5) / 0.25).logits, y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    folder = tmp_path_factory.mktemp("models") / "student"
    model.eval().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING))
    return folder


def hashes(classifier: str, data: str = "data") -> dict[str, Any]:
    return {"classifier": classifier, "data": data, "prior": "prior", "teacher": "oracle", "seed": 0, "batch": 8}


def audit_folder(
    folder: Path,
    classifier: HuggingFaceClassifier,
    n: int = 48,
    seed: int = 5,
    judgement: Judgement = Judgement.FALSE,
    verdict: str = "FAIL",
    labelled: bool = True,
    labels: tuple[str, str] = LABELS,
) -> Path:
    """The folder that an audit leaves, its counterfactuals made by hand: the patch is turned over, the stripes stay."""
    x, y, patches = pictures(n, seed, rho=0.5)
    x_cf = x.clone()
    x_cf[:, :, :6, :6] = (1 - patches).view(-1, 1, 1, 1).float()
    before, after = (classifier.probabilities(images) for images in (x, x_cf))
    images = []
    for row in range(n):
        source, target = int(before[row].argmax()), int(1 - before[row].argmax())
        name = f"{row:06d}-1"
        files = {kind: f"counterfactuals/{name.split('-')[0]}-{kind}.png" for kind in ("original", "1")}
        save_png(to_pil(x[row]), folder / files["original"])
        save_png(to_pil(x_cf[row]), folder / files["1"])
        one = Counterfactual(
            name=name,
            flipped=bool(after[row].argmax() == target),
            confirmed=True,
            judgement=judgement,
            target_probability=float(after[row, target]),
            area=36 / SIZE**2,
            file=files["1"],
            mask=f"counterfactuals/{name}-mask.png",
        )
        image = AuditedImage(
            row=row,
            name=f"{row:06d}",
            source=labels[source],
            target=labels[target],
            source_probability=float(before[row, source]),
            label=labels[int(y[row])] if labelled else None,
            groups={"patch": str(int(patches[row]))},
            seconds=0.1,
            original=files["original"],
            counterfactuals=(one,),
        )
        images.append(image.as_dict())
    identity = hashes(classifier.content_hash)
    journal = Journal(folder / "journal.jsonl", identity)
    for record in images:
        journal.append(record)
    report = {
        "format": "pfungst-report/1",
        "verdict": verdict,
        "reliance": 1.0,
        "hashes": identity,
        "images": images,
        "policy": Policy().model_dump(mode="json"),
        "recipe": Recipe().model_dump(mode="json"),
    }
    (folder / "report.json").write_text(json.dumps(report))
    return folder


@pytest.fixture(scope="module")
def audited(student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audit_folder(tmp_path_factory.mktemp("audits") / "first", load_classifier(student))


def originals(n: int = 200, seed: int = 31) -> Labelled:
    x, y, _ = pictures(n, seed, rho=1.0)
    return Labelled.of(x, y)


def fresh(n: int = 200) -> TestData:
    x, y, patches = pictures(n, 77, rho=0.5)
    return TestData(Labelled.of(x, y), patches, ("dark", "white"))


def worst(classifier: HuggingFaceClassifier) -> float:
    x, y, patches = pictures(200, 77, rho=0.5)
    return group_accuracies(classifier.probabilities(x).argmax(1), y, patches).worst.value


# The set ---------------------------------------------------------------------------------------------------------


def test_the_set_holds_valid_false_counterfactuals_with_the_label_of_the_original(
    audited: Path, tmp_path: Path
) -> None:
    found = build_set(audited, tmp_path / "set")
    images = {image.row: image for image in FinishedAudit.read(audited).images}
    valid = [row for row, image in images.items() if image.counterfactuals[0].valid]
    assert len(valid) > 20
    assert found.table["row"].tolist() == valid
    for record in found.table.to_dict("records"):
        image = images[record["row"]]
        assert record["label"] == image.label
        assert record["direction"] == image.direction
        assert record["original_patch"] == image.groups["patch"]
        a, b = (read_image(found.folder / record[key]) for key in ("image", "original"))
        moved = (a != b).any(0)
        assert bool(moved[:6, :6].all())
        assert not bool(moved[6:].any())
    assert found.table.equals(pd.read_parquet(found.folder / "manifest.parquet"))
    assert not (tmp_path / "set.partial").exists()
    assert DebiasingSet.read(found.folder).digest == found.digest


def test_it_is_a_manifest_and_an_image_folder_that_can_be_opened(audited: Path, tmp_path: Path) -> None:
    found = build_set(audited, tmp_path / "set")
    as_manifest = open_dataset(found.folder, size=SIZE)
    as_folder = open_dataset(found.folder / "by_label", size=SIZE)
    assert len(as_manifest) == len(as_folder) == len(found)
    assert as_manifest.labels == as_folder.labels == LABELS
    assert sorted(as_folder.table["label"]) == sorted(found.table["label"])
    card = (found.folder / "README.md").read_text()
    assert f"{len(found)} counterfactual pictures" in card
    assert found.digest in card
    assert "## Licence" in card


def test_the_same_audit_makes_the_same_set_again(audited: Path, tmp_path: Path) -> None:
    first = build_set(audited, tmp_path / "set")
    content = {file: file.read_bytes() for file in first.folder.rglob("*") if file.is_file()}
    assert build_set(audited, tmp_path / "set").digest == first.digest
    assert {file: file.read_bytes() for file in first.folder.rglob("*") if file.is_file()} == content


def one(judgement: Judgement | None, valid: bool = True) -> Counterfactual:
    return Counterfactual("n", valid, True, judgement, 0.9, 0.1, "counterfactuals/n.png", "counterfactuals/m.png")


@pytest.mark.parametrize(
    ("label", "judgement", "valid", "include_true", "expected"),
    [
        ("a", Judgement.FALSE, True, False, "a"),
        (None, Judgement.FALSE, True, False, "a"),
        ("b", Judgement.FALSE, True, False, "b"),  # the classifier was wrong about the original
        ("a", Judgement.FALSE, False, False, None),
        ("a", Judgement.TRUE, True, False, None),
        ("a", Judgement.TRUE, True, True, "b"),
        ("b", Judgement.TRUE, True, True, None),
        ("a", Judgement.OUT_OF_DISTRIBUTION, True, True, None),
        ("a", None, True, True, None),
    ],
)
def test_the_class_that_a_counterfactual_really_has(
    label: str | None, judgement: Judgement | None, valid: bool, include_true: bool, expected: str | None
) -> None:
    image = AuditedImage(0, "n", "a", "b", 0.9, label, {}, 0.1, "counterfactuals/o.png", ())
    assert real_class(image, one(judgement, valid), include_true) == expected


def test_labels_of_strangers_make_one_plain_folder_each() -> None:
    names = ["horse", "a b", "../up", "..", ".hidden", "a/b", "a\\b", "", "x" * 200, "Größe", "nul\0"]
    folders = [folder_name(name) for name in names]
    assert folders[:2] == ["horse", "a b"]
    assert len(set(folders)) == len(names)
    for folder in folders:
        assert Path(folder).name == folder
        assert not folder.startswith(".")
        assert not set(folder) & set('/\\\0:*?"<>|')


def test_evil_labels_stay_text(student: Path, tmp_path: Path) -> None:
    evil = ("../<script>|", "]]>`\n#")
    folder = audit_folder(tmp_path / "audit", load_classifier(student), n=12, labels=evil)
    found = build_set(folder, tmp_path / "set")
    card = (found.folder / "README.md").read_text()
    assert "<script>" not in card
    assert {path.name for path in tmp_path.iterdir()} == {"audit", "set"}
    assert set(found.table["label"]) <= set(evil)


def damage_format(folder: Path) -> None:
    report = folder / "report.json"
    report.write_text(report.read_text().replace("pfungst-report/1", "pfungst-report/9"))


def damage_picture(folder: Path) -> None:
    for file in (folder / "counterfactuals").glob("*-1.png"):
        file.write_bytes(file.read_bytes()[:60])


def damage_path(folder: Path) -> None:
    for name in ("report.json", "journal.jsonl"):
        file = folder / name
        file.write_text(file.read_text().replace("counterfactuals/", "../counterfactuals/"))


def damage_journal(folder: Path) -> None:
    with (folder / "journal.jsonl").open("a") as stream:
        stream.write('{"row": 99}\n')


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "journal.jsonl").unlink(), "not the folder of an audit"),
        (lambda folder: (folder / "report.json").unlink(), "unfinished"),
        (lambda folder: (folder / "report.json").write_text("[]"), "not the report of an audit"),
        (damage_format, "format"),
        (damage_picture, "cut short"),
        (damage_path, "no picture of this audit"),
        (damage_journal, "went on after its report"),
    ],
)
def test_what_is_no_finished_audit_is_refused(
    student: Path, tmp_path: Path, damage: Callable[[Path], Any], sentence: str
) -> None:
    folder = audit_folder(tmp_path / "audit", load_classifier(student), n=4)
    damage(folder)
    with pytest.raises(InputError, match=sentence):
        build_set(folder, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_a_folder_with_other_things_is_never_replaced(audited: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not a debiasing set"):
        build_set(audited, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


# Fine-tuning -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repaired(student: Path, audited: Path, tmp_path_factory: pytest.TempPathFactory) -> Finetuned:
    lessons = build_set(audited, tmp_path_factory.mktemp("sets") / "set").labelled(LABELS)
    return finetune(load_classifier(student), lessons, originals(), SETTINGS, seed=1)


def test_counterfactuals_repair_a_clever_hans(student: Path, repaired: Finetuned) -> None:
    before, after = worst(load_classifier(student)), worst(repaired.classifier)
    assert before < 0.2
    assert after > 0.8
    assert repaired.step > 0
    assert repaired.after.better_than(repaired.before)
    x, y, _ = pictures(200, 99, rho=1.0)
    assert float((repaired.classifier.probabilities(x).argmax(1) == y).float().mean()) > 0.9


def test_the_same_seed_gives_the_same_weights_and_the_classifier_handed_in_stays(student: Path) -> None:
    classifier = load_classifier(student)
    x, y, _ = pictures(40, 8, rho=0.5)
    lessons = Labelled.of(x, y)
    short = FinetuneSettings(steps=4, batch=8, every=2)
    state = torch.random.get_rng_state()
    runs = [finetune(classifier, lessons, originals(40), short, seed=s).classifier.content_hash for s in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    assert classifier.content_hash == load_classifier(student).content_hash
    assert not any(parameter.requires_grad for parameter in classifier.parameters())
    assert not classifier.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_without_an_improvement_the_weights_stay(student: Path) -> None:
    x, y, _ = pictures(60, 4, rho=1.0)
    found = finetune(
        load_classifier(student),
        Labelled.of(x, y),
        Labelled.of(x, 1 - y),
        FinetuneSettings(steps=2, batch=8, rate=1e-12, every=1),
    )
    assert found.after.score == found.before.score


def test_a_saved_classifier_is_opened_again_as_it_was(student: Path, repaired: Finetuned, tmp_path: Path) -> None:
    save_classifier(repaired.classifier, student, tmp_path / "repaired")
    again = load_classifier(tmp_path / "repaired")
    assert again.content_hash == repaired.classifier.content_hash
    assert again.labels == LABELS
    assert {file.name for file in (tmp_path / "repaired").iterdir()} == {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }


def test_pictures_of_one_origin_are_held_out_together_and_stay_when_others_join() -> None:
    origins = [row // 3 for row in range(60)]
    x = torch.zeros(60, 3, 2, 2)
    data = Labelled.of(x, torch.zeros(60), origins)
    learned, held = data.split(0.3, seed=2)
    assert not set(learned.origins.tolist()) & set(held.origins.tolist())
    assert len(learned) + len(held) == 60
    assert 0 < len(held) < 40
    more = Labelled.of(torch.zeros(90, 3, 2, 2), torch.zeros(90), [*origins, *range(100, 130)]).split(0.3, seed=2)[1]
    assert set(held.origins.tolist()) == {origin for origin in more.origins.tolist() if origin < 100}
    for seed in range(20):
        assert all(len(part) == 1 for part in Labelled.of(x[:2], torch.zeros(2)).split(0.2, seed))
    with pytest.raises(InputError, match="two originals"):
        Labelled.of(x[:2], torch.zeros(2), [5, 5]).split(0.2, seed=0)


@pytest.mark.parametrize("setting", [{"steps": 0}, {"batch": 7}, {"held_out": 1.0}, {"rate": 0.0}, {"rate": math.nan}])
def test_settings_that_cannot_be_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        FinetuneSettings(**setting)


def test_a_rate_that_diverges_is_said(student: Path) -> None:
    x, y, _ = pictures(20, 4, rho=1.0)
    with pytest.raises(ClassifierError, match="smaller learning rate"):
        finetune(
            load_classifier(student),
            Labelled.of(x, y),
            Labelled.of(x, y),
            FinetuneSettings(steps=60, batch=4, rate=1e30),
        )


# Calibration -----------------------------------------------------------------------------------------------------


def test_the_calibration_error_in_closed_form() -> None:
    p = torch.tensor([[0.9, 0.1]] * 10 + [[0.35, 0.65]] * 10)
    labels = torch.tensor([0] * 9 + [1] + [1] * 4 + [0] * 6)
    # 0.9 sure and right 9 times of 10; 0.65 sure and right 4 times of 10.
    assert expected_calibration_error(p, labels) == pytest.approx(0.5 * 0.25, abs=1e-6)
    assert expected_calibration_error(torch.eye(2), torch.tensor([0, 1])) == 0
    assert expected_calibration_error(torch.eye(2), torch.tensor([1, 0])) == 1


def test_the_temperature_undoes_overconfidence() -> None:
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 3, generator=g).double()
    labels = torch.multinomial(logits.softmax(1), 1, generator=g)[:, 0]
    sharp = (3 * logits).softmax(1)
    temperature = fit_temperature(sharp, labels)
    assert temperature == pytest.approx(3, rel=0.1)
    assert torch.allclose(at_temperature(sharp, 3.0), logits.softmax(1), atol=1e-6)
    assert expected_calibration_error(at_temperature(sharp, temperature), labels) < expected_calibration_error(
        sharp, labels
    )


def test_n_right_answers_prove_a_confidence_of_n_plus_1_of_n_plus_2() -> None:
    p = torch.tensor([[0.9, 0.1]] * 8 + [[0.1, 0.9]] * 10)
    labels = torch.tensor([0] * 8 + [1] * 10)
    found = at_temperature(p, fit_temperature(p, labels))
    assert torch.allclose(found.max(1).values, torch.tensor(19 / 20, dtype=torch.float64), atol=1e-4)


# Rounds ----------------------------------------------------------------------------------------------------------


def test_two_rounds_write_what_was_gained(student: Path, audited: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def audit_again(classifier: HuggingFaceClassifier, folder: Path) -> None:
        seen.append(classifier.content_hash)
        # The repaired classifier no longer follows the patch: the first student's counterfactuals stand in for others.
        judgement = Judgement.FALSE if len(seen) == 1 else Judgement.TRUE
        audit_folder(folder, load_classifier(student), n=20, judgement=judgement)

    short = FinetuneSettings(steps=30, batch=32, rate=3e-3, every=10)
    content = repair(
        load_classifier(student),
        student,
        audited,
        originals(),
        originals(100, seed=55),
        fresh(),
        tmp_path,
        rounds=3,
        seed=1,
        settings=short,
        audit_again=audit_again,
    )
    assert content == json.loads((tmp_path / "cfkd.json").read_text())
    assert len(content["rounds"]) == len(seen) == 2  # the second audit found nothing false
    assert content["rounds"][1]["counterfactuals"] > content["rounds"][0]["counterfactuals"]
    assert content["worst_group_before"] < 0.2 < 0.6 < content["worst_group_after"]
    expected = (content["aga_after"] - content["aga_before"]) / (1 - content["aga_before"])
    assert content["gain"] == pytest.approx(expected)
    assert content["gain"] > 0.6
    assert content["poisoned_after"] > 0.9
    assert {"accuracy_before", "accuracy_after", "ece_before", "ece_after", "seed", "hashes"} <= content.keys()
    scores = [one["validation_of_all_rounds"]["score"] for one in content["rounds"]]
    assert scores[content["best_round"] - 1] == max(scores)
    kept = load_classifier(tmp_path / "classifier")
    assert kept.content_hash == content["hashes"]["classifier_after"]
    assert worst(kept) == content["worst_group_after"]
    table = DebiasingSet.read(tmp_path / "set").table
    assert set(table["audit"]) == {0, 1}
    assert table["image"].str.startswith("images/round1-").sum() == (table["audit"] == 1).sum()


def test_a_repair_refuses_what_does_not_fit(student: Path, audited: Path, tmp_path: Path) -> None:
    def go(classifier: HuggingFaceClassifier, rounds: int = 1) -> None:
        repair(classifier, student, audited, originals(), originals(), fresh(), tmp_path / "out", rounds=rounds)

    classifier = load_classifier(student)
    with pytest.raises(InputError, match="1 to 20 rounds"):
        go(classifier, rounds=0)
    with pytest.raises(InputError, match="Further rounds need an audit"):
        go(classifier, rounds=2)
    with torch.no_grad():
        next(classifier.model.parameters()).add_(1)
    with pytest.raises(InputError, match="another classifier"):
        go(classifier)
    assert not (tmp_path / "out").exists()


def test_test_data_needs_its_group_column() -> None:
    x, y, patches = pictures(30, 3, rho=0.5)
    data = dataset_of_images(x, [LABELS[i] for i in y.tolist()], {"patch": patches.tolist()})
    found = TestData.of(data, LABELS, "patch", most=20)
    assert len(found.data) == 20
    assert found.confounders.tolist() == patches[found.data.origins].tolist()
    assert found.data.labels.tolist() == y[found.data.origins].tolist()
    with pytest.raises(InputError, match="no group column 'center'; it has: patch"):
        TestData.of(data, LABELS, "center", most=20)
    learned, ordinary = ordinary_split(data, LABELS, most=25)
    assert (len(learned), len(ordinary)) == (20, 5)
    assert not set(learned.origins.tolist()) & set(ordinary.origins.tolist())


# The command -----------------------------------------------------------------------------------------------------


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    args = parser.parse_args(["cfkd", *map(str, argv)])
    return int(args.run(args))


def test_the_command_makes_a_set(audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--audit", audited, "--out", tmp_path) == 0
    assert "counterfactuals to learn from" in capsys.readouterr().out
    assert (tmp_path / "set" / "manifest.parquet").is_file()


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("INCONCLUSIVE", 3), ("FAIL", 3)])
def test_nothing_false_is_no_error_where_the_audit_passed(
    student: Path, tmp_path: Path, verdict: str, code: int
) -> None:
    classifier = load_classifier(student)
    folder = audit_folder(tmp_path / "a", classifier, n=4, judgement=Judgement.TRUE, verdict=verdict)
    assert run("--audit", folder, "--out", tmp_path / "out") == code
    assert not (tmp_path / "out").exists()


def test_the_command_repairs_a_classifier_of_the_user_s(
    student: Path, audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed, rho in (("train", 31, 1.0), ("test", 77, 0.5)):
        x, y, patches = pictures(120, seed, rho)
        files = [f"{row:03d}.png" for row in range(len(x))]
        for file, image in zip(files, x, strict=True):
            save_png(to_pil(image), tmp_path / name / file)
        table = pd.DataFrame({"image": files, "label": [LABELS[i] for i in y.tolist()], "patch": patches.tolist()})
        table.to_csv(tmp_path / name / "manifest.csv", index=False)
    given = ["--audit", audited, "--out", tmp_path / "out", "--finetune", "--no-reaudit", "--classifier", student]
    given += ["--train-data", tmp_path / "train", "--test-data", tmp_path / "test", "--steps", 40, "--rate", 3e-3]
    assert run(*given, "--group-column", "patch") == 0
    assert "worst group: 0." in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "cfkd.json").read_text())
    assert content["gain"] > 0.5
    assert content["verdict_after"] is None
    assert content["before"]["worst_group"]["name"] in {f"{label}, {patch}" for label in LABELS for patch in "01"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "--finetune needs the classifier"),
        (["--classifier", "x"], "needs --train-data"),
        (["--world", "portraits", "--group-column", "x"], "--group-column does not go with --world"),
        (["--classifier", "x", "--train-data", "x", "--test-data", "x", "--group-column", "x"], "--no-reaudit"),
    ],
)
def test_a_repair_says_what_it_lacks(audited: Path, tmp_path: Path, options: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        run("--audit", audited, "--out", tmp_path, "--finetune", *options)
