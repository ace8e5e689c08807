"""A measurement in a fresh process, in which nothing that came before can hide or help."""

import json
import subprocess
import sys
from typing import Any

from engine.errors import InputError


def answer_of(what: str, module: str, *arguments: object) -> Any:
    """The last line that `python -m module arguments` prints, read as JSON; `what` names it where it fails."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{what} failed in a process of its own: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])
