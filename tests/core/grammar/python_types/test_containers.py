"""Names of dicts, items of sets, tagged unions and aliases."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import fractions
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    RootModel,
    Tag,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import Grammar, JsonSchema
from tests.core.grammar.python_types.sampling import admits, assert_read, texts_of, vocabulary


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Day(enum.Enum):
    FIRST = datetime.date(2020, 1, 1)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "wolf"] = "dog"
    loud: bool


class Black(BaseModel):
    kind: Literal["cat"] = "cat"
    color: Literal["black"] = "black"


class White(BaseModel):
    kind: Literal["cat"] = "cat"
    color: Literal["white"] = "white"


class Pet(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")


class AliasedCat(BaseModel):
    kind: Literal["cat"] = Field("cat", alias="Kind")


class AliasedDog(BaseModel):
    kind: Literal["dog"] = Field("dog", alias="Kind")


@dataclasses.dataclass
class Plain:
    kind: Literal["plain"] = "plain"
    size: int = 0


class Typed(TypedDict, total=False):
    kind: Literal["typed"]
    size: int


class One(BaseModel):
    kind: Literal[1] = 1


class Two(BaseModel):
    kind: Literal[2] = 2


class Boxed(RootModel[Cat]):
    pass


Nested = Annotated[Annotated[Black | White, Field(discriminator="color")] | Dog, Field(discriminator="kind")]


class Tree(BaseModel):
    kind: Literal["tree"] = "tree"
    parts: list[Annotated[Tree | Cat, Field(discriminator="kind")]] = []


@pytest.mark.parametrize(
    "kind",
    [
        Pet,
        Nested,
        list[Annotated[Cat | Dog, Field(discriminator="kind")]],
        Annotated[AliasedCat | AliasedDog, Field(discriminator="kind")],
        Annotated[Plain | Typed, Field(discriminator="kind")],
        Annotated[One | Two, Field(discriminator="kind")],
        Annotated[Boxed | Dog, Field(discriminator="kind")],
        Tree,
    ],
)
def test_a_choice_without_its_tag_used_to_be_admitted(kind: Any) -> None:
    assert_read(kind, 40)


def test_a_pet_without_a_kind_used_to_be_admitted_and_a_cat_alone_may_leave_it_out() -> None:
    assert not admits(Pet, {"pet": {"lives": 3}}) and admits(Pet, {"pet": {"kind": "cat", "lives": 3}})
    assert admits(Cat, {"lives": 3})


def by_size(value: Any) -> str:
    return "one" if "size" in value else "two"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Annotated[Annotated[One, Tag("one")] | Annotated[Two, Tag("two")], Discriminator(by_size)], "by_size finds"),
        (dict[Literal[1, 2], int], "no name of a member"),
        (dict[tuple[int, int], int], "no name of a member"),
        (dict[None, int], "no name of a member"),
        (dict[Day, int], "no name of a member"),
        (dict[Json, int], "no name of a member"),
        (dict[Annotated[int, Field(multiple_of=5)], int], "multiples of 5"),
        (Day, "no JSON value is read"),
        (Literal[b"x"], "no JSON value is read"),
        (set[list[int]], "hashable"),
        (set[Cat], "hashable"),
        (Annotated[set[uuid.UUID], Field(min_length=2)], "several texts are the same item"),
        (Annotated[set[bool | int], Field(min_length=2)], "several texts are the same item"),
        (type[int], "no JSON value is read as a class"),
    ],
)
def test_values_that_pydantic_cannot_read_used_to_be_admitted(kind: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        texts_of(dict[str, kind], 1)


@pytest.mark.parametrize(
    "key",
    [
        int | Literal["a"],
        int | float,
        int | bool,
        Color,
        Size,
        Literal["a", 1],
        Literal["a"] | None,
        datetime.date | None,
        datetime.timedelta,
        uuid.UUID,
        fractions.Fraction,
        ByteSize,
        Annotated[float, Field(gt=0, lt=1)],
        Annotated[Decimal, Field(ge=1, le=3)],
        Annotated[float, Field(ge=-2.5)],
    ],
)
def test_any_name_used_to_be_admitted_as_a_key(key: Any) -> None:
    assert_read(dict[key, int])


@pytest.mark.parametrize("kind", [collections.OrderedDict[int, int], collections.Counter[int], set[Any]], ids=str)
def test_other_containers_used_to_admit_any_name_or_item(kind: Any) -> None:
    assert_read(kind)


def test_names_that_are_read_stay_possible() -> None:
    assert admits(dict[int | Literal["a"], int], {"a": 1, "-12": 2}) and not admits(dict[int, int], {"-0": 1})
    assert admits(dict[Color, int], {"red": 1}) and admits(dict[Annotated[float, Field(gt=0, lt=1)], int], {"0.25": 1})


class Path(BaseModel):
    x: int = Field(validation_alias=AliasPath("a", "b"))


class Choices(BaseModel):
    x: int = Field(validation_alias=AliasChoices(AliasPath("a", "b"), "c"))


class Single(BaseModel):
    x: int = Field(validation_alias=AliasPath("a"))


def test_a_path_as_alias_used_to_admit_the_name_of_the_field() -> None:
    with pytest.raises(GrammarError, match=r"path \['a', 'b'\]") as caught:
        texts_of(Path, 1)
    assert caught.value.pointer == "/properties/x"
    assert admits(Choices, {"c": 1}) and admits(Single, {"a": 1})
    assert_read(Choices), assert_read(Single)


def test_what_is_refused_is_dropped_with_a_warning_on_demand() -> None:
    grammar = Grammar.compile(JsonSchema(Path), vocabulary(), on_unsupported="warn")
    assert [issue.pointer for issue in grammar.warnings] == ["/properties/x"]


def test_a_field_without_init_used_to_be_admitted() -> None:
    @pydantic_dataclass(config=ConfigDict(extra="forbid"))
    class Counter:
        start: int
        step: int = Field(init=False, default=3)

    assert_read(Counter)


@pytest.mark.parametrize("kind", [ByteSize, Annotated[ByteSize, Field(gt=5)]], ids=str)
def test_sizes_used_to_have_any_unit(kind: Any) -> None:
    assert_read(kind, 60)


def test_sizes_with_units_stay_possible() -> None:
    assert all(admits(ByteSize, value) for value in (12, "12", "1.5 GiB", "3kb", "10 MB"))
