"""Errors in the form of the OpenAI API: a status, a type, the field at fault and a code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from graftlm.core.errors import (
    ConfigError,
    EngineError,
    GraftError,
    GrammarError,
    ModelError,
    Overloaded,
    RemoteError,
    RequestTimeout,
    RequestTooLong,
)


class ApiError(Exception):
    """An error response.

    param        the field of the request's body at fault.
    code         a short name for programs.
    retry_after  seconds until the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": code}
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    def body(self, path: str) -> bytes:
        """Return the body in the form of the dialect that the path belongs to."""
        forms = (form for prefix, form in _FORMS.items() if path.startswith(prefix))
        form = next(forms, None)
        return json.dumps(form(self) if form is not None else {"error": self.error}).encode()


_FORMS: dict[str, Callable[[ApiError], dict[str, Any]]] = {}


def register_form(prefix: str, form: Callable[[ApiError], dict[str, Any]]) -> None:
    """Let errors of paths that begin with `prefix` have the form of another API than OpenAI's."""
    _FORMS[prefix] = form


_SERVER = "server_error"
_BY_TYPE: tuple[tuple[type[GraftError], int, str, str | None], ...] = (
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (RequestTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (GrammarError, 400, "invalid_request_error", "invalid_grammar"),
    (ConfigError, 400, "invalid_request_error", None),
    (RequestTimeout, 408, "timeout_error", "request_timeout"),
    (ModelError, 503, _SERVER, "model_error"),
    (RemoteError, 502, _SERVER, "endpoint_error"),
    (EngineError, 500, _SERVER, "engine_error"),
)


@cache
def field_names(body: type[BaseModel], max_tokens: str = "max_tokens") -> Mapping[str, str]:
    """Return the names of a body's fields by the names that errors of the runtime have for them.

    max_tokens  the field that limits the generated tokens
    """
    return {**{name: name for name in body.model_fields}, "max_tokens": max_tokens}


def api_error(error: BaseException, fields: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """Return the response for `error`.

    fields  names of the request's body: if the message begins with one, that field, with its subfields, is at fault.
    """
    if isinstance(error, ApiError):
        return error
    for kind, status, name, code in _BY_TYPE:
        if isinstance(error, kind):
            message = str(error)
            found = re.match(r"(\w+)(\.\w+)*\b", message)
            param = None
            if found and (name_here := fields.get(found.group(1))):
                message = re.sub(rf"\b{found.group(1)}\b", name_here, message)
                param = name_here + found.group()[len(found.group(1)) :]
            retry_after = 1 if status == 429 else None
            return ApiError(status, message, kind=name, param=param, code=code, retry_after=retry_after)
    return ApiError(500, f"the server failed: {type(error).__name__}: {error}", kind=_SERVER, code="internal_error")


def invalid_body(error: ValidationError, known: Collection[str]) -> ApiError:
    """Return the 400 that names the first invalid field."""
    first: Any = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        import difflib

        near = difflib.get_close_matches(path, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; remove it"
        return ApiError(400, f"unknown field {path!r}{hint}", param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing", param=path, code="missing_required_parameter")
    given = repr(first.get("input"))
    given = given if len(given) <= 80 else given[:80] + "..."
    return ApiError(400, f"{path or 'the body'} is {given}: {first['msg']}", param=path or None, code="invalid_value")


def _is_branch(part: object) -> bool:
    """Return True if a part of an error's location names a branch of a union instead of a field."""
    return isinstance(part, str) and bool(re.search(r"[\[\](]|^(str|int|bool|float)$", part))
