"""MediaAccess: the URLs and folders that a stranger's request may name; `fetch`: the body of a public URL.

A server reads nothing by default: a request sends the bytes themselves. An operator may allow hosts and folders.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from graftlm.core.errors import ConfigError, shortened
from graftlm.core.media.loading import MediaLimits, check_bytes, data_of_url, is_url, read_file

_PORT = 443
_PIECE = 1 << 16


@dataclass(frozen=True)
class MediaAccess:
    """The hosts and folders whose media a request may name.

    hosts    exact names of hosts whose https URLs are fetched
    folders  folders whose files are read, with all folders below them
    """

    hosts: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not host or host != host.lower().strip(".") or any(c in host for c in "/:@*? "):
                raise ConfigError(f"the media host {host!r} is no plain name; give one such as images.example.com")
        for folder in self.folders:
            if not folder.is_dir():
                raise ConfigError(f"the media path {str(folder)!r} is no folder; give one that exists")

    def read(self, source: str, kind: str, limit: int, limits: MediaLimits) -> bytes:
        """Return the bytes that a string of a request names: a data URL, an allowed URL or an allowed file.

        kind   "picture" or "video", for messages
        limit  most bytes

        Raises: ConfigError for everything else, before a file is opened or an address resolved.
        """
        name = "max_image_bytes" if kind == "picture" else "max_video_bytes"
        if source[:5].lower() == "data:":
            return data_of_url(source, kind, limit, name)
        if is_url(source):
            if not self.hosts:
                raise ConfigError(
                    f"the {kind} is the URL {shortened(source)}, and this server fetches none; send a data URL, or "
                    "start it with --allow-media-url HOST"
                )
            return fetch(source, max_bytes=limit, seconds=limits.fetch_s, hosts=self.hosts)
        if source[:7].lower() == "file://":
            source = unquote(urlsplit(source).path)
        if not self.folders:
            raise ConfigError(f"the {kind} is no data URL, and this server reads no files; send data:...;base64,...")
        # Resolved first: a link or ".." below an allowed folder may lead out of it.
        path = Path(os.path.realpath(source)) if "\0" not in source else Path()
        if not Path(source).is_absolute() or not any(
            path.is_relative_to(os.path.realpath(folder)) for folder in self.folders
        ):
            raise ConfigError(f"the {kind} {shortened(source)} is not below an --allowed-media-path of this server")
        return read_file(path, kind, limit, name)


def fetch(url: str, *, max_bytes: int, seconds: float, hosts: frozenset[str] | None = None) -> bytes:
    """Return the body of an https URL.

    max_bytes  longest body; reading stops there
    seconds    until the whole body has arrived
    hosts      the exact names that may be asked; None for all

    The host is resolved once, all its addresses must be public, and the connection goes to one of them. Redirects are
    refused, since each names another address. No cookies, credentials or proxies are used.

    Raises: ConfigError that names the URL and the reason.
    """
    deadline = time.monotonic() + seconds
    shown = shortened(url)
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError as error:
        raise ConfigError(f"the URL {shown} is malformed: {error}") from None
    if parts.scheme != "https":
        raise ConfigError(f"the URL {shown} is not https; give an https URL, or the bytes")
    if parts.username is not None or parts.password is not None or port not in (None, _PORT):
        raise ConfigError(f"the URL {shown} holds a user or a port; give https://HOST/PATH")
    if not host or (hosts is not None and host not in hosts):
        raise ConfigError(f"the URL {shown} names a host that is not allowed; send the bytes as a data URL")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (
        "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?") if parts.query else ""
    )
    connection = _PinnedConnection(host, _public_address(host, shown), seconds)
    # One reply may be sent a byte at a time: only a timer bounds the whole.
    timer = threading.Timer(max(deadline - time.monotonic(), 0.0), connection.abort)
    timer.daemon = True
    timer.start()
    try:
        connection.request("GET", target, headers={"Accept": "image/*,video/*", "Accept-Encoding": "identity"})
        answer = connection.getresponse()
        if answer.status != 200:
            moved = " (a redirect, which is not followed)" if 300 <= answer.status < 400 else ""
            raise ConfigError(f"the URL {shown} answers with status {answer.status}{moved}; send the bytes")
        stated = int(answer.headers.get("content-length") or -1)
        check_bytes(abs(stated), "file at the URL", max_bytes, "its limit")
        body = bytearray()
        while piece := answer.read(_PIECE):
            body += piece
            check_bytes(len(body), "file at the URL", max_bytes, "its limit")
        if connection.aborted:
            raise TimeoutError
        check_bytes(len(body), "file at the URL", max_bytes, "its limit")
        if stated >= 0 and len(body) != stated:
            raise http.client.IncompleteRead(b"")
        return bytes(body)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        late = connection.aborted or isinstance(error, TimeoutError)
        reason = f"did not answer within {seconds:g} s" if late else f"cannot be read: {type(error).__name__}"
        raise ConfigError(f"the URL {shown} {reason}; send the bytes") from error
    finally:
        timer.cancel()
        connection.close()


class _PinnedConnection(http.client.HTTPSConnection):
    """A connection to one address, with a certificate of the host's name."""

    def __init__(self, host: str, address: str, seconds: float) -> None:
        self._context: ssl.SSLContext = tls_context()
        super().__init__(host, _PORT, timeout=seconds, context=self._context)
        self._address = address
        self.aborted = False

    def connect(self) -> None:
        raw = socket.create_connection((self._address, _PORT), self.timeout)
        self.sock = raw  # so that `abort` reaches the handshake
        if self.aborted:
            raise TimeoutError
        self.sock = self._context.wrap_socket(raw, server_hostname=self.host)

    def abort(self) -> None:
        self.aborted = True
        sock = self.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


tls_context: Callable[[], ssl.SSLContext] = ssl.create_default_context


def _public_address(host: str, shown: str) -> str:
    """Resolve a host once. Raises ConfigError if any of its addresses is not a public one."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the URL {shown} names a host that cannot be resolved; send the bytes") from error
    inside = [address for address in found if not is_public(address)]
    if inside or not found:
        raise ConfigError(f"the URL {shown} leads to an address that is not public; send the bytes as a data URL")
    return found[0]


def is_public(address: str) -> bool:
    """Return True for an IP address of the public internet; IPv4 addresses inside IPv6 ones count as themselves."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return inner.is_global and not inner.is_multicast
    return ip.is_global and not ip.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
