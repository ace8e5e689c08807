"""The same calibration for every method: as many settings on as many pictures, chosen by the same score."""

from typing import Any

import numpy as np

from audit.calibration import AREA_WEIGHT, LARGEST_AREA
from audit.metrics import edited_area
from benchmarks.tables.case import Case, make_sets, run_of
from benchmarks.tables.plan import CANDIDATES, Row
from engine.methods import AnySettings

CALIBRATION_SEED = 810_001


def calibrate(case: Case, row: Row, trials: int, pictures: int) -> tuple[AnySettings, list[dict[str, Any]]]:
    """(the best of the method's first `trials` candidates, what each did) on as many pictures for every method.

    The score is that of `pfungst calibrate`: flips that the evaluator confirms, less what edits touch beyond a fifth of
    the picture. The earlier candidate wins where two are equal, the method's own defaults first of all.
    """
    start = case.start(row)
    if trials < 1:
        return start, []
    data = case.world.sample(pictures, CALIBRATION_SEED)
    done: list[dict[str, Any]] = []
    for changes in CANDIDATES[row.method][:trials]:
        settings = case.tried(row, changes).changed(k=1)
        run = run_of(case, row, data, make_sets(case, row, settings, data.images))
        confirmed = run.flipped(0) & run.confirmed(0)
        areas = edited_area(run.edits(0)[:, 0])
        area = float(np.median(areas[confirmed])) if confirmed.any() else 1.0
        nafr = float(confirmed.mean())
        done.append(
            {
                "changes": changes,
                "flip_rate": float(run.flipped(0).mean()),
                "nafr": nafr,
                "area_median": area,
                "score": nafr - AREA_WEIGHT * max(0.0, area - LARGEST_AREA),
            }
        )
    best = max(done, key=lambda trial: trial["score"])  # max() keeps the first of equals
    return case.tried(row, best["changes"]), done
