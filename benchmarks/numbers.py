"""Measured numbers on their way into a JSON file."""

import json
import math
from pathlib import Path
from typing import Any

from engine.writing import write_text


def finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: what does not exist is null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_numbers(file: Path, found: Any) -> None:
    """Writes what was measured, whole or not at all."""
    write_text(file, json.dumps(finite(found), indent=2, allow_nan=False) + "\n")
