"""Prints every promised figure of the embedded worlds, measured now.

`python -m worlds.report [--json FILE] [--cards]`
"""

import argparse
import json
import sys
from pathlib import Path

from engine.errors import PfungstError
from engine.writing import write_text
from worlds import WORLDS
from worlds.card import write_card
from worlds.measure import Measurement, measure
from worlds.store import weights_megabytes

PROMISES: dict[str, tuple[str, float]] = {
    "psnr": ("≥", 33.0),
    "oracle_on_reconstructions": ("≥", 0.99),
    "frechet_ratio": ("≤", 3.0),
    "student_worst_group": ("≤", 0.50),
    "twin_worst_group": ("≥", 0.97),
    "oracle_accuracy": ("≥", 0.99),
}
WEIGHTS_LIMIT_MB = 30.0


def kept(value: float, promise: tuple[str, float]) -> bool:
    """Whether a figure is on the right side of its bound."""
    sign, bound = promise
    return value >= bound if sign == "≥" else value <= bound


def table(found: dict[str, Measurement], megabytes: float) -> str:
    """The figures as text, one row a figure, with the bound each has to keep."""
    lines = [f"{'':28}" + "".join(f"{name:>14}" for name in found) + f"{'promised':>12}"]
    for key in Measurement.__dataclass_fields__:
        row = f"{key:28}" + "".join(f"{m.as_dict()[key]:>14}" for m in found.values())
        if key in PROMISES:
            sign, bound = PROMISES[key]
            good = all(kept(getattr(m, key), PROMISES[key]) for m in found.values())
            row += f"{f'{sign} {bound:g}':>12}  {'kept' if good else 'MISSED'}"
        lines.append(row)
    good = megabytes <= WEIGHTS_LIMIT_MB
    lines.append(
        f"{'weights_mb':28}{megabytes:>14.2f}{'':>14}{f'≤ {WEIGHTS_LIMIT_MB:g}':>12}  {'kept' if good else 'MISSED'}"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures both worlds; the exit code is 1 if a promise is missed and 2 if a model cannot be opened."""
    parser = argparse.ArgumentParser(prog="python -m worlds.report", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--cards", action="store_true", help="also write the model cards with these figures")
    arguments = parser.parse_args(argv)
    try:
        found = {name: measure(world) for name, world in WORLDS.items()}
    except PfungstError as error:
        print(f"worlds.report: {error}", file=sys.stderr)
        return 2
    megabytes = weights_megabytes()
    print(table(found, megabytes))
    if arguments.json:
        content = {**{name: m.as_dict() for name, m in found.items()}, "weights_mb": round(megabytes, 2)}
        write_text(arguments.json, json.dumps(content, indent=2) + "\n")
    if arguments.cards:
        for name, figures in found.items():
            write_card(WORLDS[name], figures)
    whole = all(kept(getattr(m, key), bound) for m in found.values() for key, bound in PROMISES.items())
    return 0 if whole and megabytes <= WEIGHTS_LIMIT_MB else 1


if __name__ == "__main__":
    raise SystemExit(main())
