"""What one audit leaves behind: report.json, junit.xml, summary.md and report.html, one file with its pictures inside.

report.json is the record; the other three say the same to a pipeline, a merge request and a person.
"""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.dataset import Dataset
from audit.explain import Explainer
from audit.findings import Finding, attribute_findings, cluster_findings, headline, region_findings
from audit.junit import Case, write_junit
from audit.metrics import Mean, diversity, flip_rate, hoyer_sparsity, mean_of, na, nafr, sparsity
from audit.pages import kind_of, page, printable
from audit.policy import Policy
from audit.run import Audit, AuditedImage
from audit.teachers import AttributeTeacher, Judgement, Teacher
from audit.verdict import Outcome
from engine.methods import METHODS
from engine.rate import Rate
from engine.writing import write_text

FORMAT = "pfungst-report/1"
PACKAGES = ("torch", "diffusers", "transformers", "numpy", "pandas")
ENCODER = "the prior's latents"


@dataclass(frozen=True)
class Names:
    """What is known of the data beyond its labels, so that findings can be said in words."""

    attributes: AttributeTeacher | None = None
    regions: Mapping[str, Callable[[Sequence[int]], Tensor]] = field(default_factory=dict)
    """By name, data set rows to masks [N, 1, H, W] in [0, 1]."""


@dataclass(frozen=True)
class Report:
    """The record of an audit and the pictures that its page shows."""

    content: dict[str, Any]
    findings: tuple[Finding, ...]
    shown: tuple[tuple[AuditedImage, int], ...]
    """The false first counterfactuals; findings' examples are indices of it."""


def build(
    audit: Audit, explainer: Explainer, dataset: Dataset, teacher: Teacher, policy: Policy, names: Names
) -> Report:
    """Everything that report.json holds."""
    false = [(image, 0) for image in audit.images if image.reliance == 1.0]
    findings = _findings(audit, false, names)
    verdict = audit.verdict.report()
    content = {
        "format": FORMAT,
        **verdict,
        "headline": _headline(audit, findings),
        "findings": [
            {**asdict(finding), "examples": [_name(false[i]) for i in finding.examples]} for finding in findings
        ],
        "metrics": _metrics(audit, explainer),
        "prerequisites": asdict(audit.prerequisites),
        "teacher": {
            "name": teacher.name,
            "accuracy": None if teacher.accuracy is None else asdict(teacher.accuracy),
            "content_hash": teacher.content_hash,
        },
        "data": {
            "n": len(dataset),
            "labels": list(dataset.labels),
            "groups": list(dataset.group_columns),
            "unreadable": dict(dataset.bad),
        },
        "images": [image.as_dict() for image in audit.images],
        "policy": policy.model_dump(mode="json"),
        "method": explainer.method,
        "recipe": explainer.recipe.model_dump(mode="json"),
        "hashes": audit.identity,
        "versions": {"pfungst": version("pfungst"), "python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
        "seconds": round(audit.seconds, 3),
        "resumed_images": audit.resumed,
    }
    return Report(_finite(content), tuple(findings), tuple(false))


def write(report: Report, audit: Audit) -> Path:
    """Writes all four files into the audit's folder, report.json last, and returns the path of the page."""
    out, content = audit.out, report.content
    _replace(out / "report.html", page(report.content, _pictures(report, audit)))
    _replace(out / "summary.md", markdown(content))
    write_junit(out / "junit.xml", "pfungst audit", junit_cases(content), {"verdict": content["verdict"]})
    _replace(out / "report.json", json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    return out / "report.html"


def junit_cases(content: Mapping[str, Any]) -> list[Case]:
    """One case per direction, and one for what had to be known beforehand."""
    outcome = content["verdict"]
    cases = []
    for record in content["directions"]:
        over, within = record["lower"] > record["limit"], record["upper"] <= record["limit"]
        state = "failed" if over and outcome == Outcome.FAIL else "passed" if within else "skipped"
        message = (
            f"spurious reliance {_percent(record['reliance'])}, between {_percent(record['lower'])} and "
            f"{_percent(record['upper'])}; limit {_percent(record['limit'])}"
        )
        cases.append(Case(record["direction"], "pfungst.reliance", 0.0, state, message))  # type: ignore[arg-type]
    sound = outcome != Outcome.INCONCLUSIVE
    reasons = "\n".join(content["reasons"])
    cases.append(
        Case("verdict reached", "pfungst.verdict", content["seconds"], "passed" if sound else "error", outcome, reasons)
    )
    return cases


def markdown(content: Mapping[str, Any]) -> str:
    """A summary for a merge request."""
    lines = [f"## Pfungst: {content['verdict']}", "", _cell(content["headline"]), ""]
    lines += [f"* {_cell(reason)}" for reason in content["reasons"]]
    lines += ["", "| direction | reliance | bounds | limit | images | flipped |", "|---|---|---|---|---|---|"]
    for record in content["directions"]:
        bounds = f"{_percent(record['lower'])} to {_percent(record['upper'])}"
        lines.append(
            f"| {_cell(record['direction'])} | {_percent(record['reliance'])} | {bounds} "
            f"| {_percent(record['limit'])} | {record['n_images']} | {_percent(record['flip_rate'])} |"
        )
    if content["findings"]:
        lines += ["", "What moved:", ""] + [f"* {_cell(finding['sentence'])}" for finding in content["findings"]]
    lines += ["", f"Counterfactuals by {_cell(METHODS[content['method']].title)}."]
    return "\n".join(lines) + "\n"


def _findings(audit: Audit, false: list[tuple[AuditedImage, int]], names: Names) -> list[Finding]:
    if not false:
        return []
    x, x_cf, edits = audit.pictures(false)
    rows = [image.row for image, _ in false]
    found: list[Finding] = []
    if names.attributes is not None:
        found += attribute_findings(names.attributes.shifts(x, x_cf))
    found += region_findings(edits, {name: region(rows) for name, region in names.regions.items()})
    return found + cluster_findings(x, x_cf)


def _headline(audit: Audit, findings: Sequence[Finding]) -> str:
    """The audit in one or two sentences."""
    outcome, direction = audit.verdict.outcome, audit.verdict.worst_direction
    said = headline(findings)
    if outcome is Outcome.FAIL:
        shortcut, sentence = said or ("something it should not", "")
        return f"The classifier leans on {shortcut} ({direction}). {sentence}".rstrip()
    if outcome is Outcome.PASS:
        return "No reliance on a spurious feature above the limit."
    return "The audit could not be decided."


def _metrics(audit: Audit, explainer: Explainer) -> dict[str, Any]:
    """The metrics of the first counterfactuals, with intervals; of later ones, how many are false."""
    if not audit.images:
        return {}
    first = [image.counterfactuals[0] for image in audit.images]
    flips, confirmed = [one.flipped for one in first], [one.confirmed for one in first]
    valid = [one.valid for one in first]
    chosen = [(image, k) for image in audit.images for k in range(len(image.counterfactuals))]
    x, x_cf, _ = audit.pictures(chosen)
    with torch.no_grad():
        delta = torch.cat(
            [
                (explainer.prior.encode(b) - explainer.prior.encode(a)).flatten(1)
                for a, b in zip(x.split(32), x_cf.split(32), strict=True)
            ]
        ).view(len(audit.images), -1, explainer.prior.encode(x[:1]).numel())
    both = np.array([[one.valid for one in image.counterfactuals] for image in audit.images])
    areas = np.array([one.area for one in first])[np.array(valid)]
    numbers: dict[str, Rate | Mean] = {
        "flip_rate": flip_rate(flips),
        "na": na(flips, confirmed),
        "nafr": nafr(flips, confirmed),
        "area": mean_of(areas),
        "sparsity": mean_of(sparsity(delta[valid, 0].numpy()) if any(valid) else []),
        "hoyer": mean_of(hoyer_sparsity(delta[valid, 0].numpy()) if any(valid) else []),
    }
    if delta.shape[1] > 1:
        numbers["diversity"] = diversity(delta.numpy(), both).absolute
        later = [one.judgement for image in audit.images for one in image.counterfactuals[1:] if one.valid]
        numbers["later_false"] = Rate.of(later.count(Judgement.FALSE), len(later))
    return {
        "encoder": ENCODER,
        "area_median": float(np.median(areas)) if len(areas) else None,
        **{name: asdict(number) for name, number in numbers.items()},
    }


def _pictures(report: Report, audit: Audit) -> dict[str, tuple[Tensor, Tensor]]:
    """(original, counterfactual) by name, of what the page shows: the findings' examples and some of each judgement."""
    wanted = {_name(report.shown[i]): report.shown[i] for finding in report.findings for i in finding.examples}
    by_judgement: dict[str, int] = {}
    for image in audit.images:
        for k, one in enumerate(image.counterfactuals):
            kind = kind_of(one.valid, str(one.judgement), k)
            if by_judgement.get(kind, 0) < 12:
                by_judgement[kind] = by_judgement.get(kind, 0) + 1
                wanted[one.name] = (image, k)
    if not wanted:
        return {}
    x, x_cf, _ = audit.pictures(list(wanted.values()))
    return {name: (a, b) for name, a, b in zip(wanted, x, x_cf, strict=True)}


def _name(one: tuple[AuditedImage, int]) -> str:
    image, k = one
    return image.counterfactuals[k].name


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: what does not exist is null."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.0f} %"


def _cell(text: str) -> str:
    """Text of strangers inside Markdown: no pipes, no markup, one line."""
    return " ".join(printable(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _replace(file: Path, text: str) -> None:
    write_text(file, text, errors="replace")  # half a character is no reason to lose a report
