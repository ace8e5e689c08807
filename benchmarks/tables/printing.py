"""Tables as Markdown, CSV and JSON, and the picture grid."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from torch import Tensor

from audit.pictures import save_png, sheet
from benchmarks.numbers import finite
from benchmarks.tables.figures import Figure, Figures
from engine.writing import write_text

GRID_COLUMNS = 12
LABEL_WIDTH = 110


@dataclass(frozen=True)
class Column:
    """One column: its key, its heading, whether more is better, and how its numbers are printed."""

    key: str
    heading: str
    more: bool = True
    percent: bool = True
    digits: int = 1
    ranked: bool = True
    """Whether its best and second best are marked."""

    def text(self, value: float) -> str:
        """A value as it stands in the table."""
        return "–" if not math.isfinite(value) else f"{value * (100 if self.percent else 1):.{self.digits}f}"


COLUMNS1 = (
    Column("na", "NA"),
    Column("sparsity", "sparsity"),
    Column("nafr", "NAFR"),
    Column("diversity", "diversity"),
    Column("gain", "gain"),
    Column("flip_rate", "flip rate"),
    Column("area", "edited area", more=False),
    Column("realism", "Fréchet", more=False, percent=False, digits=2),
)
COLUMNS2 = (
    *(c for key in ("nafr", "na", "sparsity", "diversity") for c in COLUMNS1 if c.key == key),
    Column("sparsity_oracle", "sparsity in the oracle's features"),
    Column("diversity_oracle", "diversity there"),
)
ENCODED = (
    Column("sparsity", "sparsity by attributes"),
    Column("sparsity_valid", "of valid flips"),
    Column("hoyer", "Hoyer's"),
    Column("sparsity_deviations", "in standard deviations"),
    Column("sparsity_oracle", "in the oracle's features"),
    Column("sparsity_oracle_valid", "there, of valid flips"),
    Column("diversity", "diversity by attributes"),
    Column("diversity_oracle", "in the oracle's features"),
    Column("pairs", "pictures with two valid ones", percent=False, digits=0, ranked=False),
)
MOVED = (
    Column("changed", "attributes changed", more=False, percent=False),
    Column("nuisances", "of them neither label nor confounder", more=False, percent=False),
    Column("confounder", "confounder changed", ranked=False),
    Column("label", "label changed", ranked=False),
)
SAME = (
    Column("pictures", "pictures", percent=False, digits=0, ranked=False),
    Column("theirs", "its sparsity", ranked=False),
    Column("ours", "SCE-LITE-HQ's", ranked=False),
    Column("lead", "difference", ranked=False),
)
COLUMNS3 = (
    Column("seconds_per_sample", "seconds per sample", more=False, percent=False, digits=2),
    Column("peak_mb", "peak MB", more=False, percent=False, digits=0),
    Column("network_calls", "network calls", more=False, percent=False, digits=0),
    Column("times_own", "times SCE-LITE-HQ's seconds", percent=False, ranked=False),
    Column("times_onnx", "times those on ONNX Runtime", percent=False, ranked=False),
)


@dataclass
class Table:
    """A table of the paper with our numbers: rows of figures by key, or why a row is broken."""

    title: str
    columns: tuple[Column, ...]
    paper: Mapping[str, Mapping[str, float]]
    rows: dict[str, Figures] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    key: str = ""
    """What a table that is none of the paper's is called in JSON."""
    controls: frozenset[str] = frozenset()
    """Rows that no method made: they stand for comparison and take no place."""
    beside: "Table | None" = None
    """What is printed under it."""

    def chain(self) -> list["Table"]:
        """This table and all that are printed under it."""
        return [self, *([] if self.beside is None else self.beside.chain())]

    def has(self, row: str) -> bool:
        """Whether a row was measured, or tried."""
        return row in self.rows or row in self.broken

    def places(self, column: Column) -> dict[str, int]:
        """1 for the best rows of a column and 2 for the second best, by the number as it is printed."""
        if not column.ranked:
            return {}
        values = {
            row: round(figures[column.key].value, column.digits + (2 if column.percent else 0))
            for row, figures in self.rows.items()
            if row not in self.controls and column.key in figures and math.isfinite(figures[column.key].value)
        }
        ranked = sorted(set(values.values()), reverse=column.more)
        return {row: ranked.index(value) + 1 for row, value in values.items() if ranked.index(value) < 2}

    def markdown(self) -> str:
        """The table with intervals, the paper's number in brackets, the best bold and the second underlined."""
        head = ["", *(c.heading + (f" {'↑' if c.more else '↓'}" if c.ranked else "") for c in self.columns)]
        lines = [f"## {self.title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        places = {column.key: self.places(column) for column in self.columns}
        for row, figures in self.rows.items():
            cells = [self.titles.get(row, row)]
            for column in self.columns:
                figure = figures.get(column.key, Figure(math.nan))
                text = column.text(figure.value)
                text = {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(places[column.key].get(row, 0), text)
                if math.isfinite(figure.value) and math.isfinite(figure.lower) and math.isfinite(figure.upper):
                    to = " to " if figure.lower < 0 else "–"
                    text += f" <sub>{column.text(figure.lower)}{to}{column.text(figure.upper)}</sub>"
                paper = self.paper.get(row, {}).get(column.key)
                cells.append(text + (f" ({column.text(paper)})" if paper is not None else ""))
            lines.append(f"| {' | '.join(cells)} |")
        for row, reason in self.broken.items():
            said = " ".join(reason.split()).replace("|", "\\|")
            lines.append(f"| {self.titles.get(row, row)} | did not run: {said} |{' |' * (len(self.columns) - 1)}")
        return "\n".join(lines) + "\n" + ("" if self.beside is None else "\n" + self.beside.markdown())

    def records(self) -> list[dict[str, Any]]:
        """One record per number, for CSV; one without a number for a row that did not run."""
        broken = [{"table": self.title, "row": row, "did_not_run": why} for row, why in self.broken.items()]
        beside = [] if self.beside is None else self.beside.records()
        return [*broken, *self.measured(), *beside]

    def measured(self) -> list[dict[str, Any]]:
        """One record per number of this table alone."""
        return [
            {
                "table": self.title,
                "row": row,
                "metric": column.key,
                "value": finite(figures[column.key].value),
                "lower": finite(figures[column.key].lower),
                "upper": finite(figures[column.key].upper),
                "n": figures[column.key].n,
                "paper": self.paper.get(row, {}).get(column.key),
                "place": self.places(column).get(row),
            }
            for row, figures in self.rows.items()
            for column in self.columns
            if column.key in figures
        ]

    def as_dict(self) -> dict[str, Any]:
        """Row → metric → value, with the intervals beside them; a row that did not run has nothing but the reason."""
        empty = {column.key: None for column in self.columns}
        broken = {row: {**empty, "did_not_run": why} for row, why in self.broken.items()}
        return broken | {
            row: {
                **{key: finite(figure.value) for key, figure in figures.items()},
                "intervals": {key: [finite(f.lower), finite(f.upper)] for key, f in figures.items()},
            }
            for row, figures in self.rows.items()
        }


def grid(originals: Tensor, rows: Mapping[str, Tensor]) -> Image.Image:
    """Originals above one line of counterfactuals per method, each with its name."""
    lines = {"original": originals, **rows}
    pictures = sheet([x[:GRID_COLUMNS] for x in lines.values()])
    canvas = Image.new("RGB", (pictures.width + LABEL_WIDTH, pictures.height), "white")
    canvas.paste(pictures, (LABEL_WIDTH, 0))
    pen = ImageDraw.Draw(canvas)
    height = pictures.height / len(lines)
    for i, name in enumerate(lines):
        pen.text((4, int(height * i + height / 2) - 6), name, fill="black")
    return canvas


def write_results(stem: Path, text: str, tables: Sequence[Table], picture: Image.Image | None) -> None:
    """Markdown, CSV and picture under one name."""
    write_text(stem.with_suffix(".md"), text)
    stream = io.StringIO()
    names = ["table", "row", "metric", "value", "lower", "upper", "n", "paper", "place", "did_not_run"]
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(record for table in tables for record in table.records())
    write_text(stem.with_suffix(".csv"), stream.getvalue())
    if picture is not None:
        save_png(picture, stem.with_suffix(".png"))
