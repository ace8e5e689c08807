"""The command `pfungst`: reads the arguments, runs one command, and turns what happens into an exit code.

Errors are reported here and nowhere else: one line on stderr, and the traceback above it with --debug.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

from engine.errors import Cancelled, InputError, ModelError
from service.commands import COMMANDS
from service.exit_code import ExitCode


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pfungst` with these arguments, or those of the process, and returns its exit code."""
    try:
        try:
            return _run(_parser().parse_args(argv))
        finally:
            # What is still buffered meets a closed pipe here, not at interpreter exit where nobody can catch it.
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away, as `head` does. Whatever Python flushes at its end must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.CLOSED_PIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pfungst",
        description="Finds out whether an image classifier is a Clever Hans, and shows why.",
        epilog="exit codes: 0 pass, 1 spurious reliance found, 2 usage or bad input, 3 inconclusive, 4 internal error",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pfungst {version('pfungst')}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    for subparser in subparsers.choices.values():
        subparser.allow_abbrev = False
        # `pfungst --debug demo` and `pfungst demo --debug` both work: SUPPRESS keeps the first from being reset.
        subparser.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
    return parser


def _run(args: argparse.Namespace) -> int:
    """Runs the chosen command; every way it can fail has its exit code here."""
    try:
        return int(args.run(args))
    except (KeyboardInterrupt, Cancelled):
        return _fail("interrupted", ExitCode.INTERRUPTED, args.debug)
    except (InputError, ModelError) as error:
        # A classifier or a prior is an argument too: a folder that cannot be used is bad input.
        return _fail(f"error: {error}", ExitCode.BAD_INPUT, args.debug)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_lost_its_reader():
            raise
        if isinstance(error, OSError):
            return _fail(f"error: {error}", ExitCode.INTERNAL_ERROR, args.debug)
        hint = "" if args.debug else " (--debug shows where)"
        return _fail(f"internal error: {type(error).__name__}: {error}{hint}", ExitCode.INTERNAL_ERROR, args.debug)


def _fail(message: str, code: ExitCode, debug: bool) -> ExitCode:
    if debug:
        traceback.print_exc()
    print("pfungst:", " ".join(message.split()), file=sys.stderr)
    return code


def _stdout_lost_its_reader() -> bool:
    """Tells a closed stdout from a broken connection elsewhere, which raises the same error."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
