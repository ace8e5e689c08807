"""The same calibration for every method: as many settings on as many pictures, chosen by the same score."""

from typing import Any

import numpy as np

from audit.metrics import sparsity
from benchmarks.tables.case import Case, change, run_of
from benchmarks.tables.counterfactuals import make_sets
from benchmarks.tables.plan import CANDIDATES, Row
from worlds.world import Sample

CALIBRATION_SEED = 810_001
FIRST = 3
"""One in this many of the pictures is shown to every candidate; the finalists see the others too."""
FINALISTS = 2


def calibrate(case: Case, row: Row, trials: int, pictures: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the best of the method's first `trials` candidates, what each did) on as many pictures for every method.

    The score is the sparsity, in the oracle's features, of flips that the evaluator confirms, where any other picture
    counts as 0: NAFR and the sparsity of valid flips in one number without a weight. Edited area, by which `pfungst
    calibrate` judges, would prefer a baseline that fails with small edits to one that succeeds with large ones, and
    SCE-LITE-HQ's sharp gradient to its smoothed one. All candidates are scored on the first third of the pictures, the
    best two of them on all. The earlier candidate wins where two are equal, the method's own defaults first of all.
    """
    if trials < 1:
        return {}, []
    first = max(1, pictures // FIRST)
    data = case.world.sample(pictures, CALIBRATION_SEED)
    parts = [data.pick(slice(first)), data.pick(slice(first, None))]
    done = [trial(case, row, changes, parts[:1]) for changes in CANDIDATES[row.method][:trials]]
    if pictures > first:
        for place in ranked(done)[:FINALISTS]:
            done[place] = trial(case, row, done[place]["changes"], parts)
    best = next(place for place in ranked(done) if done[place]["pictures"] == pictures)
    return done[best]["changes"], done


def calibration_of(case: Case, row: Row, trials: int, pictures: int) -> dict[str, Any]:
    """What a calibration depends on, for its record."""
    candidates = [case.tried(row, changes).model_dump(mode="json") for changes in CANDIDATES[row.method][:trials]]
    return {**case.models(row), "candidates": candidates, "pictures": pictures, "seed": CALIBRATION_SEED}


def ranked(done: list[dict[str, Any]]) -> list[int]:
    """Places of trials, the best score first; sorting is stable, so the earlier of equals comes first."""
    return sorted(range(len(done)), key=lambda place: -done[place]["score"])


def trial(case: Case, row: Row, changes: dict[str, Any], parts: list[Sample]) -> dict[str, Any]:
    """What a candidate did on all parts of the pictures, each of which is made once."""
    settings = case.tried(row, changes).changed(k=1)
    runs = [run_of(case, row, data, make_sets(case, row, settings, data)) for data in parts]
    flipped = np.concatenate([run.flipped(0) for run in runs])
    confirmed = np.concatenate([run.flipped(0) & run.confirmed(0) for run in runs])
    sparse = np.concatenate([sparsity(change(case.oracle, run)) for run in runs])
    return {
        "changes": changes,
        "pictures": len(flipped),
        "flip_rate": float(flipped.mean()),
        "nafr": float(confirmed.mean()),
        "score": float(np.where(confirmed, np.nan_to_num(sparse), 0.0).mean()),
    }
