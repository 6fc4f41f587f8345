"""Patterns of pydantic's formats that it reads more strictly than JSON Schema's formats are."""

from __future__ import annotations

from typing import Final

from graftlm.core.grammar.schema.algebra.formats import FORMATS

_LABEL: Final = "[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*"
HOST: Final = rf"({_LABEL}\.)*[a-zA-Z][a-zA-Z0-9]*(-[a-zA-Z0-9]+)*"
CHARS: Final = r"([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})*"
REST: Final = rf"(:[1-9][0-9]{{0,3}})?(/{CHARS})?(\?{CHARS})?(#{CHARS})?"


def _networks_v4() -> str:
    """Networks of IPv4, in which the bits behind the prefix are 0."""
    octet, ways = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])", [r"0\.0\.0\.0/0"]
    for length in range(1, 33):
        whole, bits = divmod(length - 1, 8)
        part = "|".join(str(number) for number in range(0, 256, 1 << (7 - bits)))
        ways.append(
            "\\.".join([octet] * whole + [f"({part})" if bits < 7 else octet] + ["0"] * (3 - whole)) + f"/{length}"
        )
    return "|".join(ways)


def _networks_v6() -> str:
    """Networks of IPv6 whose prefix is a number of hexadecimal digits."""
    group, digit, ways = "[0-9a-fA-F]{1,4}", "[0-9a-fA-F]", ["::/0"]
    for digits in range(1, 33):
        whole, rest = divmod(digits - 1, 4)
        last = f"{digit}{{{rest + 1}}}{'0' * (3 - rest)}"
        ways.append(f"({group}:){{{whole}}}{last}{'::' if whole < 7 else ''}/{4 * digits}")
    return "|".join(ways)


_V4_NETWORK: Final = _networks_v4()
_V6_NETWORK: Final = _networks_v6()
_V4_INTERFACE: Final = f"{FORMATS['ipv4']}/([12]?[0-9]|3[0-2])"
_V6_INTERFACE: Final = f"{FORMATS['ipv6']}/([1-9]?[0-9]|1[01][0-9]|12[0-8])"
# At most 64 characters stand before the sign, and behind it at most 253 with a point, as email-validator wants it.
_ATOM: Final = "[a-zA-Z0-9!#$%&'*+/=?^_{|}~-]"
_LOCAL: Final = rf"({_ATOM}{{1,64}}|{_ATOM}{{1,31}}\.{_ATOM}{{1,32}}|({_ATOM}{{1,12}}\.){{1,4}}{_ATOM}{{1,12}})"
_EMAIL_LABEL: Final = "[a-zA-Z0-9]{1,20}(-[a-zA-Z0-9]{1,20}){0,2}"
_EMAIL: Final = rf"{_LOCAL}@({_EMAIL_LABEL}\.){{1,3}}[a-zA-Z]{{2,20}}"
PATTERNS: Final = {
    "email": _EMAIL,
    "name-email": _EMAIL,
    "ipv4network": _V4_NETWORK,
    "ipv6network": _V6_NETWORK,
    "ipv4interface": _V4_INTERFACE,
    "ipv6interface": _V6_INTERFACE,
    "ipvanynetwork": f"{_V4_NETWORK}|{_V6_NETWORK}",
    "ipvanyinterface": f"{_V4_INTERFACE}|{_V6_INTERFACE}",
}
"""Formats of pydantic's own that are read more strictly than others read them, or that nobody else knows."""
