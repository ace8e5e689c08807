"""The subcommands of `pfungst`, one module each.

A module has two functions: `add(subparsers)` declares its arguments and ends with `set_defaults(run=run)`;
`run(args) -> int` does the work and returns an exit code. It raises what went wrong and prints no error itself. Modules
of other rooms are imported inside `run`, so that `pfungst --help` does not wait for torch.
"""

from service.commands import audit, calibrate, cfkd, demo, explain, export

COMMANDS = (demo, audit, cfkd, explain, calibrate, export)
