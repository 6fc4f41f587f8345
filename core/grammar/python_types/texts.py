"""Strings, bytes, Base64 and URLs."""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic import Base64Encoder
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic.types import Base64UrlEncoder, EncodedBytes, EncodedStr

from graftlm.core.grammar.python_types.networks import CHARS, HOST, REST
from graftlm.core.grammar.python_types.refusals import refused

_BLANK: Final = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
"""White space to Rust and to Python."""
_STRIPPED: Final = f"^([^{_BLANK}]([\\s\\S]*[^{_BLANK}])?)?$"
_ASCII: Final = "^[\\x00-\\x7f]*$"
_NO_ODD_BLANK: Final = "^[^\\x1c-\\x1f\\x85]*$"
_BASE64URL: Final = "([a-zA-Z0-9_-]{4})*([a-zA-Z0-9_-][AQgw]==|[a-zA-Z0-9_-]{2}[AEIMQUYcgkosw048]=)?"
_ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def str_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    """Return the schema of strings whose text pydantic keeps within the constraints after it has changed it."""
    config: Any = generator._config
    described = GenerateJsonSchema.str_schema(generator, schema)
    more: list[JsonSchemaValue] = []
    patterns = [pattern for pattern in (schema.get("pattern"), *schema.get("patterns", ())) if pattern is not None]
    described.pop("pattern", None)
    described |= configured_lengths(config, described)
    engine = schema.get("regex_engine") or config.regex_engine
    for pattern in patterns:
        text, beside = _of_dialect(pattern, engine)
        if text is None:
            return refused(described, f"pattern {getattr(pattern, 'pattern', pattern)!r}: {beside}")
        more += [{"pattern": text}, *({"pattern": other} for other in beside.split("\n") if other)]
    strip = schema.get("strip_whitespace", config.str_strip_whitespace)
    if strip and (more or described.get("minLength")):
        more.append({"pattern": _STRIPPED})
    if schema.get("ascii_only"):
        more.append({"pattern": _ASCII})
    if schema.get("cased"):  # a constraint on the text after its case was changed
        more.append(
            {"pattern": "^[^A-Z\\x80-\\U0010ffff]*$" if schema["cased"] == "lower" else "^[^a-z\\x80-\\U0010ffff]*$"}
        )
    if more and set(more[0]) == {"pattern"}:
        described["pattern"] = more.pop(0)["pattern"]
    return {**described, "allOf": more} if more else described


def configured_lengths(config: Any, described: JsonSchemaValue) -> JsonSchemaValue:
    """Return the lengths of `described` with those of the configuration, which pydantic applies to every string."""
    found: JsonSchemaValue = {}
    if least := max(config.str_min_length, described.get("minLength", 0)):
        found["minLength"] = least
    most = [length for length in (config.str_max_length, described.get("maxLength")) if length is not None]
    return {**found, "maxLength": min(most)} if most else found


def _of_dialect(pattern: Any, engine: str) -> tuple[str | None, str]:
    """Return a pattern for ECMA 262's meaning of `pattern`, and patterns beside it; or None and a reason.

    Classes in Rust and Python take all of Unicode in. Where a pattern excludes such a class, the string is ASCII.
    """
    flags = ""
    if isinstance(pattern, re.Pattern):
        if pattern.flags & re.VERBOSE:
            return None, "the flag VERBOSE cannot be kept; write the pattern without it"
        flags = "(?i)" if pattern.flags & re.IGNORECASE else ""
        pattern, engine = pattern.pattern, "python-re"
    beside: list[str] = []
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*\]", pattern, re.DOTALL):
        if part[0] == "\\":
            if part[1] in "WDbB":
                beside.append(_ASCII)
            elif part[1] == "S":
                beside.append(_NO_ODD_BLANK)
            continue
        inner = part[1:-1]
        if engine != "python-re" and re.search(r"(?<!\\)\[|&&|--|~~", inner.removeprefix("^").removeprefix("]")):
            return None, f"the class {part} has nested classes or set operations; write its characters"
        if "\\W" in inner or "\\D" in inner or (inner[0] == "^" and re.search(r"\\[wd]", inner)):
            beside.append(_ASCII)
        if "\\S" in inner or (inner[0] == "^" and "\\s" in inner):
            beside.append(_NO_ODD_BLANK)
    return flags + pattern, "\n".join(dict.fromkeys(beside))


def bytes_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    described = GenerateJsonSchema.bytes_schema(generator, schema)
    match generator._config.val_json_bytes:
        case "hex":
            lengths: JsonSchemaValue = {
                name: 2 * described[name] for name in ("minLength", "maxLength") if name in described
            }
            return {**described, **lengths, "pattern": "^([0-9a-fA-F]{2})*$"}
        case "base64":
            if "minLength" in described or "maxLength" in described:
                return {
                    **{name: value for name, value in described.items() if name not in ("minLength", "maxLength")},
                    "pattern": f"^({base64_pattern('-_', schema.get('min_length'), schema.get('max_length'))})$",
                }
            return {**described, "pattern": f"^({_BASE64URL}|{_BASE64URL.replace('=', '')})$"}
    if "maxLength" not in described:
        return described
    return {**described, "anyOf": [{"pattern": _ASCII}, {"maxLength": described["maxLength"] // 4}]}  # of 4 bytes each


def encoded_schema(generator: Any, encoding: EncodedBytes | EncodedStr, schema: Any) -> JsonSchemaValue:
    """Return the schema of Base64 that decodes to as many bytes, or characters of ASCII, as the schema admits."""
    config = generator._config
    text = isinstance(encoding, EncodedStr)
    marks = {Base64Encoder: "+/", Base64UrlEncoder: "-_"}.get(encoding.encoder)
    if marks is None:
        reason = f"texts of {encoding.encoder.__name__} cannot be kept; use Base64Bytes, or a str"
        return refused({"type": "string"}, reason)
    if config.str_to_lower or config.str_to_upper if text else config.val_json_bytes != "utf8":
        return refused({"type": "string"}, "Base64 that the configuration changes first cannot be kept; use a str")
    pattern = base64_pattern(marks, schema.get("min_length"), schema.get("max_length"), ascii_only=text)
    read = generator.generate_inner(schema["schema"])
    lengths = {name: read[name] for name in ("minLength", "maxLength") if name in read}
    return {"type": "string", **lengths, "pattern": f"^({pattern})$"}


def base64_pattern(marks: str, low: int | None = None, high: int | None = None, *, ascii_only: bool = False) -> str:
    """Return a pattern of Base64, with padding, that decodes to `low` to `high` bytes.

    marks       the characters for 62 and 63
    ascii_only  decode to ASCII only
    """
    letters = _ALPHABET + marks

    def those(mask: int) -> str:
        return "[" + "".join(re.escape(letters[i]) for i in range(64) if not i & mask) + "]"

    # the highest bit of each byte is 0 in ASCII; the bits behind the last byte are 0
    first, second, third, fourth = map(those, (32, 8, 2, 0) if ascii_only else (0, 0, 0, 0))
    tails = ("", f"{first}{those(15)}==", f"{first}{second}{those(3 | (2 if ascii_only else 0))}=")
    least, ways = low or 0, []
    for size, tail in enumerate(tails):
        fewest = max(0, -(-(least - size) // 3))
        most = None if high is None else (high - size) // 3
        if most is None or fewest <= most:
            count = f"{{{fewest},{'' if most is None else most}}}"
            ways.append(f"({first}{second}{third}{fourth}){count}{tail}")
    return "|".join(ways) or "[^\\s\\S]"


def url_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    return _with_scheme(schema, GenerateJsonSchema.url_schema(generator, schema))


def multi_host_url_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    return _with_scheme(schema, GenerateJsonSchema.multi_host_url_schema(generator, schema))


def _with_scheme(schema: Any, described: JsonSchemaValue) -> JsonSchemaValue:
    """Return the URLs of the allowed schemes, with a host except for files; any URL where none are named."""
    schemes = schema.get("allowed_schemes")
    wants = any(schema.get(name) is not None for name in ("default_host", "default_port", "default_path"))
    if not schemes and not schema.get("host_required") and not wants:
        return described
    del described["format"]
    scheme = "|".join(map(re.escape, schemes)) if schemes else "https?|ftp|wss?|[a-z]{3,12}[+]tcp"
    place = f"/{CHARS}" if schemes == ["file"] else f"{HOST}{REST}"
    return {**described, "pattern": f"^({scheme})://{place}$"}
