"""ServerSettings: the server's options on the command line."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from graftlm.core.errors import ConfigError


@dataclass(frozen=True)
class ServerSettings:
    """Address, access and limits of a server.

    host, port           the address; port 0 selects a free one.
    api_keys             a request must have one of them as its bearer token; may be empty on a loopback address only.
    open_paths           paths that need no key.
    model_names          accepted names of the model; answers contain the first.
    max_open_requests    limit of waiting and running requests; further ones get status 429.
    max_body_bytes       limit of a request's body in bytes; a longer one gets status 413.
    request_timeout_s    a longer request ends with status 408; None for no limit.
    drain_timeout_s      seconds that requests have to finish after SIGTERM.
    max_step_s           after a longer step of the engine `/health` answers 503.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    open_paths: frozenset[str] = frozenset({"/", "/health", "/ping", "/metrics"})
    model_names: tuple[str, ...] = ()
    max_open_requests: int = 1024
    max_body_bytes: int = 32 << 20
    request_timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    max_step_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must lie in 0 to 65535, where 0 takes a free port")
        if any(not key or key != key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("an API key is empty, has spaces at its ends or is not ASCII; give another one")
        if self.max_open_requests < 1:
            raise ConfigError(f"max_open_requests is {self.max_open_requests}; it must be at least 1")
        for name in ("request_timeout_s", "drain_timeout_s", "max_step_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}; it must be 0 or more seconds")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and no API key is set; give --api-key or "
                "GRAFTLM_API_KEY, or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
