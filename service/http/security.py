"""Who asks, and what they may: bearer tokens, kept as hashes, with the scopes read, audit and admin.

Without tokens the service is one person's: it answers on the loopback interface alone, to requests that name it so,
and everything is allowed. With tokens every request but the health checks needs one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Scope as AsgiScope

from service.configuration import is_loopback
from service.http.errors import Refused

LONGEST_TOKEN = 512


class Scope(StrEnum):
    """What a token may do; each includes those before it."""

    READ = "read"
    AUDIT = "audit"
    ADMIN = "admin"


ORDER = list(Scope)


class StoredToken(Protocol):
    """A token as the operator's configuration holds it."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def scopes(self) -> Collection[str]: ...


@dataclass(frozen=True)
class Caller:
    """Who asks: the owner of what is made, and the widest scope."""

    owner: str
    scope: Scope

    def may(self, needed: Scope) -> bool:
        """Whether this caller's scope reaches that far."""
        return ORDER.index(self.scope) >= ORDER.index(needed)


LOCAL = Caller("local", Scope.ADMIN)


def token_hash(token: str) -> str:
    """How a token is stored."""
    return hashlib.sha256(token.encode()).hexdigest()


class Guard:
    """Decides who a request comes from."""

    def __init__(self, tokens: Sequence[StoredToken]) -> None:
        self.tokens = tuple(tokens)

    def caller(self, scope: AsgiScope) -> Caller:
        """The caller of a request; Refused with 401 or 403 where there is none."""
        return self._by_token(Headers(scope=scope)) if self.tokens else _local(scope)

    def _by_token(self, headers: Headers) -> Caller:
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token_hash(token.strip()[:LONGEST_TOKEN])
        found: StoredToken | None = None
        for stored in self.tokens:
            # Every token is compared, each in constant time: how long it takes says nothing about which is close.
            if hmac.compare_digest(stored.sha256.lower(), given):
                found = stored
        if found is None or kind.lower() != "bearer":
            raise Refused(
                401, "A valid bearer token is needed.", field="Authorization", headers={"WWW-Authenticate": "Bearer"}
            )
        return Caller(found.name, max((Scope(scope) for scope in found.scopes), key=ORDER.index))


def _local(scope: AsgiScope) -> Caller:
    """The one caller of a service without tokens, who has to be on this machine.

    A web page that a browser on this machine shows is not: its requests carry its own name in Host or Origin.
    """
    for side in ("server", "client"):
        address = scope.get(side)
        if address is not None and not is_loopback(str(address[0])):
            raise Refused(403, "Without tokens in its configuration the service answers on 127.0.0.1 alone.")
    headers = Headers(scope=scope)
    if not is_loopback(_host_of(headers.get("host", ""))):
        raise Refused(403, "Without tokens the service is asked as localhost alone.", field="Host")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
        raise Refused(403, "Requests of other web pages are not served.", field="Origin")
    return LOCAL


def _host_of(netloc: str) -> str:
    """The host of host:port; of [::1]:3000 it is ::1."""
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.rpartition(":")[0] if netloc.count(":") == 1 else netloc


class Needs:
    """A dependency of a route: the caller, if the scope is wide enough."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Caller:
        """The door found out who asks before anything else was read. Not async, it would be called in a thread."""
        caller: Caller = request.scope["pfungst_caller"]
        if not caller.may(self.scope):
            raise Refused(403, f"This needs a token with the scope {self.scope}.", field="Authorization")
        return caller


reader, auditor, administrator = Needs(Scope.READ), Needs(Scope.AUDIT), Needs(Scope.ADMIN)
