"""What finished parts of the tables found, kept beside the results so that no sitting has to measure them again.

    FOLDER/WORLD/calibration/METHOD.json   the settings that were chosen, and every trial
    FOLDER/WORLD/table1/METHOD.json        figures, with the first counterfactuals as METHOD.png
    FOLDER/WORLD/table2/SOURCE.json, table3/batch-N/METHOD.json
    FOLDER/WORLD/attributes/METHOD.json    how far each attribute of each picture moved
    FOLDER/WORLD/pairs/METHOD.json         the same of pictures with two valid counterfactuals, for both of them
    FOLDER/WORLD/gain/METHOD.json          what the student gains by learning from the counterfactuals
    FOLDER/WORLD/counterfactuals/METHOD/   what all of these were measured of (benchmarks.tables.counterfactuals): a row
                                           goes on from there, and whoever wants another figure of it has not to make
                                           them again
    FOLDER/WORLD/SEED/table1/METHOD.json   and so on: all that was measured on other pictures than the tables' own

A full comparison takes many hours, more than one machine may be had for. A record says what it was measured of: models,
settings, pictures. Where any of that differs it counts for nothing, and the part is measured again. It knows nothing of
the code: whoever changes a method deletes its records and batches. Another folder for records and cache measures
everything afresh.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from audit.pictures import save_png, to_pil
from benchmarks.numbers import finite, write_numbers
from benchmarks.tables.figures import Figure, Figures

Found = dict[str, Any]
CALIBRATION, COST = "calibration", "table3"
"""Parts that are the same whatever pictures are explained."""


@dataclass(frozen=True)
class Records:
    """The records of one world."""

    folder: Path
    pictures: str = ""
    """The folder inside it of what depends on the pictures that are explained; none for the tables' own."""

    @property
    def explained(self) -> Path:
        """Where everything lies that depends on the pictures explained: all but calibration and cost."""
        return self.folder / self.pictures

    @property
    def counterfactuals(self) -> Path:
        """Where batches lie; a later sitting goes on from them."""
        return self.explained / "counterfactuals"

    def once(self, part: str, name: str, of: Mapping[str, Any], work: Callable[[], Found] | None) -> Found | None:
        """What was found of a part, from its record or by doing the work now; None where there is neither."""
        known = json.loads(json.dumps(finite(of)))
        elsewhere = part == CALIBRATION or part.startswith(COST)
        file = (self.folder if elsewhere else self.explained) / part / f"{name}.json"
        if file.is_file():
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["of"] == known:
                found: Found = record["found"]
                return found
        if work is None:
            return None
        found = finite(work())
        write_numbers(file, {"of": known, "found": found})
        return found

    def keep_pictures(self, part: str, name: str, images: Tensor) -> None:
        """Keeps images [N, 3, H, W] side by side."""
        save_png(to_pil(torch.cat(list(images), dim=2)), self.explained / part / f"{name}.png")

    def kept_pictures(self, part: str, name: str, width: int) -> Tensor:
        """Images that were kept, each `width` pixels wide."""
        with Image.open(self.explained / part / f"{name}.png") as picture:
            pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
        return torch.stack(pixels.split(width, dim=2))


def as_found(figures: Figures) -> Found:
    """Figures for a record."""
    return {name: asdict(figure) for name, figure in figures.items()}


def as_figures(found: Mapping[str, Mapping[str, Any]]) -> Figures:
    """The figures of a record; what JSON could not hold is what it was."""
    return {
        name: Figure(
            float("nan") if figure["value"] is None else figure["value"],
            float("-inf") if figure["lower"] is None else figure["lower"],
            float("inf") if figure["upper"] is None else figure["upper"],
            figure["n"],
        )
        for name, figure in found.items()
    }
