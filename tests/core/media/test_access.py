"""load_image's URLs and MediaAccess: nothing but allowed hosts at public addresses and files below allowed folders."""

from __future__ import annotations

import http.server
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftlm.core.errors import ConfigError
from graftlm.core.media import access
from graftlm.core.media.access import MediaAccess, fetch, is_public
from graftlm.core.media.loading import MediaLimits, load_image
from tests.core.media.test_loading import encoded

LIMITS = MediaLimits()
PNG = encoded()
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBlzCCAT6gAwIBAgIUF3OEdJzX1WKbVf/fgQiom1j3jIgwCgYIKoZIzj0EAwIw
FTETMBEGA1UEAwwKbWVkaWEudGVzdDAgFw0yNjExMjkwNDU5MDNaGA8yMTI2MTEw
NTA0NTkwM1owFTETMBEGA1UEAwwKbWVkaWEudGVzdDBZMBMGByqGSM49AgEGCCqG
SM49AwEHA0IABIB3SoFwlzyK0VaQfHi3cw9fjepK3N2Xp3PLuhZNtCWZxPwtSO6L
IULqHsOp+G+Kgz7CVjYVl1TZWyjRCu0iKVKjajBoMB0GA1UdDgQWBBTyyGWYEzYe
X5in1zoH0/1Z9QXf8DAfBgNVHSMEGDAWgBTyyGWYEzYeX5in1zoH0/1Z9QXf8DAP
BgNVHRMBAf8EBTADAQH/MBUGA1UdEQQOMAyCCm1lZGlhLnRlc3QwCgYIKoZIzj0E
AwIDRwAwRAIgBhCebwqzXEYfxbYDYFiKWYkGrEgNQfdjxGEBnFehOZ0CIATIy6Zc
DNISLlRA5n65lxZ41CTObWqg6J/9kFcFOmE5
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgi9Qv2tWe2QmdMwR4
EahtROqVf1bwJAcMxK0ZM3yU9Z6hRANCAASAd0qBcJc8itFWkHx4t3MPX43qStzd
l6dzy7oWTbQlmcT8LUjuiyFC6h7DqfhvioM+wlY2FZdU2Vso0QrtIilS
-----END PRIVATE KEY-----
"""


class _Files(http.server.BaseHTTPRequestHandler):
    """A picture at every path, and some paths that a careless client pays for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        name = self.path.partition("?")[0].strip("/")
        if name == "moved":
            self._begin(302, {"Location": "https://media.test/inner", "Content-Length": "0"})
        elif name == "missing":
            self._begin(404, {"Content-Length": "0"})
        elif name == "stated":
            self._begin(200, {"Content-Length": "100000000000"})
        elif name == "endless":
            self._begin(200, {"Transfer-Encoding": "chunked"})
            while not self.wfile.closed:
                self.wfile.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        elif name == "short":
            self._begin(200, {"Content-Length": str(len(PNG) + 1)})
            self.wfile.write(PNG)
            self.close_connection = True
        elif name == "drips":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            while not self.wfile.closed:
                self.wfile.write(b"x")
                time.sleep(0.02)
        else:
            self._begin(200, {"Content-Length": str(len(PNG))})
            self.wfile.write(PNG)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    num_connections = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Files)
        (folder / "pem").write_text(CERTIFICATE + KEY)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "pem")
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.paths: list[str] = []

    def verify_request(self, *_: Any) -> bool:
        self.num_connections += 1
        return True

    def handle_error(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    with _Server(tmp_path_factory.mktemp("tls")) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(running: _Server, monkeypatch: pytest.MonkeyPatch) -> _Server:
    """The host "media.test" at this machine, whose port and certificate are taken for those of the public internet."""
    real = socket.getaddrinfo

    def resolve(host: str, *args: Any, **options: Any) -> Any:
        if host == "media.test":
            running.paths.append("resolved")
        return real("127.0.0.1" if host == "media.test" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(access, "_PORT", running.server_port)
    monkeypatch.setattr(access, "tls_context", lambda: ssl.create_default_context(cadata=CERTIFICATE))
    running.paths.clear()
    running.num_connections = 0
    return running


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this machine's address for a public one."""
    monkeypatch.setattr(access, "is_public", lambda address: address == "127.0.0.1")


ONLY = MediaAccess(hosts=frozenset({"media.test"}))


@pytest.mark.usefixtures("outside")
def test_an_allowed_host_is_resolved_once_and_read(server: _Server) -> None:
    assert ONLY.read("https://media.test/a%20b.png?c=d e", "picture", 10_000, LIMITS) == PNG
    assert server.paths == ["resolved", "/a%20b.png?c=d%20e"]
    assert load_image("https://MEDIA.test./x", allow_urls=True).encoded == PNG


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("moved", "status 302 .a redirect, which is not followed.; send the bytes"),
        ("missing", "status 404"),
        ("stated", "100,000,000,000 bytes; the limit is 100,000"),
        ("endless", "bytes; the limit is 100,000"),
        ("short", "cannot be read: IncompleteRead"),
        ("drips", "did not answer within 0.3 s"),
    ],
)
def test_answers_that_cost_too_much_end(server: _Server, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fetch(f"https://media.test/{path}", max_bytes=100_000, seconds=0.3 if path == "drips" else 30)
    assert server.paths == ["resolved", f"/{path}"]  # and no second address


def test_no_address_inside_is_reached(server: _Server) -> None:
    """Even hosts that the operator allows: a name that leads inside is a mistake or an attack."""
    hosts = [
        "media.test",
        "localhost",
        "127.0.0.1",
        "::1",
        "2130706433",
        "0x7f.1",
        "127.1",
        "0.0.0.0",
        "169.254.169.254",
    ]
    given = MediaAccess(hosts=frozenset(h for h in hosts if ":" not in h))
    for host in hosts:
        url = f"https://[{host}]/" if ":" in host else f"https://{host}/"
        for attempt in (
            lambda url=url: given.read(url, "picture", 99, LIMITS),
            lambda url=url: fetch(url, max_bytes=9, seconds=9),
        ):
            with pytest.raises(ConfigError, match="not public|cannot be resolved|not allowed"):
                attempt()
    assert server.num_connections == 0


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    "url",
    [
        "http://media.test/",
        "https://other.test/",
        "https://media.test.other.test/",
        "https://media.test:8443/",
        "https://user@media.test/",
        "https://media.test@other.test/",
        "https://media.test\\@other.test/",
        "https:///etc/passwd",
        "https://[::1/",
        "HTTPS://other.test",
    ],
)
def test_only_plain_urls_of_allowed_hosts_are_asked(server: _Server, url: str) -> None:
    with pytest.raises(ConfigError, match="the URL"):
        ONLY.read(url, "picture", 100, LIMITS)
    assert server.num_connections == 0


def test_a_foreign_certificate_is_refused(server: _Server, outside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "tls_context", ssl.create_default_context)
    with pytest.raises(ConfigError, match="cannot be read: SSLCertVerificationError"):
        fetch("https://media.test/", max_bytes=100, seconds=30)
    assert "/" not in server.paths


def test_addresses() -> None:
    for address in ("8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert is_public(address)
    inside = (
        "127.0.0.1 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 ::1 "
    )
    inside += "fe80::1 fe80::1%eth0 fd00::1 ff02::1 ::ffff:127.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1 ::ffff:10.0.0.1 ::"
    assert not [address for address in inside.split() if is_public(address)]


def test_files_only_below_allowed_folders(tmp_path: Path) -> None:
    inside, other = tmp_path / "media", tmp_path / "media2"
    (inside / "deep").mkdir(parents=True)
    other.mkdir()
    for folder in (inside, inside / "deep", other):
        (folder / "a b.png").write_bytes(PNG)
    (inside / "link.png").symlink_to(other / "a b.png")
    (tmp_path / "alias").symlink_to(inside)
    given = MediaAccess(folders=(tmp_path / "alias",))
    for source in (f"{inside}/a b.png", (inside / "deep" / "a b.png").as_uri(), f"{tmp_path}/alias/a b.png"):
        assert given.read(source, "picture", 10_000, LIMITS) == PNG
    refused = [
        *(
            f"{other}/a b.png",
            f"{inside}/../media2/a b.png",
            f"{inside}/link.png",
            "a b.png",
            "~/a b.png",
            "/etc/passwd",
        ),
        *(
            f"{inside}%2f..%2f..%2fmedia2/a b.png",
            f"file://{inside}/%2e%2e/media2/a b.png",
            "a\0b",
            "file:///etc/passwd",
        ),
    ]
    for source in refused:
        with pytest.raises(ConfigError, match="not below an --allowed-media-path"):
            given.read(source, "picture", 10_000, LIMITS)
    os.mkfifo(inside / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        given.read(f"{inside}/pipe", "picture", 10_000, LIMITS)


def test_nothing_is_read_by_default(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    closed = MediaAccess()
    with pytest.raises(
        ConfigError, match="this server fetches none; send a data URL, or start it with --allow-media-url"
    ):
        closed.read("https://media.test/", "picture", 100, LIMITS)
    for source in (str(tmp_path / "a.png"), (tmp_path / "a.png").as_uri(), "/dev/zero", "", "iVBORw0KGgo="):
        with pytest.raises(ConfigError, match="no data URL, and this server reads no files"):
            closed.read(source, "picture", 100, LIMITS)
    assert closed.read("data:image/png;base64,aGk=", "picture", 100, LIMITS) == b"hi"


@pytest.mark.parametrize("host", ["", "https://a", "a:443", "*.a", "A.b", "a b"])
def test_hosts_are_plain_names(host: str) -> None:
    with pytest.raises(ConfigError, match="is no plain name"):
        MediaAccess(hosts=frozenset({host}))
