"""Strings, Base64 and URLs: pydantic changes or decodes them before it checks them."""

from __future__ import annotations

import base64
import re
from typing import Annotated, Any

import pytest
from pydantic import (
    AfterValidator,
    AnyUrl,
    Base64Bytes,
    Base64Str,
    Base64UrlStr,
    BaseModel,
    ByteSize,
    ConfigDict,
    EncodedStr,
    EncoderProtocol,
    Field,
    HttpUrl,
    SecretBytes,
    SecretStr,
    StringConstraints,
    TypeAdapter,
    UrlConstraints,
    constr,
)

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.python_types.texts import base64_pattern
from tests.core.grammar.python_types.sampling import admits, assert_read, texts_of


class Stripped(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True, str_min_length=1)
    name: str
    notes: dict[str, str]


STRINGS: list[Any] = [
    constr(strip_whitespace=True, min_length=1),
    Annotated[str, StringConstraints(strip_whitespace=True, pattern="^a b+$")],
    Annotated[str, StringConstraints(strip_whitespace=True, max_length=2)],
    Annotated[str, StringConstraints(to_lower=True, pattern="^[A-Z]+$")],
    Annotated[str, StringConstraints(strip_whitespace=True, to_upper=True, min_length=2, pattern="^[a-z ]+$")],
    Annotated[str | None, StringConstraints(strip_whitespace=True, min_length=2)],
    Annotated[str, AfterValidator(lambda text: text), StringConstraints(strip_whitespace=True, min_length=2)],
    Annotated[str, AfterValidator(lambda text: text), StringConstraints(to_lower=True, pattern="^[a-z]+$")],
    TypeAdapter(list[str], config=ConfigDict(str_strip_whitespace=True, str_min_length=2)),
    Stripped,
]


@pytest.mark.parametrize("kind", STRINGS, ids=lambda kind: re.sub(" at 0x[0-9a-f]+", "", str(kind)))
def test_what_is_left_after_stripping_used_to_be_too_short(kind: Any) -> None:
    assert_read(kind, 40)


def test_a_blank_used_to_pass_for_a_name_and_blanks_inside_stay() -> None:
    kind = constr(strip_whitespace=True, min_length=1)
    assert not admits(kind, " ") and not admits(kind, "\u2003") and not admits(kind, "")
    assert admits(kind, "a") and admits(kind, "a b")


class Configured(BaseModel):
    model_config = ConfigDict(str_min_length=2, str_max_length=4)
    name: Annotated[str, Field(min_length=1)]
    secret: SecretStr
    size: ByteSize


def test_lengths_of_the_configuration_used_to_be_dropped_for_secrets_and_sizes() -> None:
    assert_read(Configured, 40)


@pytest.mark.parametrize("pattern", [r"^\W$", r"^[^\w]+$", r"^\D$", r"^\S$", r"^[^\s]$", r"^a\b", r"^[\S]+$"])
def test_negated_classes_used_to_admit_letters_that_rust_counts_in(pattern: str) -> None:
    assert_read(Annotated[str, Field(pattern=pattern)], 60)


@pytest.mark.parametrize(
    "pattern", ["^[[:alpha:]]$", "^[a&&b]$", "^[a-c--b]$", re.compile("^a b$", re.VERBOSE)], ids=str
)
def test_classes_of_rust_and_verbose_patterns_used_to_be_read_as_other_patterns(pattern: Any) -> None:
    with pytest.raises(GrammarError, match="pattern"):
        texts_of(Annotated[str, Field(pattern=pattern)], 1)


def test_a_compiled_pattern_keeps_its_case_flag() -> None:
    kind = Annotated[str, Field(pattern=re.compile("^[^a]$", re.IGNORECASE))]
    assert not admits(kind, "A") and admits(kind, "b")


class Rot(EncoderProtocol):
    @classmethod
    def decode(cls, data: bytes) -> bytes:
        return data

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def get_json_format(cls) -> str:
        return "base64"


@pytest.mark.parametrize(
    "kind",
    [
        Base64Str,
        Base64UrlStr,
        Annotated[Base64Str, Field(min_length=2)],
        Annotated[Base64Bytes, Field(min_length=2, max_length=3)],
        dict[Base64Str, int],
    ],
)
def test_base64_used_to_decode_to_broken_text_or_to_the_wrong_length(kind: Any) -> None:
    assert_read(kind)


def test_base64_of_the_length_and_of_ascii_is_matched_and_nothing_else() -> None:
    pattern, ascii_only = re.compile(base64_pattern("+/", 2, 4)), re.compile(base64_pattern("+/", ascii_only=True))
    for data in (b"", b"a", b"ab", b"abc", b"abcd", b"abcde", b"\xff\xfe", b"a\x80", b"~~\x7f", b"ab\xc3\xa9"):
        text = base64.b64encode(data).decode()
        assert bool(pattern.fullmatch(text)) == (2 <= len(data) <= 4)
        assert bool(ascii_only.fullmatch(text)) == data.isascii()


def test_an_encoder_of_the_user_used_to_count_as_base64() -> None:
    with pytest.raises(GrammarError, match="texts of Rot cannot be kept"):
        texts_of(Annotated[str, EncodedStr(encoder=Rot)], 1)


@pytest.mark.parametrize(
    "kind",
    [
        Annotated[SecretBytes, Field(max_length=3)],
        Annotated[SecretStr, Field(min_length=3)],
        Annotated[AnyUrl, UrlConstraints(host_required=True)],
        Annotated[AnyUrl, UrlConstraints(default_host="example.org", default_port=3)],
        Annotated[HttpUrl, UrlConstraints(max_length=14)],
    ],
)
def test_lengths_of_secrets_and_hosts_of_urls_used_to_be_dropped(kind: Any) -> None:
    assert_read(kind)


def test_a_constraint_that_pydantic_cannot_apply_to_a_secret_is_refused() -> None:
    with pytest.raises(GrammarError, match="pattern='a' cannot be kept"):
        texts_of(Annotated[SecretStr, StringConstraints(pattern="a")], 1)
