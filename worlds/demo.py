"""The demonstration: both embedded worlds, what their priors can draw, and where the poisoned students fail."""

import html
from pathlib import Path

import torch

from audit.metrics import group_accuracies
from audit.pictures import data_uri, save_png, sheet
from engine.sampling import generate, reconstruct
from engine.writing import write_text
from worlds import WORLDS
from worlds.measure import TEST_SEED, predictions
from worlds.store import open_classifier, open_prior
from worlds.world import Sample, World

COLUMNS = 12
N_GROUPS = 400

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Pfungst: the embedded worlds</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fafaf8; margin: 0 auto; max-width: 1000px;
  padding: 1rem; }}
img {{ width: 100%; height: auto; image-rendering: pixelated; border-radius: 4px; }}
figure {{ margin: 1rem 0; }} figcaption {{ color: #555; font-size: 0.9rem; }}
table {{ border-collapse: collapse; }} th, td {{ padding: 0.25rem 0.75rem; text-align: left;
  border-bottom: 1px solid #ddd; }} td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.low {{ color: #a4161a; font-weight: 600; }}
</style></head><body>
<h1>The embedded worlds</h1>
<p>Two procedural worlds whose truth is known, each with a small generative prior and three classifiers. The student was
trained on data in which label and confounder almost always agree; its clean twin was not.</p>
{sections}
</body></html>
"""


def main(out: Path) -> Path:
    """Writes pictures and one page about both worlds into `out` and returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    sections = [_section(world, out) for world in WORLDS.values()]
    page = out / "index.html"
    write_text(page, PAGE.format(sections="\n".join(sections)))
    return page


def _section(world: World, out: Path) -> str:
    prior = open_prior(world)
    data = world.sample(N_GROUPS, TEST_SEED)
    originals = data.images[:COLUMNS]
    rows = {
        "pictures": originals,
        "reconstructions": reconstruct(prior, originals),
        "samples": generate(prior, COLUMNS, world.size, seed=TEST_SEED),
    }
    figures = []
    for name, row in rows.items():
        picture = sheet([row], zoom=2)
        save_png(picture, out / f"{world.name}-{name}.png")
        figures.append(
            f'<figure><img src="{data_uri(picture)}" alt="{world.name}: {name}">'
            f"<figcaption>{name}</figcaption></figure>"
        )
    return f"<h2>{html.escape(world.name)}</h2>\n" + "\n".join(figures) + "\n" + _groups(world, data)


def _groups(world: World, data: Sample) -> str:
    """Accuracy of student and twin in each label × confounder group."""
    head = "".join(
        f"<th>{html.escape(label)}, {html.escape(confounder)}</th>"
        for label in world.labels
        for confounder in world.confounders
    )
    body = ""
    for role in ("student", "twin"):
        found = group_accuracies(predictions(open_classifier(world, role), data.images), data.labels, data.confounders)
        cells = ""
        for label in (0, 1):
            for confounder in (0, 1):
                accuracy = found.groups[label, confounder].value
                low = " low" if accuracy < 0.7 else ""
                cells += f'<td class="number{low}">{accuracy:.2f}</td>'
        body += f'<tr><td>{role}</td>{cells}<td class="number">{found.worst.value:.2f}</td></tr>'
    return (
        f"<table><tr><th>accuracy (n = {N_GROUPS})</th>{head}<th>worst group</th></tr>{body}</table>"
        f"<p>Label: {html.escape(world.label_region)}. Confounder: {html.escape(world.confounder_name)}.</p>"
    )
