"""The report as one HTML file: no script, no external request, readable on a phone and on paper."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from audit.pictures import data_uri, heat_map, sheet

Pictures = Mapping[str, tuple[Tensor, Tensor]]

STYLE = """
:root { --ink: #1d2430; --quiet: #5b6472; --line: #dde1e7; --paper: #fbfbf9; --pass: #1b6e3c; --fail: #a3161b;
  --open: #8a5a00; }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 1080px; padding: 1.25rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
.banner { border-left: 8px solid var(--tone); background: #fff; padding: 1rem 1.25rem; border-radius: 4px; }
.PASS { --tone: var(--pass); } .FAIL { --tone: var(--fail); } .INCONCLUSIVE { --tone: var(--open); }
.word { color: var(--tone); font-size: 2rem; font-weight: 700; letter-spacing: .02em; }
.lead { font-size: 1.1rem; margin: .25rem 0 .75rem; } ul { padding-left: 1.2rem; margin: .5rem 0; }
.quiet, figcaption, caption { color: var(--quiet); font-size: .9rem; text-align: left; }
.wide { overflow-x: auto; } table { border-collapse: collapse; min-width: 100%; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: .75rem; }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 4px; padding: .5rem; }
figure img { width: 100%; height: auto; image-rendering: pixelated; display: block; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 4px; } .banner + .banner { margin-top: 1rem; }
.banner h2 { margin-top: 0; }
svg { width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 4px; }
code { overflow-wrap: anywhere; font-size: .85rem; } details { margin: .5rem 0; }
@media print { body { max-width: none; } figure { break-inside: avoid; } }
"""

WORDS = {
    "true": "true: the real class changed",
    "false": "false: only something else changed",
    "out_of_distribution": "out of distribution",
    "None": "no judgement",
    "invalid": "not valid: the classifier or the evaluator was not flipped",
    "later": "second ways, with the place of the first edit barred (not in the verdict)",
}
METRICS = {
    "flip_rate": "flip rate",
    "na": "NA, non-adversarial of the flipped",
    "nafr": "NAFR, non-adversarial of all",
    "area": "edited area",
    "sparsity": "sparsity",
    "hoyer": "sparsity (Hoyer)",
    "diversity": "diversity",
    "later_false": "false of the valid second ones (not in the verdict)",
}


UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, marks that turn the direction of writing, and halves of characters."""


def printable(text: str) -> str:
    """Text of strangers, with a replacement character for what a page cannot show or should not obey."""
    return UNSEEN.sub("\ufffd", text)


def escape(text: str) -> str:
    """Text of strangers as HTML, in an element or in a quoted attribute."""
    return html.escape(printable(text), quote=True)


def page(content: Mapping[str, Any], pictures: Pictures) -> str:
    """The whole page of one report."""
    outcome = escape(content["verdict"])
    parts = [
        f'<section class="banner {outcome}"><h1>Audit of an image classifier</h1><div class="word">{outcome}</div>'
        f'<p class="lead">{escape(content["headline"])}</p>{_list(content["reasons"])}'
        f'<p class="quiet">{content["n_images"]} images audited, {content["n_measured"]} measured. '
        f"Each bound holds at any time with {100 * (1 - content['alpha']):.0f} % confidence.</p></section>",
        "<h2>How sure</h2>",
        *(_direction(record) for record in content["directions"]),
        _findings(content["findings"], pictures),
        _galleries(content["images"], pictures),
        _metrics(content["metrics"]),
        _provenance(content),
    ]
    return _document(f"Pfungst: {content['verdict']}", "".join(parts))


def _direction(record: Mapping[str, Any]) -> str:
    reliance = "not measured" if record["reliance"] is None else _percent(record["reliance"])
    flipped = "–" if record["flip_rate"] is None else _percent(record["flip_rate"])
    caption = (
        f"<b>{escape(record['direction'])}</b>: reliance {reliance}, between {_percent(record['lower'])} and "
        f"{_percent(record['upper'])}; limit {_percent(record['limit'])}. {record['n_measured']} of "
        f"{record['n_images']} images measured, {flipped} flipped."
    )
    return f"<p>{caption}</p>{curve(record['history'], record['limit'])}"


def curve(history: Sequence[Sequence[float]], limit: float) -> str:
    """The confidence sequence as an SVG: mean, band, and the policy's limit."""
    if not history:
        return ""
    width, height, left, top, right, bottom = 720.0, 190.0, 44.0, 10.0, 12.0, 28.0
    last = max(1, int(history[-1][0]))

    def x(n: float) -> float:
        return left + (width - left - right) * n / last

    def y(share: float) -> float:
        return top + (height - top - bottom) * (1 - share)

    upper = [(0, 1.0), *((n, high) for n, _, _, high in history)]
    lower = [(0, 0.0), *((n, low) for n, _, low, _ in history)]
    band = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in [*upper, *reversed(lower)])
    mean = " ".join(f"{x(n):.1f},{y(m):.1f}" for n, m, _, _ in history)
    ticks = "".join(
        f'<text x="{left - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        f'<line x1="{left}" x2="{width - right}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#e9ecf0"/>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="confidence sequence" font-size="11" '
        f'font-family="system-ui, sans-serif" fill="#5b6472">{ticks}'
        f'<polygon points="{band}" fill="#3b6ea5" fill-opacity=".18"/>'
        f'<polyline points="{mean}" fill="none" stroke="#274d77" stroke-width="2"/>'
        f'<line x1="{left}" x2="{width - right}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" stroke="#a3161b" '
        f'stroke-dasharray="6 4"/><text x="{width - right}" y="{y(limit) - 4:.1f}" text-anchor="end" fill="#a3161b">'
        f'limit {limit:.0%}</text><text x="{left}" y="{height - 8}">0</text>'
        f'<text x="{width - right}" y="{height - 8}" text-anchor="end">{last} images</text></svg>'
    )


def _findings(findings: Sequence[Mapping[str, Any]], pictures: Pictures) -> str:
    if not findings:
        return ""
    parts = ["<h2>What moved when only something else changed</h2>"]
    for finding in findings:
        shown = "".join(_figure(name, pictures, "") for name in finding["examples"] if name in pictures)
        parts.append(f'<p>{escape(finding["sentence"])}</p><div class="row">{shown}</div>')
    return "".join(parts)


def _galleries(images: Sequence[Mapping[str, Any]], pictures: Pictures) -> str:
    """Examples of each judgement."""
    groups: dict[str, list[str]] = {}
    for image in images:
        for k, one in enumerate(image["counterfactuals"]):
            if one["name"] not in pictures:
                continue
            kind = kind_of(one["flipped"] and one["confirmed"], str(one["judgement"]), k)
            caption = (
                f"{escape(image['source'])} → {escape(image['target'])} ({one['target_probability']:.2f}), "
                f"{one['area']:.0%} edited"
            )
            groups.setdefault(kind, []).append(_figure(one["name"], pictures, caption))
    order = [kind for kind in WORDS if kind in groups]
    return "<h2>Counterfactuals</h2>" + "".join(
        f'<h3>{escape(WORDS[kind])}</h3><div class="row">{"".join(groups[kind][:12])}</div>' for kind in order
    )


def kind_of(valid: bool, judgement: str, k: int) -> str:
    """Under which of WORDS an image's k-th counterfactual is shown."""
    return "later" if k else judgement if valid else "invalid"


def _figure(name: str, pictures: Pictures, caption: str) -> str:
    x, x_cf = pictures[name]
    row = torch.stack([x, x_cf, heat_map(x[None], x_cf[None])[0]])
    zoom = max(1, 128 // x.shape[2])
    return (
        f'<figure><img src="{data_uri(sheet([row], zoom))}" alt="original, counterfactual and difference of '
        f'{escape(name)}"><figcaption>{caption}</figcaption></figure>'
    )


def _metrics(metrics: Mapping[str, Any]) -> str:
    if not metrics:
        return ""
    rows = "".join(
        f'<tr><td>{METRICS[name]}</td><td class="n">{_number(metrics[name]["value"])}</td><td class="n">'
        f"{_number(metrics[name]['lower'])} to {_number(metrics[name]['upper'])}</td>"
        f'<td class="n">{metrics[name]["n"]}</td></tr>'
        for name in METRICS
        if name in metrics
    )
    return (
        '<h2>Metrics of the first counterfactuals</h2><div class="wide"><table><caption>Distances are measured in '
        f"{escape(metrics['encoder'])}.</caption><tr><th>metric</th><th>value</th><th>95 % interval</th><th>n</th></tr>"
        f"{rows}</table></div>"
    )


def _provenance(content: Mapping[str, Any]) -> str:
    teacher = content["teacher"]
    accuracy = "not stated" if teacher["accuracy"] is None else f"{teacher['accuracy']['value']:.3f}"
    hashes = {name: value for name, value in content["hashes"].items() if name != "method"}
    rows = {
        "method": content["method"],
        "teacher": f"{teacher['name']}, accuracy on originals {accuracy}",
        "agreement of the evaluator": _number(content["prerequisites"]["evaluator_agreement"]),
        **{f"hash of {name}": str(value) for name, value in hashes.items()},
        **{f"version of {name}": value for name, value in content["versions"].items()},
        "unreadable pictures": ", ".join(content["data"]["unreadable"]) or "none",
    }
    body = "".join(
        f"<tr><td>{escape(name)}</td><td><code>{escape(value)}</code></td></tr>" for name, value in rows.items()
    )
    return f'<h2>How to make it again</h2><div class="wide"><table>{body}</table></div>'


def _list(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


# A story of several audits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chapter:
    """One step of a story: what was done, what came of it, and where it can be read in full."""

    title: str
    text: str
    verdict: str | None = None
    facts: tuple[str, ...] = ()
    link: str | None = None
    """The chapter's own page, relative to the story's."""
    pictures: tuple[tuple[str, str], ...] = ()
    """(original, counterfactual) files, relative to the story's page."""


def story(title: str, opening: str, chapters: Sequence[Chapter]) -> str:
    """A page that tells several audits in their order; its pictures are files beside it."""
    parts = [f'<h1>{escape(title)}</h1><p class="lead">{escape(opening)}</p>']
    for number, chapter in enumerate(chapters, 1):
        outcome = escape(chapter.verdict or "")
        word = f'<div class="word">{outcome}</div>' if outcome else ""
        link = f'<p><a href="{escape(chapter.link)}">the whole report</a></p>' if chapter.link else ""
        shown = "".join(
            f'<figure class="pair"><img src="{escape(a)}" alt="original">'
            f'<img src="{escape(b)}" alt="counterfactual"></figure>'
            for a, b in chapter.pictures
        )
        parts.append(
            f'<section class="banner {outcome}"><h2>{number}. {escape(chapter.title)}</h2>{word}'
            f'<p class="lead">{escape(chapter.text)}</p>{_list(chapter.facts)}<div class="row">{shown}</div>{link}'
            "</section>"
        )
    return _document(title, "".join(parts))


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )
