"""What the command line answers to the shell; pipelines branch on these numbers."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of `pfungst`; 0 to 4 are its own, the others are the shell's 128 + signal."""

    PASS = 0
    SPURIOUS_RELIANCE = 1
    BAD_INPUT = 2
    INCONCLUSIVE = 3
    INTERNAL_ERROR = 4
    INTERRUPTED = 130
    CLOSED_PIPE = 141
