"""Options of an endpoint: frozen dataclasses, validated on construction."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any, Self
from urllib.parse import urlsplit

from graftlm.core.config import EngineConfig, reject_unknown
from graftlm.core.errors import ConfigError

KEY_VARIABLE = "GRAFTLM_API_KEY"
URL_VARIABLE = "GRAFTLM_BASE_URL"
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


@dataclass(frozen=True)
class Budget:
    """Limits on the total of all calls to an endpoint; None sets no limit.

    calls   requests sent, retries and probes included. Never exceeded.
    tokens  prompt and completion tokens.
    cost    money, in the unit of the prices.
    A call is refused once `tokens` or `cost` is reached, so only calls in flight at that time can exceed them.
    """

    calls: int | None = None
    tokens: int | None = None
    cost: float | None = None

    def __post_init__(self) -> None:
        for name in ("calls", "tokens", "cost"):
            _check_number(f"budget of {name}", getattr(self, name), whole=name != "cost", optional=True)

    @classmethod
    def of(cls, given: Any) -> Self:
        """Read `budget=`: a Budget, a dict of its fields, or None."""
        if isinstance(given, cls):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"budget is {given!r}; give a dict such as {{'calls': 100}} of calls, tokens and cost")
        reject_unknown(list(given or {}), [f.name for f in fields(cls)], "budget")
        return cls(**(given or {}))


@dataclass(frozen=True)
class EndpointConfig:
    """The options of an endpoint.

    model, base_url  the model's name there, and the URL before /chat/completions, usually with /v1 at its end.
    api_key          never shown; None reads GRAFTLM_API_KEY. Endpoints on this machine need no key; elsewhere "" means
                     no key.
    max_in_flight    concurrent requests; further ones wait.
    max_retries      retries of a request after a rate limit, a server's error or a lost connection.
    retry_timeouts   retries of a request that timed out; the first attempt may have been computed, and billed.
    timeout          seconds for one request, all of its answer included.
    budget           limits on the total of all calls: a dict of "calls", "tokens", "cost".
    prices           money per million tokens: a dict of "input", "cached" and "output".
    capabilities     capabilities that need no detection: a dict of fields of Capabilities.
    headers          sent with every request; never shown.
    extra_body       fields added to every request's body.
    layout_hint      whether a turn of several parts may be described to a chat endpoint that cannot continue a turn.
    max_attempts     requests for one value, if an answer does not have the required form.
    """

    model: str
    base_url: str = ""
    api_key: str | None = field(default=None, repr=False)
    max_in_flight: int = 64
    max_retries: int = 2
    retry_timeouts: int = 1
    timeout: float = 600.0
    budget: Any = None
    prices: Mapping[str, float] | None = None
    capabilities: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    extra_body: Mapping[str, Any] | None = None
    layout_hint: bool = True
    max_attempts: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model is {self.model!r}; give the model's name at {self.base_url}")
        _check_url(self.base_url)
        for name, whole, least in (
            ("max_in_flight", True, 1),
            ("max_retries", True, 0),
            ("retry_timeouts", True, 0),
            ("timeout", False, 0),
            ("max_attempts", True, 1),
        ):
            _check_number(name, getattr(self, name), whole=whole, least=least)
        if self.timeout == 0:
            raise ConfigError("timeout is 0; it must be above 0 seconds")
        for name in ("prices", "capabilities", "headers", "extra_body"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name} must be a dict, or None; it is a {type(getattr(self, name)).__name__}")
        if not isinstance(self.layout_hint, bool):
            raise ConfigError(f"layout_hint is {self.layout_hint!r}; it must be True or False")
        for name, price in (self.prices or {}).items():
            reject_unknown([name], ["input", "cached", "output"], "price")
            _check_number(f"the price of {name}", price, whole=False)
        for name, value in (self.headers or {}).items():
            _check_header("a header's name", name)
            _check_header(f"the header {name!r}", value)
        object.__setattr__(self, "budget", Budget.of(self.budget))
        object.__setattr__(self, "api_key", self._find_key())

    @classmethod
    def from_options(cls, model: Any, base_url: str | None, api_key: str | None, options: Mapping[str, Any]) -> Self:
        """Build from the keywords of a Runtime; raise ConfigError for an option of models in this process."""
        base_url = base_url or os.environ.get(URL_VARIABLE)
        if not base_url:
            raise ConfigError(f"an api_key was given without base_url; give base_url=, or set {URL_VARIABLE}")
        known = [f.name for f in fields(cls)]
        local = [f.name for f in fields(EngineConfig) if f.name in options and f.name not in known]
        if local:
            raise ConfigError(
                f"{', '.join(local)}: for models in this process, not for one at an endpoint; "
                f"leave {'them' if len(local) > 1 else 'it'} out, or base_url"
            )
        reject_unknown(list(options), known, "endpoint option")
        return cls(model=model, base_url=base_url, api_key=api_key, **options)

    @staticmethod
    def key_of(base_url: str | None, api_key: str | None, options: Mapping[str, Any]) -> str:
        """Return a key that is equal for equal endpoints and options, and contains no secret."""
        return sha256(repr((base_url, api_key, sorted(options.items()))).encode()).hexdigest()

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def on_this_machine(self) -> bool:
        return self.host in _LOOPBACK

    def redact(self, text: str) -> str:
        """Remove the API key and the values of headers from a text: servers may repeat them in errors."""
        for secret in (self.api_key, *(self.headers or {}).values()):
            if secret and len(secret) > 3:
                text = text.replace(secret, "***")
        return text

    def _find_key(self) -> str:
        key = self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE)
        if key is not None and not isinstance(key, str):
            raise ConfigError(f"api_key is a {type(key).__name__}; it must be text")
        if not key and self.api_key is None and not self.on_this_machine and not self.headers:
            raise ConfigError(
                f"no API key for {self.base_url}; give api_key=, or set {KEY_VARIABLE} "
                '(api_key="" for an endpoint that takes none)'
            )
        _check_header("api_key", key or "")
        return key or ""


def _check_url(url: Any) -> None:
    shape = "give one such as https://api.example.com/v1"
    if not isinstance(url, str):
        raise ConfigError(f"base_url is a {type(url).__name__}; {shape}")
    try:
        parts = urlsplit(url)
        secret = parts.username is not None or parts.password is not None
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"base_url is no URL ({error}); {shape}") from None
    if secret or parts.query:
        raise ConfigError("base_url holds a user name, a password or a query; give a key as api_key= or in headers=")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"base_url is {url!r}, without http:// or https:// and a host; {shape}")


def _check_header(name: str, value: Any) -> None:
    """Raise ConfigError, without the value, for a value that is invalid in a header."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} is a {type(value).__name__}; it must be text")
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        raise ConfigError(
            f"{name} holds a line break, a blank at an end, or a character beyond ASCII, which no header takes; "
            "a key that was read from a file may need strip()"
        )


def _check_number(name: str, value: Any, *, whole: bool, least: int = 0, optional: bool = False) -> None:
    if value is None and optional:
        return
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least or value == float("inf"):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name} is {value!r}; it must be {kind}, at least {least}{', or None' if optional else ''}")
