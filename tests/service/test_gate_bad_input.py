"""What the gate answers to bad input: one sentence, its exit code, nothing half done, and the next call works.

Everything is real and small: the embedded prior and classifiers, pictures of their world as files, three steps of
guidance, and surrogates that were hardly taught.
"""

import functools
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from audit import explain
from audit.dataset import write_csv
from audit.pictures import save_png, to_pil
from engine.surrogate import EVALUATOR, GUIDE
from service.cli import main
from worlds import WORLDS
from worlds.store import RECIPES, WEIGHTS

WORLD = WORLDS["portraits"]
STUDENT, ORACLE = (str(WEIGHTS / WORLD.name / role) for role in ("student", "oracle"))
FEW = {"steps": 3, "batch": 4, "adversarial_weight": 0.0, "extra_queries": 0}
N = 20


@pytest.fixture(autouse=True)
def hardly_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Surrogates of three steps, on the data set's own pictures."""
    quick = functools.partial(explain.distil_pair, guide=GUIDE.changed(**FEW), evaluator=EVALUATOR.changed(**FEW))
    monkeypatch.setattr(explain, "distil_pair", quick)
    monkeypatch.setattr(explain, "FEW_PICTURES", N)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of portraits with a manifest: image, label, note."""
    folder = tmp_path_factory.mktemp("portraits")
    data = WORLD.sample(N, seed=606)
    for row, image in enumerate(data.images):
        save_png(to_pil(image), folder / f"{row}.png")
    labels = [WORLD.labels[label] for label in data.labels.tolist()]
    write_csv(pd.DataFrame({"image": [f"{row}.png" for row in range(N)], "label": labels}), folder / "all.csv")
    return folder


def recipe(folder: Path, **settings: object) -> str:
    """The embedded recipe with a short schedule and a single try."""
    content = json.loads((RECIPES / f"{WORLD.name}.json").read_text())
    short = {"steps": 4, "escalation": [1.0], "prune": False, "second_pass": False}
    (folder / "recipe.json").write_text(json.dumps({**content, **short, **settings}))
    return str(folder / "recipe.json")


def policy(folder: Path, **settings: object) -> str:
    """Instruments are not asked for more than they have: what is tested here is something else."""
    lenient = {"min_evaluator_agreement": 0, "min_teacher_accuracy": 0, **settings}
    (folder / "policy.yaml").write_text("".join(f"{name}: {value}\n" for name, value in lenient.items()))
    return str(folder / "policy.yaml")


def gate(folder: Path, data: Path, *more: str) -> int:
    """`pfungst audit` of the poisoned student on a manifest, into folder/out."""
    what = ["--classifier", STUDENT, "--data", str(data), "--prior", WORLD.name, "--teacher", ORACLE, "--k", "1"]
    return main(["audit", *what, "--out", str(folder / "out"), "--cache", str(folder / "cache"), *more])


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, after the progress bars."""
    said = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line.startswith("pfungst: ")]
    assert len(said) == 1
    return said[0]


def test_too_few_samples_are_inconclusive_and_a_report_that_cannot_be_written_is_an_error(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--policy", policy(tmp_path), "--recipe", recipe(tmp_path)]
    few = tmp_path / "few"
    shutil.copytree(pictures, few)
    write_csv(pd.read_csv(few / "all.csv").iloc[:16], few / "few.csv")
    out = tmp_path / "out"
    assert gate(tmp_path, few / "few.csv", *settings) == 3
    said = capsys.readouterr().out
    assert said.startswith("INCONCLUSIVE")
    assert "the policy asks for 20" in said
    assert json.loads((out / "report.json").read_text())["verdict"] == "INCONCLUSIVE"
    assert ElementTree.parse(out / "junit.xml").getroot().findall(".//error")

    # A folder stands where the report should go: no permission is needed to be in the way.
    for name in ("report.html", "report.json"):
        (out / name).unlink()
        (out / name / "inside").mkdir(parents=True)
        assert gate(tmp_path, few / "few.csv", *settings) == 4
        assert name in sentence(capsys)
        shutil.rmtree(out / name)
    finished = (out / "journal.jsonl").read_bytes()
    assert gate(tmp_path, few / "few.csv", *settings) == 3
    assert (out / "journal.jsonl").read_bytes() == finished
    assert (out / "report.html").is_file()


def test_a_generator_that_never_flips_is_inconclusive_not_a_pass(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # tau above 1 freezes every pixel: each counterfactual is its original.
    settings = ["--policy", policy(tmp_path, min_images=1, max_images=6), "--recipe", recipe(tmp_path, tau=2.0)]
    assert gate(tmp_path, pictures / "all.csv", *settings) == 3
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["verdict"], report["flip_rate"], report["reliance"]) == ("INCONCLUSIVE", 0.0, None)
    assert "could be flipped, so nothing is known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limit: [", "cannot be read as YAML"),
        ("limit: 2", "limit"),
        ("limit: yes", "limit"),
        ("alpha: .nan", "alpha"),
        ("limits: 0.2", "no setting 'limits'"),
        ("- limit", "settings by name"),
        ("limit: 0.1\nlimit: 0.9", "twice"),
        ("min_images: 500", "min_images"),
        ("accepted: [{direction: dark -> blond, expires: 2030-01-01}]", "reason"),
        ("limit: !!python/object/apply:os.getcwd []", "cannot be read as YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_malformed_policy_is_bad_input_before_anything_is_opened(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.yaml"
    if text is not None:
        file.write_text(text)
    assert gate(tmp_path, tmp_path / "nothing.csv", "--policy", str(file)) == 2
    assert said in sentence(capsys)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists()
    file.write_text("limit: 0.1\n")
    assert gate(tmp_path, tmp_path / "nothing.csv", "--policy", str(file)) == 2
    assert "nothing.csv" in sentence(capsys), "a good policy is read, and the next thing is missing"


def manifest(pictures: Path, name: str, **columns: list[str]) -> Path:
    """The manifest of all pictures with some columns replaced or added, written as a spreadsheet would."""
    table = pd.read_csv(pictures / "all.csv").assign(**columns)
    table.to_csv(pictures / name, index=False)
    return pictures / name


def test_data_that_cannot_be_audited_is_bad_input_and_nothing_is_stored(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = manifest(pictures, "gone.csv", image=[f"{row}.png" if row % 2 else f"gone-{row}.png" for row in range(N)])
    assert gate(tmp_path, gone) == 2
    assert "gone-" in sentence(capsys)
    renamed = manifest(pictures, "renamed.csv", label=["grey", "blond"] * (N // 2))
    assert gate(tmp_path, renamed) == 2
    assert "does not know 1 of the 2 labels in the data: 'grey'" in sentence(capsys)
    formulas = ["=HYPERLINK(A1)", "=HYPERLINK(A2)", *(f"{row}.png" for row in range(2, N))]
    assert gate(tmp_path, manifest(pictures, "formula.csv", image=formulas)) == 2
    assert "=HYPERLINK(A" in sentence(capsys)
    one = manifest(pictures, "one.csv", label=["blond"] * N)
    assert gate(tmp_path, one) == 2
    assert "at least two labels" in sentence(capsys)
    (pictures / "empty.csv").write_text("image,label\n")
    assert gate(tmp_path, pictures / "empty.csv") == 2
    assert "no pictures" in sentence(capsys)
    assert not (tmp_path / "out").exists()
    settings = ["--policy", policy(tmp_path, min_images=1, max_images=4), "--recipe", recipe(tmp_path)]
    assert gate(tmp_path, pictures / "all.csv", *settings) in (0, 1, 3)
    assert (tmp_path / "out" / "report.json").is_file()


def test_a_formula_among_the_groups_is_text_in_the_report(pictures: Path, tmp_path: Path) -> None:
    evil = '=HYPERLINK("http://x.test","<script>")'
    data = manifest(pictures, "groups.csv", note=[evil, "plain"] * (N // 2))
    settings = ["--policy", policy(tmp_path, min_images=1, max_images=4), "--recipe", recipe(tmp_path)]
    assert gate(tmp_path, data, *settings) in (0, 1, 3)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {image["groups"]["note"] for image in report["images"]} == {evil, "plain"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "href" not in page


def test_labels_of_strangers_stay_text_from_the_command_to_the_report(pictures: Path, tmp_path: Path) -> None:
    evil = dict(zip(WORLD.labels, ("<script>alert(1)</script>", "]]>\x07&dark"), strict=True))
    for role in ("student", "oracle"):
        shutil.copytree(WEIGHTS / WORLD.name / role, tmp_path / role)
        config = json.loads((tmp_path / role / "config.json").read_text())
        names = {index: evil[name] for index, name in config["id2label"].items()}
        config |= {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}
        (tmp_path / role / "config.json").write_text(json.dumps(config))
    table = pd.read_csv(pictures / "all.csv")
    data = manifest(pictures, "evil.csv", label=[evil[label] for label in table["label"]])
    what = ["--classifier", str(tmp_path / "student"), "--teacher", str(tmp_path / "oracle"), "--data", str(data)]
    settings = ["--policy", policy(tmp_path, min_images=1, max_images=4), "--recipe", recipe(tmp_path), "--k", "1"]
    where = ["--prior", WORLD.name, "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert main(["audit", *what, *where, *settings]) in (0, 1, 3)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x07" not in page
    ElementTree.parse(tmp_path / "out" / "junit.xml")
    labels = {image["label"] for image in json.loads((tmp_path / "out" / "report.json").read_text())["images"]}
    assert labels <= set(evil.values())
