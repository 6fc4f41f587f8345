"""The string formats of JSON Schema as regular expressions that match the whole string.

Each accepts only strings that its RFC accepts. Left out on purpose, because common parsers refuse them: leap seconds,
the year 0000, quoted local parts and address literals in e-mail addresses, and internationalised (`xn--`) labels.
"""

from __future__ import annotations

from graftlm.core.grammar.nodes.nodes import Node


class ContentFormat(str):
    """A format that no name says: strings whose text is one of `node`. Two are equal when their names are."""

    __slots__ = ("node",)
    node: Node

    def __new__(cls, name: str, node: Node) -> ContentFormat:
        found = super().__new__(cls, name)
        found.node = node
        return found


def _date() -> str:
    leap = "(?:0[48]|[2468][048]|[13579][26])"
    year = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
    long_month = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    short_month = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    february = "02-(?:0[1-9]|1[0-9]|2[0-8])"
    leap_day = f"(?:[0-9]{{2}}{leap}|{leap}00)-02-29"
    return f"(?:{year}-(?:{long_month}|{short_month}|{february})|{leap_day})"


def _label(letters: str = "a-zA-Z", longest: int = 63) -> str:
    """A host label of at most `longest` characters that does not begin with `xn--`."""
    word = f"[{letters}0-9]"

    def tail(length: int) -> str:
        return f"(?:[{letters}0-9-]{{0,{length - 1}}}{word})?"

    after_n = f"(?:{word}{tail(longest - 3)}|-{word}{tail(longest - 4)})?"
    after_x = f"(?:[a-mo-zA-MO-Z0-9]{tail(longest - 2)}|-[{letters}0-9-]{{0,{longest - 3}}}{word}|[nN]{after_n})?"
    return f"(?:[a-wyzA-WYZ0-9]{tail(longest - 1)}|[xX]{after_x})"


def _hostname() -> str:
    # 253 characters in all: ten labels of 24, or four of 63, 63, 63 and 61
    many, few, last = _label(longest=24), _label(), _label(longest=61)
    return f"(?:{many}(?:\\.{many}){{0,9}}|{few}(?:\\.{few}){{0,2}}|{few}(?:\\.{few}){{2}}\\.{last})"


OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = f"(?:{OCTET}\\.){{3}}{OCTET}"


def _ipv6() -> str:
    group = "[0-9a-fA-F]{1,4}"
    last_two = f"(?:{group}:{group}|{IPV4})"
    ways = [f"(?:{group}:){{6}}{last_two}"]
    for before in range(8):  # groups before the "::"
        head = f"(?:{group}(?::{group}){{0,{before - 1}}})?" if before else ""
        after = 7 - before  # groups that may follow it: seven in all at most
        if after >= 2:
            ways.append(f"{head}::(?:{group}:){{{after - 2}}}{last_two}")
        elif after == 1:
            ways.append(f"{head}::{group}")
        else:
            ways.append(f"{head}::")
    return "(?:" + "|".join(ways) + ")"


def _uuid(version: str = "[0-9a-fA-F]", variant: str = "[0-9a-fA-F]") -> str:
    x = "[0-9a-fA-F]"
    return f"{x}{{8}}-{x}{{4}}-{version}{x}{{3}}-{variant}{x}{{3}}-{x}{{12}}"


UNRESERVED = "a-zA-Z0-9\\-._~"
SUB_DELIMS = "!$&'()*+,;="
ESCAPED = "%[0-9a-fA-F]{2}"


def _authority() -> str:
    user = f"(?:(?:[{UNRESERVED}{SUB_DELIMS}:]|{ESCAPED})*@)?"
    future = f"[vV][0-9a-fA-F]+\\.[{UNRESERVED}{SUB_DELIMS}:]+"
    host = f"(?:\\[(?:{_ipv6()}|{future})\\]|(?:[{UNRESERVED}{SUB_DELIMS}]|{ESCAPED})*)"
    return f"{user}{host}(?::[0-9]*)?"


PCHAR = f"(?:[{UNRESERVED}{SUB_DELIMS}:@]|{ESCAPED})"
TAIL = f"(?:\\?(?:{PCHAR}|[/?])*)?(?:#(?:{PCHAR}|[/?])*)?"
ABSOLUTE_PATH = f"/(?:{PCHAR}+(?:/{PCHAR}*)*)?"


def _uri() -> str:
    path = f"(?://{_authority()}(?:/{PCHAR}*)*|{ABSOLUTE_PATH}|{PCHAR}+(?:/{PCHAR}*)*)?"
    return f"[a-zA-Z][a-zA-Z0-9+.\\-]*:{path}{TAIL}"


def _uri_reference() -> str:
    first = f"(?:[{UNRESERVED}{SUB_DELIMS}@]|{ESCAPED})+"
    relative = f"(?://{_authority()}(?:/{PCHAR}*)*|{ABSOLUTE_PATH}|{first}(?:/{PCHAR}*)*)?{TAIL}"
    return f"(?:{_uri()}|{relative})"


def _duration() -> str:
    number = "[0-9]+"
    time = f"T(?:{number}H(?:{number}M(?:{number}S)?)?|{number}M(?:{number}S)?|{number}S)"
    days = f"{number}D"
    date = f"(?:{number}Y(?:{number}M(?:{days})?)?|{number}M(?:{days})?|{days})"
    return f"P(?:{date}(?:{time})?|{time}|{number}W)"


_UCS = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
_IDN = "a-z0-9\u00df-\u00f6\u00f8-\u00ff\u03b1-\u03c9\u0430-\u044f\u4e00-\u9fa5\uac00-\ud7a3"
_IDN_LABEL = f"(?:{_label()}|[{_IDN}]{{1,14}})"  # so that its ASCII form keeps to 63 characters


def _regex() -> str:
    """Regular expressions of plain characters, escapes, classes, anchors and two levels of groups."""
    char = "[^\\\\^$.|?*+()\\[\\]{}\\x00-\\x1f]"
    escape = "\\\\[dDwWsStnr^$.|?*+()\\[\\]{}/\\\\]"
    in_class = f"(?:[^\\\\\\[\\]&~|^\\-\\x00-\\x1f]|{escape}|a-z|A-Z|0-9)"
    atom = f"(?:{char}|{escape}|[.]|\\[\\^?{in_class}+\\])"
    for _ in range(3):
        piece = f"{atom}(?:[*+?]|\\{{[1-9](?:,[1-9][0-9]{{1,2}})?\\}})?"
        branch = f"\\^?(?:{piece})*\\$?"
        whole = f"{branch}(?:\\|{branch})*"
        atom = f"(?:{atom}|\\((?:\\?:)?{whole}\\))"
    return whole


def _uri_template() -> str:
    literal = f"(?:[!#$&()*+,\\-./0-9:;=?@A-Z\\[\\]_a-z~{_UCS}]|{ESCAPED})"
    name = "[a-zA-Z0-9_]+(?:\\.[a-zA-Z0-9_]+)*(?:\\*|:[1-9][0-9]?)?"
    return f"(?:{literal}|\\{{[+#./;?&]?{name}(?:,{name})*\\}})*"


_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[zZ]|[+\\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~\\-]+"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

FORMATS: dict[str, str] = {
    "date": _date(),
    "time": _TIME,
    "date-time": f"{_date()}[tT]{_TIME}",
    "duration": _duration(),
    "email": f"{_ATOM}(?:\\.{_ATOM})*@{_label()}(?:\\.{_label()})*",
    "hostname": _hostname(),
    "ipv4": IPV4,
    "ipv6": _ipv6(),
    "ipvanyaddress": f"(?:{IPV4}|{_ipv6()})",
    "uuid": _uuid(),
    **{f"uuid{version}": _uuid(str(version), "[89abAB]") for version in (1, 3, 4, 5, 6, 7, 8)},
    "uri": _uri(),
    "uri-reference": _uri_reference(),
    "iri": _uri().replace(UNRESERVED, UNRESERVED + _UCS),
    "iri-reference": _uri_reference().replace(UNRESERVED, UNRESERVED + _UCS),
    "uri-template": _uri_template(),
    "idn-email": f"[{_ATOM[1:-2]}{_UCS}]+(?:\\.[{_ATOM[1:-2]}{_UCS}]+)*@{_IDN_LABEL}(?:\\.{_IDN_LABEL})*",
    "idn-hostname": f"{_IDN_LABEL}(?:\\.{_IDN_LABEL}){{0,2}}",
    "regex": _regex(),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9]+0?)(?:#|{_POINTER})",
    "base64": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "base64url": "(?:[A-Za-z0-9_\\-]{4})*(?:[A-Za-z0-9_\\-]{2}(?:==)?|[A-Za-z0-9_\\-]{3}=?)?",
    "base16": "(?:[A-F0-9]{2})*",
}
"""Format name to a pattern for the whole string."""

ALIASES = {"url": "uri", "host-name": "hostname", "ip-address": "ipv4"}
"""Other names of formats, of earlier drafts or in common use."""

UNKEPT = ("color",)
"""Formats that some validators check and no grammar here keeps. Other unknown names are annotations."""

WIDE_FORMATS: dict[str, str] = {
    "date": "(?s:.{4,}-.*|[0-9]{7,})",
    "time": "(?s:.*:.*)",
    "date-time": "(?s:.*[0-9].*)",
    "duration": "(?s:[Pp+-].*)",
    "email": "(?s:.*@.*)",
    "ipv4": "(?s:[0-9].*)",
    "ipv6": "(?s:.*:.*)",
    "uuid": "(?s:.*[0-9a-fA-F].{8,})",
    "uri": "(?s:.*:.*)",
    "json-pointer": "(?s:/.*)?",
}
"""Format name to a pattern that covers whatever some reader takes for the format; any text where none is given."""

CONTENT_ENCODINGS = ("base64", "base64url", "base16")
"""Formats that `contentEncoding` names."""

ANNOTATIONS = frozenset(
    {"password", "binary", "byte", "path", "file-path", "directory-path", "float", "double", "decimal", "json-string"}
)
"""Formats that say how a value is used and restrict no text."""

INTEGER_RANGES: dict[str, tuple[int, int]] = {
    **{f"int{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
"""Formats of OpenAPI that bound an integer."""
