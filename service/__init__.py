"""How people and machines reach it: command line and BentoML service."""

from typing import Any

__all__ = ["Audit"]


def __getattr__(name: str) -> Any:
    """`service.Audit` is what BentoML serves. It is imported when asked for: the command line does without it."""
    if name == "Audit":
        from service.serving import Audit

        return Audit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
