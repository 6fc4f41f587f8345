"""Constraints behind a validator, and in the steps of a chain."""

from __future__ import annotations

import pathlib
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal

import pytest
from pydantic import (
    AfterValidator,
    BeforeValidator,
    DirectoryPath,
    Field,
    FilePath,
    ImportString,
    Json,
    NewPath,
    PaymentCardNumber,
    Secret,
    WrapValidator,
)

from graftlm.core.errors import GrammarError
from tests.core.grammar.python_types.sampling import admits, assert_read, texts_of


def unchanged(value: Any) -> Any:
    return value


AFTER, BEFORE = AfterValidator(unchanged), BeforeValidator(unchanged)
WRAP = WrapValidator(lambda value, handler: handler(value))


@pytest.mark.parametrize("validator", [AFTER, BEFORE, WRAP], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    ("kind", "constraints"),
    [
        (int, {"gt": 3}),
        (int, {"ge": 3, "lt": 7}),
        (int, {"multiple_of": 3}),
        (float | None, {"gt": 3}),
        (Decimal, {"le": 3}),
        (Decimal, {"max_digits": 3}),
        (Decimal, {"decimal_places": 1}),
        (list[int], {"min_length": 2}),
        (dict[str, int], {"min_length": 2}),
        (bytes, {"min_length": 2, "max_length": 3}),
        (Json[list[int]], {"min_length": 2}),
        (str, {"pattern": "^ab*$"}),
        (int | str, {"gt": 3}),
        (int | str, {"min_length": 2}),
        (Literal[1, 2, 3], {"gt": 1}),
    ],
)
def test_constraints_behind_a_validator_used_to_be_dropped(validator: Any, kind: Any, constraints: Any) -> None:
    assert_read(Annotated[kind, validator, Field(**constraints)])


@pytest.mark.parametrize(
    "kind",
    [
        Annotated[Decimal, Field(ge=Decimal("1.00000000000000000001"))],
        Annotated[Fraction, Field(gt=1)],
        Fraction,
        Annotated[Decimal, Field(gt=Decimal("1e30"))],
    ],
)
def test_bounds_between_two_floats_used_to_be_rounded_outwards(kind: Any) -> None:
    assert_read(kind)


def test_infinite_bounds_used_to_be_dropped() -> None:
    with pytest.raises(GrammarError, match="nothing can satisfy"):
        texts_of(Annotated[float, Field(ge=float("inf"))], 1)
    assert admits(Annotated[float, Field(gt=float("-inf"))], -1.5)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FilePath, "path of a file"),
        (DirectoryPath, "path of a folder"),
        (NewPath, "path of a new file"),
        (ImportString, "import depends"),
        (PaymentCardNumber, "check digit"),
        (Annotated[Secret[int], Field(gt=3)], "gt=3 cannot be kept"),
        (Annotated[Decimal | int, Field(max_digits=2)], "max_digits=2 cannot be kept"),
        (Annotated[pathlib.Path, Field(min_length=3)], "min_length=3 cannot be kept"),
    ],
)
def test_what_depends_on_the_machine_or_on_arithmetic_used_to_admit_anything(kind: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        texts_of(dict[str, kind], 1)
    assert caught.value.pointer == "/additionalProperties"
