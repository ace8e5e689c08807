"""Bodies read strictly: JSON without duplicate names, NaN or bottomless nesting, forms without duplicate fields."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from service.disk import is_full
from service.http.errors import FULL_DISK, Refused

DEEPEST = 32
MOST_FIELDS = 32
PART_BYTES = 64 * 1024
"""Most bytes of a form's text field."""
LONGEST_FILE_NAME = 255


class StrictRoute(APIRoute):
    """A route whose JSON and form bodies are read strictly, and of the content type it documents."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a strict request."""
        handle = super().get_route_handler()
        wanted = self.content_type
        fields = frozenset(param.alias for param in self.dependant.body_params)

        async def strict(request: Request) -> Response:
            if wanted is not None:
                await check_content_type(request, wanted)
            return await handle(StrictRequest(request.scope, request.receive, fields))

        return strict

    @property
    def content_type(self) -> str | None:
        """What the body has to be, or None where the route takes no body."""
        field = self.body_field
        if field is None:
            return None
        return str(getattr(field.field_info, "media_type", None) or "application/json")


async def check_content_type(request: Request, wanted: str) -> None:
    """415 for a body of another type; JSON bodies may have parameters such as a character set of UTF-8."""
    given = request.headers.get("content-type", "")
    kind, _, parameters = given.partition(";")
    if kind.strip().lower() != wanted:
        raise Refused(415, f"The body has to be {wanted}.", field="Content-Type")
    if wanted == "application/json" and parameters.strip().lower().replace('"', "") not in ("", "charset=utf-8"):
        raise Refused(415, "JSON is read as UTF-8 alone.", field="Content-Type")


class StrictRequest(Request):
    """A request whose `json` and `form` refuse what their readers would let pass."""

    def __init__(self, scope: Scope, receive: Receive, fields: frozenset[str]) -> None:
        super().__init__(scope, receive)
        self.fields = fields
        """What a form may hold."""

    async def json(self) -> Any:
        """The JSON body."""
        return strict_json(await self.body())

    async def _get_form(self, **limits: Any) -> FormData:
        """The form, with limits on fields and files; FastAPI reads it through `form`."""
        try:
            form = await super()._get_form(max_files=4, max_fields=MOST_FIELDS, max_part_size=PART_BYTES)
        except Refused:
            raise
        except HTTPException as error:
            raise Refused(400, f"The form cannot be read: {error.detail}", code="bad_form") from None
        except Exception as error:
            if is_full(error):  # a large file is spooled to the disk while the form is read
                raise Refused(503, FULL_DISK, code="disk_full") from None
            raise Refused(400, "The form cannot be read.", code="bad_form") from None
        try:
            self._check(form)
        except Refused:
            await form.close()
            raise
        return form

    def _check(self, form: FormData) -> None:
        """Each known field once, no other, and files with plain names."""
        for name, count in Counter(name for name, _ in form.multi_items()).items():
            if name not in self.fields:
                raise Refused(422, f"There is no field {name!r:.80} here.", field=name[:80])
            if count > 1:
                raise Refused(422, f"The field {name!r:.80} is there twice.", code="duplicate_field", field=name[:80])
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                check_file_name(value.filename or "", name)


def strict_json(content: bytes) -> Any:
    """JSON as RFC 8259 has it: UTF-8, each name once, numbers only, and no deeper than DEEPEST."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(400, "The body is no UTF-8.", code="bad_json") from None
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise Refused(400, f"The body is nested deeper than {DEEPEST} levels.", code="bad_json") from None
    except ValueError as error:
        at = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise Refused(400, f"The body is no JSON{at}.", code="bad_json") from None
    if _deeper(value, DEEPEST):
        raise Refused(400, f"The body is nested deeper than {DEEPEST} levels.", code="bad_json")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Refused(400, f"The name {name!r:.80} is there twice.", code="duplicate_field", field=name[:80])
        found[name] = value
    return found


def _no_constant(word: str) -> NoReturn:
    raise Refused(400, f"{word} is no JSON number.", code="bad_json")


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than `levels`; level by level, so that depth costs no recursion."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return False
    return True


def check_file_name(name: str, field: str) -> None:
    """A file's name is one plain name: no folders, no control characters, not longer than a file system takes."""
    if not name or len(name.encode("utf-8", "replace")) > LONGEST_FILE_NAME:
        raise Refused(422, f"The file needs a name of 1 to {LONGEST_FILE_NAME} bytes.", code="bad_name", field=field)
    if "/" in name or "\\" in name or name in (".", "..") or not name.isprintable():
        raise Refused(422, "The file's name has to be one plain name without folders.", code="bad_name", field=field)
