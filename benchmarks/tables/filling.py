"""The tables filled: each row from its record or measured now, and every row that was ever measured shown."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

import benchmarks.tables
from benchmarks.tables.attributes import CONTROL, Attributes, controls, worth
from benchmarks.tables.calibration import calibrate, calibration_of
from benchmarks.tables.case import GAIN_TEST_SEED, N_GAIN_TEST, TEST_SEED, Case, run_of
from benchmarks.tables.cost import ON_ONNX, TIMING_RUNS, Clock, Timing
from benchmarks.tables.counterfactuals import make_sets
from benchmarks.tables.figures import Figure, Figures, gained, measured, on_same_pictures, valid_flips
from benchmarks.tables.paper import PAPER1, PAPER2, PAPER3, PAPER_ROW
from benchmarks.tables.plan import ROWS, SOURCES, K, Row
from benchmarks.tables.printing import (
    COLUMNS1,
    COLUMNS2,
    COLUMNS3,
    ENCODED,
    GRID_COLUMNS,
    MOVED,
    SAME,
    Column,
    Table,
    grid,
)
from benchmarks.tables.records import CALIBRATION, Found, Records, as_figures, as_found
from engine.counterfactual import CounterfactualSet
from engine.errors import Cancelled, PfungstError
from engine.methods import DEFAULT, AnySettings
from worlds.world import Sample

HOME = Path(benchmarks.tables.__file__).parents[2]
OWN = Row.of(DEFAULT)
VALID = "valid"
"""In a record of Table 1, beside its figures: whether each picture's first counterfactual is a valid flip."""


def fill(case: Case, arguments: argparse.Namespace) -> tuple[dict[int, Table], dict[str, Any], Image.Image | None]:
    """(the tables that were asked for, every row's settings and trials, the picture grid).

    Under Table 3 of the first batch to be timed stand those of the others.

    A row that was asked for and cannot run, for want of weights or because its method breaks, stands in its tables with
    the reason. A row that was not asked for is there if it has a record.
    """
    asked = [Row.of(text) for text in arguments.methods]
    pictures = "" if arguments.seed == TEST_SEED else str(arguments.seed)
    filling = Filling(case, Records(arguments.records / case.world.name, pictures), arguments, asked)
    filling.costs = {batch: filling.empty_costs(batch) for batch in arguments.timing_batch if 3 in arguments.tables}
    filling.tables = {number: table for number, table in filling.empty().items() if number in arguments.tables}
    rows = [*(Row.of(text) for text in ROWS), *(row for row in asked if row.name not in ROWS)]
    bar = tqdm(rows, desc=case.world.name, unit="method")
    for row in bar:
        bar.set_postfix_str(row.name)
        filling.fill_row(row)
    if 1 in filling.tables:
        filling.tables[1].beside = chained(filling.beside())
    if 3 in filling.tables:
        filling.fill_costs()
    originals = filling.data.images[:GRID_COLUMNS]
    shown = {row.name for row in rows if any(table.has(row.name) for table in filling.tables.values())}
    tuned = {name: settings for name, settings in filling.tuned.items() if name in shown}
    return filling.tables, tuned, grid(originals, filling.pictures) if filling.pictures else None


@dataclass
class Filling:
    """One run of the command on one world."""

    case: Case
    records: Records
    arguments: argparse.Namespace
    asked: list[Row]
    tables: dict[int, Table] = field(default_factory=dict)
    tuned: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, Tensor] = field(default_factory=dict)
    clocks: list[Clock] = field(default_factory=list)
    costs: dict[int, Table] = field(default_factory=dict)
    """Table 3 by the batch that is timed: the first is `tables[3]`, the others are printed under it."""
    told: dict[str, Figures] = field(default_factory=dict)
    """By row: the figures of Table 1 and of what stands under it."""
    valid: dict[str, np.ndarray] = field(default_factory=dict)
    """By row: [N] whether each picture's first counterfactual is a valid flip."""
    changes: dict[str, np.ndarray] = field(default_factory=dict)
    """By row: [N, A] how far each attribute of each picture went in the first counterfactual."""

    @cached_property
    def data(self) -> Sample:
        """The pictures that all methods explain."""
        return self.case.world.sample(self.arguments.n, self.arguments.seed)

    @cached_property
    def attributes(self) -> Attributes:
        """What can be read off the world's pictures."""
        return Attributes.of(self.case.world)

    def fill_row(self, row: Row) -> None:
        """Calibrates a row and measures its part of Tables 1 and 2; its cost is left for later."""
        try:
            settings = self.settings_of(row)
            if settings is None:
                return
            if 1 in self.tables:
                self.fill_methods(row, settings)
            if row.name in self.told:
                self.fill_gain(row, settings)  # needs whole rows, of which the others then have what they need
                self.fill_changes(row, settings)
                self.fill_pairs(row, settings)
                self.tables[1].rows[row.name] = chosen(self.told[row.name], COLUMNS1)
            if 2 in self.tables and row == OWN:
                self.fill_sources(settings)
            if 3 in self.tables:
                for batch in self.costs:
                    timing = Timing(batch, self.arguments.lpips)
                    self.clocks.append(Clock(self.case, row, settings, timing))
                    if row == OWN:
                        self.clocks.append(Clock(self.case, row, settings, replace(timing, onnx=True)))
        except Cancelled:
            raise
        except (PfungstError, RuntimeError) as error:  # torch raises the latter, out of memory too
            first = [self.tables[1]] if 1 in self.tables else []
            for table in [*first, *self.costs.values()] if row in self.asked else []:
                table.broken[row.name] = reason(error)
            if 2 in self.tables and row == OWN and self.asked:
                broken = {name: reason(error) for name in SOURCES if name not in self.tables[2].rows}
                self.tables[2].broken |= broken

    def settings_of(self, row: Row) -> AnySettings | None:
        """The settings that calibration chose; None for a row that is not to be measured and has none on record.

        In Table 3 a row that was never calibrated stands with its method's own settings: calibration would take longer
        than the timing by far.
        """
        case, trials, count = self.case, self.arguments.trials, self.arguments.calibration_images
        first = row in self.asked and 1 in self.tables
        needed = first or (row == OWN and bool(self.asked) and 2 in self.tables)

        def work() -> Found:
            changes, done = calibrate(case, row, trials, count)
            return {"changes": changes, "trials": done}

        of = calibration_of(case, row, trials, count)
        found = self.records.once(CALIBRATION, row.name, of, work if needed else None)
        if found is None and 3 not in self.tables:
            return None
        settings = case.start(row) if found is None else case.tried(row, found["changes"])
        self.tuned[row.name] = {
            "settings": settings.model_dump(mode="json"),
            "trials": None if found is None else found["trials"],
            "prior": row.space,
        }
        return settings

    def fill_methods(self, row: Row, settings: AnySettings) -> None:
        """Table 1's row of a method, and its counterfactuals in the grid."""

        def work() -> Found:
            sets = self.make(row, settings)
            found = as_found(measured(self.case, row, self.data, sets))
            found[VALID] = valid_flips(run_of(self.case, row, self.data, sets))[:, 0].tolist()
            self.records.keep_pictures("table1", row.name, torch.stack([one.images[0] for one in sets[:GRID_COLUMNS]]))
            return found

        found = self.records.once("table1", row.name, self.counterfactuals_of(row, settings), self.if_asked(row, work))
        if found is not None:
            self.told[row.name] = as_figures({name: one for name, one in found.items() if name != VALID})
            self.valid[row.name] = np.array(found[VALID])
            self.pictures[row.name] = self.records.kept_pictures("table1", row.name, self.case.world.size)

    def fill_changes(self, row: Row, settings: AnySettings) -> None:
        """Which attributes the row's first counterfactuals moved, and how sparse that is."""

        def work() -> Found:
            first = torch.stack([one.images[0] for one in self.make(row, settings)])
            change = self.attributes.change(self.data.images, first)
            return {"attributes": list(self.attributes.reader.labels), "change": change.round(4).tolist()}

        found = self.records.once("attributes", row.name, self.read_of(row, settings), self.if_asked(row, work))
        if found is not None:
            self.changes[row.name] = np.array(found["change"])
            self.told[row.name] |= self.attributes.figures(self.changes[row.name], self.valid[row.name])

    def fill_pairs(self, row: Row, settings: AnySettings) -> None:
        """How different the first two counterfactuals are in their attributes, where both are valid."""

        def work() -> Found:
            pictures = np.flatnonzero(self.valid[row.name]).tolist()
            run = run_of(self.case, row, self.data.pick(pictures), self.make(row, settings, pictures))
            change = self.attributes.pairs(run).round(4).tolist() if run.sets else []
            return {"attributes": list(self.attributes.reader.labels), "change": change}

        found = self.records.once("pairs", row.name, self.read_of(row, settings), self.if_asked(row, work))
        if found is not None:
            pairs = np.array(found["change"]).reshape(-1, K, len(found["attributes"]))
            self.told[row.name] |= self.attributes.figures_of_pairs(pairs)

    def fill_gain(self, row: Row, settings: AnySettings) -> None:
        """How much of the student's group error is gone after it has learned from the row's counterfactuals."""

        def work() -> Found:
            run = run_of(self.case, row, self.data, self.make(row, settings))
            return as_found({"gain": gained(self.case, run, self.arguments.repairs)})

        of = {**self.counterfactuals_of(row, settings), **self.gain_of()}
        found = self.records.once("gain", row.name, of, self.if_asked(row, work))
        if found is not None:
            self.told[row.name] |= as_figures(found)

    def make(self, row: Row, settings: AnySettings, pictures: Sequence[int] | None = None) -> list[CounterfactualSet]:
        """Counterfactuals of all pictures or of some, each with its own seed; what was kept is read."""
        data = self.data if pictures is None else self.data.pick(list(pictures))
        return make_sets(self.case, row, settings, data, self.records.counterfactuals, pictures)

    def if_asked(self, row: Row, work: Callable[[], Found]) -> Callable[[], Found] | None:
        """Work that is done for rows that were asked for."""
        return work if row in self.asked else None

    def read_of(self, row: Row, settings: AnySettings) -> dict[str, Any]:
        """What the attributes of a row's counterfactuals depend on, for their record."""
        return {**self.counterfactuals_of(row, settings), "reader": self.attributes.reader.content_hash}

    def beside(self) -> list[Table]:
        """What stands under Table 1: other encodings and what they are worth, what the edits moved, equal pictures."""
        if not self.changes:
            return []
        world, titles = self.case.world.name, self.tables[1].titles
        shown = controls(self.case, self.attributes, self.data)
        rows = {name: self.told[name] for name in self.changes}
        rows |= {name: control.figures(self.attributes) for name, control in shown.items()}
        tell = worth(self.attributes, shown)

        def told(title: str, key: str, columns: tuple[Column, ...]) -> Table:
            picked = {name: chosen(figures, columns) for name, figures in rows.items()}
            return Table(title, columns, {}, rows=picked, titles=titles, key=key, controls=frozenset(shown))

        tables = [
            told(f"Sparsity and diversity on {world}, by what they are measured in", "encodings", ENCODED),
            Table(
                f"What an encoding of {world} can tell: how often a perfect edit, one attribute turned over in the "
                "world, is sparser in it than another change",
                tuple(Column(name, name.removeprefix(CONTROL)) for name in next(iter(tell.values()))),
                {},
                rows=tell,
                key="worth",
            ),
            told(
                f"What the first counterfactuals of {world} changed, of the {len(self.attributes.factors)} attributes "
                "of its pictures that a network can read",
                "attributes",
                MOVED,
            ),
        ]
        if OWN.name in self.changes:
            ours, others = self.sparse(OWN.name), [name for name in self.changes if name != OWN.name]
            tables.append(
                Table(
                    f"Sparsity on {world}, on the pictures that a method and SCE-LITE-HQ both flip validly",
                    SAME,
                    {},
                    rows={name: on_same_pictures(ours, self.sparse(name)) for name in others},
                    titles=titles,
                    key="sparsity_on_same_pictures",
                )
            )
        return tables

    def sparse(self, name: str) -> list[float | None]:
        """The sparsity of each picture's first counterfactual, None where that is no valid flip."""
        found = self.attributes.sparsities(self.changes[name])
        return [float(one) if valid else None for one, valid in zip(found, self.valid[name], strict=True)]

    def fill_sources(self, settings: AnySettings) -> None:
        """Table 2: the tuned recipe of SCE-LITE-HQ with every gradient source."""
        table = self.tables[2]
        for source in SOURCES:
            recipe = settings.changed(gradient=source)
            if recipe == settings and 1 in self.tables and OWN.name in self.tables[1].rows:  # it is the row of Table 1
                table.rows[source] = chosen(self.told[OWN.name], COLUMNS2)
                continue

            def work(recipe: AnySettings = recipe) -> Found:
                sets = make_sets(self.case, OWN, recipe, self.data)
                figures = measured(self.case, OWN, self.data, sets)
                figures |= self.attributes.figures_of_run(run_of(self.case, OWN, self.data, sets))
                return as_found(chosen(figures, COLUMNS2))

            try:
                of = self.read_of(OWN, recipe)
                found = self.records.once("table2", source, of, work if self.asked else None)
                if found is not None:
                    table.rows[source] = as_figures(found)
            except Cancelled:
                raise
            except (PfungstError, RuntimeError) as error:
                table.broken[source] = reason(error)

    def fill_costs(self) -> None:
        """Table 3. Runs take turns: the first of every row, then the second, so that a slow hour slows all alike."""
        missing = [
            clock
            for clock in self.clocks
            if clock.row in self.asked and self.records.once(clock.part, clock.name, clock.of, None) is None
        ]
        turns = [(number, clock) for number in range(TIMING_RUNS) for clock in missing]
        for number, clock in tqdm(turns, desc=f"{self.case.world.name}: timing", unit="run", leave=False):
            try:
                if number == 0:
                    clock.loaded()
                clock.run(number)
            except PfungstError as error:
                self.costs[clock.timing.batch].broken[clock.name] = reason(error)
        for clock in self.clocks:
            table = self.costs[clock.timing.batch]
            if clock.name in table.broken:
                continue
            work = (lambda clock=clock: as_found(clock.figures())) if clock in missing else None
            found = self.records.once(clock.part, clock.name, clock.of, work)
            if found is not None:
                table.rows[clock.name] = as_figures(found)
        for table in self.costs.values():
            compare_cost(table)

    def counterfactuals_of(self, row: Row, settings: AnySettings) -> dict[str, Any]:
        """What a row's counterfactuals are made of, for its record."""
        recipe = settings.model_dump(mode="json")
        return {**self.case.models(row), "settings": recipe, "n": self.arguments.n, "seed": self.arguments.seed}

    def gain_of(self) -> dict[str, Any]:
        """What the gain is measured of, for its record."""
        test = [GAIN_TEST_SEED, N_GAIN_TEST]
        return {"repairs": self.arguments.repairs, "repair": asdict(self.case.repair), "gain_test": test}

    def empty(self) -> dict[int, Table]:
        """The tables without figures."""
        world, n = self.case.world, self.arguments.n
        return {
            1: Table(
                f"Table 1: methods on {world.name}, N = {n} (in brackets: the paper, {PAPER_ROW[world.name]})",
                COLUMNS1,
                PAPER1[world.name],
                titles=self.titles,
            ),
            2: Table(
                f"Table 2: gradient sources of SCE-LITE-HQ on {world.name}, N = {n} (in brackets: the paper, "
                "CelebA-Blond)",
                COLUMNS2,
                PAPER2,
                titles=SOURCES,
            ),
            **({3: first} if (first := chained(list(self.costs.values()))) is not None else {}),
        }

    @property
    def titles(self) -> dict[str, str]:
        """What rows are called in Tables 1 and 3."""
        return {row.name: row.title for row in (*(Row.of(text) for text in ROWS), *self.asked)}

    def empty_costs(self, batch: int) -> Table:
        """Table 3 without figures."""
        return Table(
            f"Table 3: cost on {self.case.world.name}, one counterfactual each of a batch of {batch}, CPU, median of "
            f"{TIMING_RUNS} runs and their range (in brackets: the paper, one H100, batch not stated)",
            COLUMNS3,
            PAPER3,
            titles={**self.titles, OWN.name + ON_ONNX: f"{OWN.title}, ONNX Runtime"},
        )


def chosen(figures: Figures, columns: tuple[Column, ...]) -> Figures:
    """The figures of some columns, as far as there are any."""
    return {column.key: figures[column.key] for column in columns if column.key in figures}


def compare_cost(table: Table) -> None:
    """Adds to each row of a Table 3 how many times as long it takes as SCE-LITE-HQ, and as that on ONNX Runtime."""
    for key, name in (("times_own", OWN.name), ("times_onnx", OWN.name + ON_ONNX)):
        if name in table.rows:
            ours = table.rows[name]["seconds_per_sample"].value
            for figures in table.rows.values():
                figures[key] = Figure(figures["seconds_per_sample"].value / ours)


def chained(tables: list[Table]) -> Table | None:
    """The first table with each of the others printed under the one before it; None of none."""
    for above, below in pairwise(tables):
        above.beside = below
    return tables[0] if tables else None


def reason(error: Exception) -> str:
    """Why a row did not run, without the place where this project happens to lie."""
    return str(error).replace(f"{HOME}/", "")
