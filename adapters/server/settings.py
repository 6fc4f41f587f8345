"""ServerSettings: the server's options on the command line."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields

from graftlm.core.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Limits of one connection, one request and one server, which docs/security.md lists.

    header_bytes, headers  size and number of a request's headers; more get status 431.
    header_s, body_s       seconds in which the headers and the body of a request must arrive.
    write_s                seconds in which a client must read the bytes of an answer that wait for it (about 64 KiB);
                           then its connection is closed and its request cancelled.
    connections_per_client connections of one address; beyond them, the one that has waited longest is closed.
    held_body_bytes        bytes of all bodies that are arriving, three quarters of them of one caller; a body beyond
                           them gets status 429 if it has more than 64 KiB.
    body_bytes_s           bytes a second that are read of the bodies of one caller that are larger than 1 MiB.
    held_media_bytes       bytes of pictures and videos of all requests, as sent and as processed; more get status 429.
    json_members           members of all objects in a body.
    json_values            all values in a body: members, elements of arrays, token ids.
    messages, tools        of one request.
    stop_strings           of one request;  stop_chars: characters of all of them.
    constraint_chars       characters of a regex, a grammar, a schema's JSON text, or all choices.
    salt_chars             characters of `cache_salt`.
    tokenize_chars         characters of a text for `/tokenize`.
    sequences_per_request  prompts times `n` of one request.
    waiting_constraints    constraints that wait for their compilation; a new one beyond them gets status 429.
    open_sequences         sequences of all requests that wait or run; a request beyond them gets status 429.
    """

    header_bytes: int = 64 << 10
    headers: int = 256
    header_s: float = 20.0
    body_s: float = 60.0
    write_s: float = 60.0
    connections_per_client: int = 1024
    held_body_bytes: int = 128 << 20
    body_bytes_s: int = 64 << 20
    held_media_bytes: int = 2 << 30
    json_members: int = 100_000
    json_values: int = 2_000_000
    messages: int = 10_000
    tools: int = 1024
    stop_strings: int = 64
    stop_chars: int = 4096
    constraint_chars: int = 256 << 10
    salt_chars: int = 256
    tokenize_chars: int = 1 << 20
    sequences_per_request: int = 1024
    waiting_constraints: int = 64
    open_sequences: int = 8192

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            whole = isinstance(each.default, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value <= 0:
                kind = "a whole number above 0" if whole else "a number above 0"
                raise ConfigError(f"limit {each.name} is {value!r}; it must be {kind}")


@dataclass(frozen=True)
class ServerSettings:
    """Address, access and limits of a server.

    host, port           the address; port 0 selects a free one.
    api_keys             a request must have one of them as its bearer token; may be empty on a loopback address only.
    allowed_hosts        names of the server in `Host`, in addition to `host` and the names of loopback addresses.
                         Checked on a loopback address without keys only.
    allowed_origins      origins whose pages may use the server (CORS), as "https://app.example"; "*" allows all.
    ssl_certfile         a certificate in PEM; the server then speaks HTTPS only.
    ssl_keyfile          its key; None if it is in the same file.
    open_paths           paths that need no key.
    model_names          accepted names of the model, instead of its own; answers contain the first.
    model_aliases        further accepted names.
    max_open_requests    limit of waiting and running requests; further ones get status 429.
    max_body_bytes       limit of a request's body in bytes; a longer one gets status 413.
    request_timeout_s    a longer request ends with status 408; None for no limit.
    drain_timeout_s      seconds that requests have to finish after SIGTERM.
    media_hosts          hosts whose https URLs of pictures and videos are fetched, by their exact names.
    media_folders        folders whose pictures and videos a request may name by path.
    max_step_s           after a longer step of the engine `/health` answers 503.
    ignore_unknown       True: unknown fields of a body are left out, and the header x-ignored-fields lists them.
    trust_request_chat_template  True: requests may bring the chat template, a program that runs in Jinja's sandbox.
    limits               the other limits.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    open_paths: frozenset[str] = frozenset({"/", "/health", "/ping", "/metrics", "/docs", "/openapi.json"})
    model_names: tuple[str, ...] = ()
    model_aliases: tuple[str, ...] = ()
    max_open_requests: int = 1024
    max_body_bytes: int = 32 << 20
    request_timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    max_step_s: float = 120.0
    media_hosts: tuple[str, ...] = ()
    media_folders: tuple[str, ...] = ()
    ignore_unknown: bool = False
    trust_request_chat_template: bool = False
    limits: Limits = field(default_factory=Limits)

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
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed origin {origin!r} is none; give scheme and host, as https://app.example")
        self._check_certificate()
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and no API key is set; give --api-key or "
                "GRAFTLM_API_KEY, or listen on 127.0.0.1"
            )

    def _check_certificate(self) -> None:
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise ConfigError("ssl_keyfile was given without ssl_certfile; give both")
            return
        import ssl

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except OSError as error:  # an SSLError too
            files = " and ".join(filter(None, [self.ssl_certfile, self.ssl_keyfile]))
            remedy = "" if self.ssl_keyfile else "; the key may be in a file of its own, ssl_keyfile"
            raise ConfigError(f"{files} cannot be used as certificate and key in PEM: {error}{remedy}") from error


_ORIGIN = re.compile(r"https?://[^/?#\s@]+")


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
