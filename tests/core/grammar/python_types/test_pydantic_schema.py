"""Pydantic reads every text that the schema of a Python type admits."""

from __future__ import annotations

import datetime
import ipaddress
import re
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import (
    UUID4,
    AfterValidator,
    Base64UrlBytes,
    BaseModel,
    ConfigDict,
    Field,
    FileUrl,
    HttpUrl,
    IPvAnyAddress,
    IPvAnyInterface,
    IPvAnyNetwork,
    MongoDsn,
    NaiveDatetime,
    PositiveInt,
    PostgresDsn,
    WebsocketUrl,
    WithJsonSchema,
)

from tests.core.grammar.python_types.sampling import admits, assert_read

DAY = datetime.date(2020, 2, 28)


class Hexadecimal(BaseModel):
    model_config = ConfigDict(val_json_bytes="hex")
    data: Annotated[bytes, Field(min_length=2, max_length=3)]


class Encoded(BaseModel):
    model_config = ConfigDict(val_json_bytes="base64")
    data: bytes


def address(text: str) -> str:
    """What `EmailStr` wants, which needs a package of its own."""
    local, _, domain = text.rpartition("@")
    assert len(local) <= 64 and len(domain) <= 253 and "." in domain
    assert all(len(label) <= 63 for label in domain.split(".")) and domain.rpartition(".")[2].isalpha()
    return text


Email = Annotated[str, AfterValidator(address), WithJsonSchema({"type": "string", "format": "email"})]


def name_of(value: Any) -> str:
    """An id that is the same in every process, as an address in memory is not."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


TYPES: list[Any] = [
    dict[int, str],
    dict[float, bool],
    dict[bool, int],
    dict[str, dict[int, int]],
    dict[datetime.date, int],
    datetime.timedelta,
    list[datetime.timedelta],
    complex,
    Decimal,
    Annotated[Decimal, Field(max_digits=6, decimal_places=2)],
    Annotated[Decimal, Field(max_digits=3)],
    Annotated[Decimal, Field(max_digits=2, decimal_places=2)],
    Annotated[Decimal, Field(gt=0, lt=1, decimal_places=3)],
    Annotated[Decimal, Field(multiple_of=Decimal("0.05"), max_digits=4, decimal_places=2)],
    HttpUrl,
    WebsocketUrl,
    FileUrl,
    PostgresDsn,
    MongoDsn,
    UUID4,
    IPvAnyAddress,
    dict[Annotated[int, Field(ge=-3, lt=20)], int],
    dict[PositiveInt, bool],
    dict[int | None, bool],
    dict[Decimal, bool],
    Annotated[datetime.date, Field(gt=DAY, le=datetime.date(2021, 3, 1))],
    Annotated[datetime.date, Field(ge=datetime.date(2031, 12, 31))],
    Annotated[datetime.date, Field(gt=datetime.date.min, lt=datetime.date(2, 1, 1))],
    NaiveDatetime,
    Annotated[datetime.timedelta, Field(gt=datetime.timedelta(0))],
    Annotated[datetime.timedelta, Field(ge=datetime.timedelta(0))],
    Annotated[Decimal, Field(max_digits=20)],
    Annotated[Decimal, Field(max_digits=30, decimal_places=2)],
    Annotated[bytes, Field(max_length=6)],
    Hexadecimal,
    Encoded,
    Base64UrlBytes,
    Email,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
    ipaddress.IPv4Interface,
    ipaddress.IPv6Interface,
    IPvAnyNetwork,
    IPvAnyInterface,
]


@pytest.mark.parametrize("kind", TYPES, ids=name_of)
def test_any_text_of_the_schema_is_a_value_of_the_type(kind: Any) -> None:
    assert_read(kind)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (dict[int, str], {"-12": "a", "0": ""}),
        (dict[float, bool], {"1.5": True}),
        (dict[bool, int], {"true": 1}),
        (datetime.timedelta, "P3DT4H5M6S"),
        (datetime.timedelta, "-PT90M"),
        (complex, "1.5-2j"),
        (Decimal, -12.5),
        (Annotated[Decimal, Field(max_digits=6, decimal_places=2)], 9999.99),
        (Annotated[Decimal, Field(max_digits=3)], 0.25),
        (Annotated[Decimal, Field(max_digits=3)], 999),
        (HttpUrl, "https://www.example.org:8080/a-b/c?d=1#e"),
        (HttpUrl, "http://localhost"),
        (FileUrl, "file:///etc/hosts"),
        (MongoDsn, "mongodb+srv://db.example.org/test"),
        (UUID4, "0190163d-8694-4d2f-8d3c-0d7d1a5e2f10"),
        (IPvAnyAddress, "10.0.0.1"),
        (IPvAnyAddress, "::1"),
        (dict[PositiveInt, bool], {"1": True, "20": False}),
        (dict[int | None, bool], {"-5": True}),
        (dict[Decimal, bool], {"0.5": True}),
        (Annotated[datetime.date, Field(gt=DAY)], "2020-02-29"),
        (NaiveDatetime, "2026-01-31T23:59:59.125"),
        (Annotated[datetime.timedelta, Field(ge=datetime.timedelta(0))], "PT0S"),
        (Annotated[datetime.timedelta, Field(gt=datetime.timedelta(0))], "PT5M"),
        (Annotated[Decimal, Field(max_digits=20)], 12.25),
        (Annotated[bytes, Field(max_length=6)], "abcdef"),
        (Annotated[bytes, Field(max_length=6)], "é"),
        (Encoded, {"data": "YQ"}),
        (Email, "first.last+tag@mail.ex-ample.co.uk"),
        (Annotated[str, WithJsonSchema({"type": "string", "format": "email"})], "root@localhost"),
        (Base64UrlBytes, "YQ=="),
        (ipaddress.IPv4Network, "10.1.128.0/17"),
        (ipaddress.IPv4Network, "0.0.0.0/0"),
        (ipaddress.IPv6Network, "2001:db8:0:ff00::/56"),
        (ipaddress.IPv6Network, "::/0"),
        (ipaddress.IPv6Interface, "fe80::1/64"),
    ],
    ids=name_of,
)
def test_ordinary_values_stay_possible(kind: Any, value: Any) -> None:
    assert admits(kind, value)
