"""Progress bars on stderr for the long parts of a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from audit.verdict import Judge
    from engine.counterfactual import Progress


@contextmanager
def counting(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is told (done, total)."""
    with tqdm(desc=title, unit=unit, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report


@contextmanager
def distilling() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for the two surrogates, told (role, done, total)."""
    with tqdm(desc="distilling", unit="step", leave=False) as bar:
        finished: list[str] = []

        def report(role: str, done: int, total: int) -> None:
            if role not in finished:
                finished.append(role)
                bar.reset(total)
                bar.set_description(f"distilling the {role}")
            bar.update(done - bar.n)

        yield report


@contextmanager
def auditing() -> Iterator[Callable[[int, int, Judge], None]]:
    """A bar for audited images with the bounds so far, told (done, most, judge)."""
    with tqdm(desc="auditing", unit="image", leave=False) as bar:

        def report(done: int, most: int, judge: Judge) -> None:
            bar.total = most
            bar.set_postfix_str(judge.progress)
            bar.update(done - bar.n)

        yield report


@contextmanager
def guiding() -> Iterator[Callable[[Progress], None]]:
    """A bar for the guided steps of one batch; escalation starts it anew."""
    with tqdm(desc="counterfactuals", unit="step", leave=False) as bar:

        def report(where: Progress) -> None:
            if where.step == 0:
                bar.reset(where.steps)
                again = f", try {where.attempt + 1}" if where.attempt else ""
                bar.set_description(f"counterfactual {where.k + 1} of {where.count}{again}")
            bar.update(where.step + 1 - bar.n)

        yield report
