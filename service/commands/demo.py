"""`pfungst demo` finds a classifier that cheats, passes its honest twin and cures the cheat; offline, in minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.errors import InputError
from service.exit_code import ExitCode


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the arguments of `pfungst demo`."""
    parser = subparsers.add_parser("demo", help="audit, repair and audit again on the embedded portraits")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="DIR",
        help="folder for the page and its pictures (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the demo into `args.out` and prints the path of its page."""
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is a file; name a folder.")

    from service.demonstration import main

    print(f"Open {main(args.out).resolve()}")
    return ExitCode.PASS
