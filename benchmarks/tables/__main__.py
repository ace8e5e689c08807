"""Fills the tables: `python -m benchmarks.tables --world portraits`. What they are stands in benchmarks.tables."""

import argparse
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import benchmarks.tables
from benchmarks.numbers import write_numbers
from benchmarks.quality import RESULTS
from benchmarks.tables.case import BATCH, CHECK_SEED, TEST_SEED, open_case
from benchmarks.tables.cost import TIMING_BATCH
from benchmarks.tables.figures import EXACT, FEWEST_REPAIRS, MOST_REPAIRS
from benchmarks.tables.filling import fill
from benchmarks.tables.plan import CALIBRATION_IMAGES, ROWS, SHORT, TRIALS, Row
from benchmarks.tables.printing import write_results
from engine.errors import InputError
from engine.methods import method_named
from worlds import WORLDS

SURROGATES = RESULTS / "tables" / "surrogates"
"""Shipped, so that rows of all sittings are guided and judged by the same weights."""


def main(argv: list[str] | None = None) -> int:
    """Fills the tables of one world and writes Markdown, CSV, a picture grid and, where asked, JSON."""
    arguments = parse(argv)
    world, changes = WORLDS[arguments.world], changes_of(arguments)
    options: dict[str, Any] = {"batch": arguments.batch, "lpips": arguments.lpips}
    options["repair_steps"] = arguments.repair_steps
    case = open_case(world, arguments.cache, arguments.surrogates, changes=changes, **options)
    tables, tuned, picture = fill(case, arguments)
    said = notes(arguments)
    waiting = [Row.of(name) for name in ROWS if 1 in tables and not tables[1].has(name)]
    if own := [row.title for row in waiting if row.name == row.method]:
        said.append(f"Not measured yet, so no place is final: {', '.join(own)}.")
    if elsewhere := [row.name for row in waiting if row.name != row.method]:
        said.append(
            "Not measured, being baselines where their authors did not run them, to be had by name: "
            f"{', '.join(elsewhere)}."
        )
    if 1 in tables:
        for what in ("sparsity", "diversity", "gain"):
            if unread := [Row.of(name).title for name, figures in tables[1].rows.items() if what not in figures]:
                said.append(f"{what.capitalize()} is not measured yet, so no place is final: {', '.join(unread)}.")
    untuned = [Row.of(name).title for name, found in tuned.items() if found["trials"] is None]
    if untuned:
        said.append(f"Timed with the authors' settings, not being tuned yet: {', '.join(untuned)}.")
    text = "\n".join([f"# The paper's tables on {world.name}", "", *(f"* {line}" for line in said), ""])
    text += "\n" + "\n".join(table.markdown() for table in tables.values())
    print(text)
    others = "" if arguments.seed == TEST_SEED else f"-{arguments.seed}"
    write_results(arguments.results / f"tables-{world.name}{others}", text, list(tables.values()), picture)
    if arguments.json:
        content: dict[str, Any] = {f"table{number}": table.as_dict() for number, table in tables.items()}
        for table in tables[1].chain()[1:] if 1 in tables else []:
            content[table.key] = table.as_dict()
        if 3 in tables:
            batches = zip(arguments.timing_batch, tables[3].chain(), strict=True)
            content["table3_by_batch"] = {str(batch): table.as_dict() for batch, table in batches}
        content["did_not_run"] = {row: why for table in tables.values() for row, why in table.broken.items()}
        content |= {"world": world.name, "n": arguments.n, "seed": arguments.seed, "batch": arguments.timing_batch[0]}
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
    parser.add_argument("--seed", type=int, default=TEST_SEED, help=f"of the pictures (default: {TEST_SEED})")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--methods",
        nargs="*",
        default=list(ROWS),
        metavar="NAME",
        help=f"rows to measure, of {', '.join(ROWS)}; none to show what is on record",
    )
    parser.add_argument("--tables", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--trials", type=int, default=TRIALS, help="settings tried per method, 0 for the defaults")
    parser.add_argument("--calibration-images", type=int, default=CALIBRATION_IMAGES)
    parser.add_argument("--repairs", type=int, default=MOST_REPAIRS, help="fine-tunings for the gain, at the most")
    parser.add_argument("--repair-steps", type=int, help="steps of a fine-tuning (default: those of pfungst cfkd)")
    parser.add_argument("--batch", type=int, default=BATCH, help="pictures at a time")
    parser.add_argument(
        "--timing-batch",
        nargs="+",
        type=int,
        default=[TIMING_BATCH],
        metavar="N",
        help=f"pictures of a timing run; for each number a Table 3 (default: {TIMING_BATCH})",
    )
    parser.add_argument("--short", action="store_true", help="shorter schedules for the slow baselines")
    parser.add_argument("--settings", type=Path, help="JSON: method → settings that differ from the authors'")
    parser.add_argument("--lpips", type=Path, help="LPIPS weights for the perceptual loss of DiME and FastDiME")
    parser.add_argument("--cache", type=Path, default=Path("out/tables"), help="where finished parts are kept")
    parser.add_argument("--records", type=Path, default=RESULTS / "tables", help="where finished rows are kept")
    parser.add_argument("--surrogates", type=Path, default=SURROGATES, help="where guides and evaluators are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where Markdown, CSV and picture go")
    arguments = parser.parse_args(argv)
    for name in ("n", "calibration_images", "batch", "timing_batch"):
        given = getattr(arguments, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{name.replace('_', '-')} has to be at least 1")
    arguments.timing_batch = list(dict.fromkeys(arguments.timing_batch))
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


def notes(arguments: argparse.Namespace) -> list[str]:
    """What a reader has to know before the numbers are believed."""
    lines = others(arguments.seed)
    lines += [
        f"Calibration budget, the same for every method: {arguments.trials} settings, the method's own first, on a "
        f"third of {arguments.calibration_images} pictures that are not among the {arguments.n}; the best two on all. "
        "The score is the mean sparsity of confirmed flips in the oracle's features, 0 for any other picture.",
        "SCE-LITE-HQ starts from its general defaults, not from the recipe that is shipped with a world. But its other "
        "candidates were picked from more than two hundred settings tried on further pictures of these worlds, when "
        "the baselines' rows were known; the baselines' candidates have had no such search. Portraits' were exchanged "
        "once more after a look at the tables' own pictures, for likelier hair; histology's were on trial there once, "
        "for more gain, and as that stayed the same they were not exchanged.",
        "The score took the place of one that punished edited area, which chose worse settings for ACE and would have "
        "chosen a sharp gradient for SCE-LITE-HQ in histology, whose smoothed one edits more.",
        "Bold is best, underlined second best, by the printed number. Small figures are 95 % intervals; in Table 3 the "
        "range of the runs.",
        "Sparsity and diversity are the paper's formulas in attributes: a picture is encoded as what a reader, which "
        "learned every factor of the world's pictures, tells of it, in units of what it errs by. Sparsity is the mean "
        "over every counterfactual that differs from its picture, diversity that over pictures with two valid ones. "
        "Edited area is that of valid flips; the Fréchet distance is in the last features of the world's oracle.",
        "The paper leaves its encoding open; the code that its authors published encodes a face as an attribute "
        "network's logits, which are in units of how surely an attribute is read, too. These tables used the oracle's "
        "features before, which know the label alone: in them no edit at all is as sparse as a perfect edit of the "
        "spurious feature and sparser than one of the label, as the table of what an encoding can tell shows, in "
        "which no method has a say. When that was changed, the order of nearly all rows in every encoding was known; "
        "all are shown. Calibration is in the oracle's features still, for all methods.",
        "Rows called control are edits that nobody has to judge: one attribute turned over in the world itself, noise, "
        "a mere round trip, another picture altogether.",
        "All methods are timed in eager torch, SCE-LITE-HQ a second time on the product's ONNX Runtime. For "
        "Table 1, the pixel-space network runs on ONNX Runtime, its gradient too, to spare hours.",
        "DiME, FastDiME, ACE and SCE run on a pixel-space diffusion, the others on the latent prior; (latent) marks "
        "those that ran there instead.",
        f"Gain: mean of {FEWEST_REPAIRS} to {arguments.repairs} repairs by `pfungst cfkd` with the method's own false "
        "counterfactuals, as the oracle judges them; 0 where a method found none. They are repeated with other seeds "
        f"until Student's interval of the mean is within {100 * EXACT} points of it, which those that "
        "repair everything are at once.",
        "The perceptual loss of DiME and FastDiME is LPIPS."
        if arguments.lpips
        else "DiME and FastDiME run without their perceptual loss, for which no network is embedded; see --lpips.",
        "SCE's first candidate is its authors' rate. As theirs it ends where the student is as sure of the target as "
        "it was of the other class.",
        f"Measured on {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; no GPU.",
    ]
    changes: Mapping[str, Mapping[str, Any]] = changes_of(arguments)
    if changes:
        lines.append(f"Settings that were asked for instead of the authors': {json.dumps(changes)}.")
    return lines


def others(seed: int) -> list[str]:
    """What is to be known of pictures that are not the tables' own."""
    if seed == TEST_SEED:
        return []
    said = f"The pictures are those of seed {seed}, not the tables' own."
    if seed == CHECK_SEED:
        said += " Settings, encodings and every rule of the comparison were fixed before any method had explained them."
    return [said]


if __name__ == "__main__":
    raise SystemExit(main())
