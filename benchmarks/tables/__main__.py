"""Fills the tables: `python -m benchmarks.tables --world portraits`. What they are stands in benchmarks.tables."""

import argparse
import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

import benchmarks.tables
from benchmarks.numbers import write_numbers
from benchmarks.quality import RESULTS
from benchmarks.tables.calibration import calibrate
from benchmarks.tables.case import BATCH, TEST_SEED, Case, make_sets, open_case
from benchmarks.tables.cost import ON_ONNX, TIMING_BATCH, TIMING_RUNS, Timing, cost_of
from benchmarks.tables.figures import GAIN_SEEDS, measured
from benchmarks.tables.paper import PAPER1, PAPER2, PAPER3, PAPER_ROW
from benchmarks.tables.plan import CALIBRATION_IMAGES, ROWS, SHORT, SOURCES, TRIALS, Row
from benchmarks.tables.printing import COLUMNS1, COLUMNS2, COLUMNS3, GRID_COLUMNS, Table, grid, write_results
from engine.errors import Cancelled, InputError, PfungstError
from engine.methods import DEFAULT, AnySettings, method_named
from worlds import WORLDS
from worlds.world import Sample

HOME = Path(benchmarks.tables.__file__).parents[2]


def main(argv: list[str] | None = None) -> int:
    """Fills the tables of one world and writes Markdown, CSV, a picture grid and, where asked, JSON."""
    arguments = parse(argv)
    world, changes = WORLDS[arguments.world], changes_of(arguments)
    options: dict[str, Any] = {"batch": arguments.batch, "lpips": arguments.lpips}
    options["repair_steps"] = arguments.repair_steps
    case = open_case(world, arguments.cache, arguments.surrogates, changes=changes, **options)
    tables, tuned, picture = fill(case, arguments)
    said = notes(arguments)
    text = "\n".join([f"# The paper's tables on {world.name}", "", *(f"* {line}" for line in said), ""])
    text += "\n" + "\n".join(table.markdown() for table in tables.values())
    print(text)
    write_results(arguments.results / f"tables-{world.name}", text, list(tables.values()), picture)
    if arguments.json:
        content: dict[str, Any] = {f"table{number}": table.as_dict() for number, table in tables.items()}
        content["did_not_run"] = {row: why for table in tables.values() for row, why in table.broken.items()}
        content |= {"world": world.name, "n": arguments.n, "batch": arguments.timing_batch}
        content |= {"notes": said, "methods": tuned}
        write_numbers(arguments.json, content)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables",
        description=benchmarks.tables.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", choices=list(WORLDS), default="portraits")
    parser.add_argument("--n", type=int, default=100, help="pictures (default: 100)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--methods", nargs="+", default=list(ROWS), metavar="NAME", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--tables", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--trials", type=int, default=TRIALS, help="settings tried per method, 0 for the defaults")
    parser.add_argument("--calibration-images", type=int, default=CALIBRATION_IMAGES)
    parser.add_argument("--repairs", type=int, default=GAIN_SEEDS, help="fine-tunings that the gain is a mean of")
    parser.add_argument("--repair-steps", type=int, help="steps of a fine-tuning (default: those of pfungst cfkd)")
    parser.add_argument("--batch", type=int, default=BATCH, help="pictures at a time")
    parser.add_argument("--timing-batch", type=int, default=TIMING_BATCH, help="pictures of a timing run")
    parser.add_argument("--short", action="store_true", help="shorter schedules for the slow baselines")
    parser.add_argument("--settings", type=Path, help="JSON: method → settings that differ from the authors'")
    parser.add_argument("--lpips", type=Path, help="LPIPS weights for the perceptual loss of DiME and FastDiME")
    parser.add_argument("--cache", type=Path, default=Path("out/tables"), help="where finished parts are kept")
    parser.add_argument("--surrogates", type=Path, default=Path("out/cache"), help="where surrogates are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where Markdown, CSV and picture go")
    arguments = parser.parse_args(argv)
    for name in ("n", "calibration_images", "batch", "timing_batch"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} has to be at least 1")
    return arguments


def changes_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings by method that were asked for with --short and --settings."""
    changes: dict[str, dict[str, Any]] = {name: dict(short) for name, short in SHORT.items()} if arguments.short else {}
    if arguments.settings:
        try:
            given = json.loads(arguments.settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"--settings {arguments.settings} cannot be read as JSON: {error}.") from None
        for name, more in given.items():
            changes[method_named(name).name] = {**changes.get(name, {}), **more}
    return changes


def fill(case: Case, arguments: argparse.Namespace) -> tuple[dict[int, Table], dict[str, Any], Image.Image | None]:
    """(the tables that were asked for, every row's settings and trials, the picture grid).

    A row that cannot run, for want of weights or because its method breaks, stands in its tables with the reason.
    """
    rows = [Row.of(text) for text in arguments.methods]
    tables = {number: table for number, table in empty(case, arguments, rows).items() if number in arguments.tables}
    timing = Timing(arguments.timing_batch, arguments.lpips)
    data = case.world.sample(arguments.n, TEST_SEED)
    tuned: dict[str, Any] = {}
    pictures: dict[str, Tensor] = {}
    own = Row.of(DEFAULT)
    bar = tqdm([*rows, *([own] if 2 in tables and own not in rows else [])], desc=case.world.name, unit="method")
    for row in bar:
        bar.set_postfix_str(row.name)
        wanted = {1, 3} & tables.keys() if row in rows else set()
        try:
            settings, trials = calibrate(case, row, arguments.trials, arguments.calibration_images)
            tuned[row.name] = {"settings": settings.model_dump(mode="json"), "trials": trials, "prior": row.space}
            if 1 in wanted:
                sets = make_sets(case, row, settings, data.images)
                tables[1].rows[row.name] = measured(case, row, data, sets, arguments.repairs)
                pictures[row.name] = torch.stack([found.images[0] for found in sets[:GRID_COLUMNS]])
            if 2 in tables and row == own:
                fill_sources(case, row, settings, data, tables[2])
            if 3 in wanted:
                tables[3].rows[row.name] = cost_of(case, row, settings, timing)
                if row == own:
                    tables[3].rows[row.name + ON_ONNX] = cost_of(case, row, settings, replace(timing, onnx=True))
        except Cancelled:
            raise
        except (PfungstError, RuntimeError) as error:  # torch raises the latter, out of memory too
            for number in wanted:
                if row.name not in tables[number].rows:
                    tables[number].broken[row.name] = reason(error)
            if 2 in tables and row == own:
                tables[2].broken |= {name: reason(error) for name in SOURCES if name not in tables[2].rows}
    return tables, tuned, grid(data.images[:GRID_COLUMNS], pictures) if pictures else None


def reason(error: Exception) -> str:
    """Why a row did not run, without the place where this project happens to lie."""
    return str(error).replace(f"{HOME}/", "")


def fill_sources(case: Case, row: Row, settings: AnySettings, data: Sample, table: Table) -> None:
    """Table 2: the tuned recipe of SCE-LITE-HQ with every gradient source."""
    for source in SOURCES:
        try:
            sets = make_sets(case, row, settings.changed(gradient=source), data.images)
            found = measured(case, row, data, sets, repairs=0)
            table.rows[source] = {column.key: found[column.key] for column in COLUMNS2}
        except Cancelled:
            raise
        except (PfungstError, RuntimeError) as error:
            table.broken[source] = reason(error)


def empty(case: Case, arguments: argparse.Namespace, rows: list[Row]) -> dict[int, Table]:
    """The three tables without figures."""
    world, titles = case.world, {row.name: row.title for row in rows}
    return {
        1: Table(
            f"Table 1: methods on {world.name}, N = {arguments.n} (in brackets: the paper, {PAPER_ROW[world.name]})",
            COLUMNS1,
            PAPER1[world.name],
            titles=titles,
        ),
        2: Table(
            f"Table 2: gradient sources of SCE-LITE-HQ on {world.name}, N = {arguments.n} (in brackets: the paper, "
            "CelebA-Blond)",
            COLUMNS2,
            PAPER2,
            titles=SOURCES,
        ),
        3: Table(
            f"Table 3: cost on {world.name}, one counterfactual each of a batch of {arguments.timing_batch}, CPU, "
            f"median of {TIMING_RUNS} runs and their range (in brackets: the paper, one H100, batch not stated)",
            COLUMNS3,
            PAPER3,
            titles={**titles, DEFAULT + ON_ONNX: f"{titles.get(DEFAULT, DEFAULT)}, ONNX Runtime"},
        ),
    }


def notes(arguments: argparse.Namespace) -> list[str]:
    """What a reader has to know before the numbers are believed."""
    lines = [
        f"Calibration budget, the same for every method: {arguments.trials} settings, the method's own first, on a "
        f"third of {arguments.calibration_images} pictures that are not among the {arguments.n}; the best two on all.",
        "SCE-LITE-HQ starts from its general defaults, not from the recipe that is shipped with a world. But its other "
        "candidates are near what earlier calibrations found on these worlds; the baselines have had none.",
        "Bold is best, underlined second best, by the printed number. Small figures are 95 % intervals; in Table 3 the "
        "range of the runs. Sparsity, diversity and Fréchet distance are in the last features of the world's oracle.",
        "All methods are timed in eager torch, SCE-LITE-HQ a second time on ONNX Runtime, which only it can use. For "
        "Table 1, forward calls of the pixel-space network run on ONNX Runtime, to spare hours.",
        "DiME, FastDiME, ACE and SCE run on a pixel-space diffusion, the others on the latent prior; (latent) marks "
        "those that ran there instead.",
        f"Gain: mean of {arguments.repairs} fine-tunings on the method's own false counterfactuals, judged by the "
        "oracle; 0 where a method found none.",
        "The perceptual loss of DiME and FastDiME is LPIPS."
        if arguments.lpips
        else "DiME and FastDiME run without their perceptual loss, for which no network is embedded; see --lpips.",
        f"Measured on {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; no GPU.",
    ]
    changes: Mapping[str, Mapping[str, Any]] = changes_of(arguments)
    if changes:
        lines.append(f"Settings that were asked for instead of the authors': {json.dumps(changes)}.")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
