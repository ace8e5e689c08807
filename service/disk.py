"""A full disk, however it is said."""

from __future__ import annotations

import errno
import sqlite3
from typing import Any

DISK_FULL = "53100"
"""PostgreSQL's code."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or one's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def database_is_full(error: Any) -> bool:
    """Whether a database driver's error says so."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL or (
        getattr(error, "sqlstate", None) == DISK_FULL
    )
