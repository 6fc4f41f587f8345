"""Expressions that a program appends to a state: frozen values, validated on construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError
from graftlm.core.program.select import check_choices


class Expression:
    """A value that can be appended to a state; `+` joins expressions and texts."""

    def __add__(self, other: Expression | str) -> Expression:
        return Joined((*parts_of(self), *parts_of(as_expression(other))))

    def __radd__(self, other: str) -> Expression:
        return as_expression(other) + self


@dataclass(frozen=True)
class Text(Expression):
    """Constant text."""

    text: str


@dataclass(frozen=True)
class Part(Text):
    """Constant text that is independent of the parts beside it: a compiled program may change their order."""


@dataclass(frozen=True)
class Module(Expression):
    """Constant text that attends to itself alone, computed once for all prompts that it stands in."""

    name: str
    text: str


@dataclass(frozen=True)
class Joined(Expression):
    """Several expressions in sequence."""

    items: tuple[Expression, ...]


@dataclass(frozen=True)
class DataType:
    """The generation of a Python type's values: its regex, its stop strings, and the conversion of the output.

    any_length  the regex for `bounded_numbers=False`, if it differs.
    """

    type: type
    regex: str
    stop: tuple[str, ...]
    any_length: str = ""

    def read(self, text: str) -> Any:
        """Convert `text` to the type; raise ValueError or KeyError if it is not a value of the type."""
        if self.type is str:
            if len(text) < 2 or text[0] != '"' or text[-1] != '"':
                raise ValueError(text)
            return text[1:-1]
        if self.type is bool:
            return {"true": True, "false": False}[text.strip().lower()]
        return self.type(text)


_DIGITS = "|".join(["[0-9]{1,17}", *(rf"[0-9]{{{n}}}\.[0-9]{{1,{17 - n}}}" for n in range(1, 17))])
_ENDS = (" ", "\n", ",", ";", ")")
DATA_TYPES: Mapping[type, DataType] = {
    int: DataType(int, r"[-+]?[0-9]{1,18}[ \n,;).]?", (*_ENDS, "."), r"[-+]?[0-9]+[ \n,;).]?"),
    float: DataType(float, rf"[-+]?({_DIGITS})[ \n,;)]?", _ENDS, r"[-+]?[0-9]+(\.[0-9]+)?[ \n,;)]?"),
    bool: DataType(bool, r"True|False|true|false", ()),
    str: DataType(str, r'"[^"\n]*"', ()),
}


@dataclass(frozen=True)
class Gen(Expression):
    """A model call. The generated text is appended to the state and its value is stored in variable `name`."""

    name: str | None = None
    dtype: type | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the call's sampling parameters over the program's defaults, with the constraint of the data type."""
        options = {**defaults, **self.options}
        if self.dtype is not None and not _constrained(self.options):
            data_type = DATA_TYPES[self.dtype]
            options = {name: value for name, value in options.items() if name not in _CONSTRAINTS}
            stop = options.get("stop") or ()
            stop = (stop,) if isinstance(stop, str) else tuple(stop)
            regex = data_type.regex if options.get("bounded_numbers", True) else data_type.any_length or data_type.regex
            options |= {"regex": regex, "stop": stop + data_type.stop, "close_on_length": True}
        return SamplingParams.from_options(**options)

    def value(self, text: str) -> Any:
        """Convert an output to the variable's value; raise ValueError or KeyError if it has another type."""
        return text if self.dtype is None else DATA_TYPES[self.dtype].read(text)


@dataclass(frozen=True)
class Select(Expression):
    """A choice among texts. The chosen one is appended to the state and stored in variable `name`."""

    name: str | None
    choices: tuple[str, ...]
    method: str


@dataclass(frozen=True)
class Hold(Expression):
    """The KV of the text so far waits for `seconds`; None ends the wait."""

    seconds: float | None
    label: str = ""
    ends: bool = False


@dataclass(frozen=True)
class Image(Expression):
    """An image inside a user turn."""

    image: Any
    mm_processor_kwargs: Mapping[str, Any] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class Video(Expression):
    """`num_frames` evenly spaced frames of a video inside a user turn."""

    video: Any
    num_frames: int | None = None


@dataclass(frozen=True)
class RoleBegin(Expression):
    role: str


@dataclass(frozen=True)
class RoleEnd(Expression):
    role: str


@dataclass(frozen=True)
class ScopeBegin(Expression):
    name: str


@dataclass(frozen=True)
class ScopeEnd(Expression):
    name: str


_CONSTRAINTS = ("regex", "choices", "json_schema", "grammar", "constraint")


def gen(
    name: str | None = None,
    *,
    dtype: type | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    json_schema: Any = None,
    grammar: str | None = None,
    **sampling: Any,
) -> Gen:
    """Generate text here and store it in variable `name`.

    dtype     int, float, bool or str (one line in double quotes): constrains the text, and the variable holds a value
              of that type. With an explicit constraint it only converts the output.
    sampling  fields of SamplingParams; they override the program's. With n > 1 the variable is a list, and the state
              continues with the first text.
    Raises: ConfigError for an unknown keyword or a value out of range.
    """
    _check_name(name)
    if dtype is not None and dtype not in DATA_TYPES:
        raise ConfigError(f"dtype is {dtype!r}; use int, float, bool or str")
    given = {"regex": regex, "choices": choices, "json_schema": json_schema, "grammar": grammar}
    options = sampling | {key: value for key, value in given.items() if value is not None}
    if choices is not None and isinstance(choices, str):
        raise ConfigError(f"choices is {choices!r}; give a list of texts")
    SamplingParams.from_options(**options)
    return Gen(name, dtype, options)


def select(name: str | None, choices: Sequence[str], method: str = "token_length_normalized") -> Select:
    """Append the likeliest of `choices` and store it in variable `name`.

    method  "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized" or "exact"
    """
    _check_name(name)
    return Select(name, check_choices(choices, method), method)


def image(source: Any, *, mm_processor_kwargs: Mapping[str, Any] | None = None) -> Image:
    """Build an image (path, URL, bytes or image object) for a vision model.

    mm_processor_kwargs  options of the model's processor for it, such as {"max_pixels": 200704}
    """
    return Image(source, mm_processor_kwargs)


def video(source: Any, num_frames: int | None = None) -> Video:
    """Build a video of `num_frames` frames for a vision model."""
    if num_frames is not None and num_frames < 1:
        raise ConfigError(f"num_frames is {num_frames}; it must be at least 1")
    return Video(source, num_frames)


def part(text: str) -> Part:
    """Declare a text that does not depend on its place among the parts beside it; see `Program.compile`."""
    if not isinstance(text, str):
        raise ConfigError(f"part is {text!r} ({type(text).__name__}); give text")
    return Part(text)


def module(name: str, text: str) -> Module:
    """Build a text whose KV is computed once, by itself, and attended to wherever it stands among other modules.

    A prompt may begin with text; then come its modules, in any order, and text again. Each module sees only its own
    tokens, so **answers differ** from those of the same text without modules; docs/scale.md measures by how much. At
    an endpoint a module is text as any other.

    name  of the module, in errors; each stands in a prompt once
    Raises: ConfigError for a name or text that is empty.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the name of a module is {name!r}; give non-empty text")
    if not isinstance(text, str) or not text:
        raise ConfigError(f"the text of module {name!r} is {text!r}; give non-empty text")
    return Module(name, text)


def system(content: Expression | str) -> Expression:
    """Build a system turn."""
    return _role("system", content)


def user(content: Expression | str) -> Expression:
    """Build a user turn."""
    return _role("user", content)


def assistant(content: Expression | str) -> Expression:
    """Build an assistant turn; it usually contains a `gen`."""
    return _role("assistant", content)


def as_expression(item: Any) -> Expression:
    """Convert text to an expression; raise ConfigError for anything but text and expressions."""
    if isinstance(item, Expression):
        return item
    if isinstance(item, str):
        return Text(item)
    raise ConfigError(f"{item!r} ({type(item).__name__}) cannot be appended to a state; give text or an expression")


def parts_of(expression: Expression) -> tuple[Expression, ...]:
    """Return the parts of a joined expression, or the expression alone."""
    return expression.items if isinstance(expression, Joined) else (expression,)


def _role(role: str, content: Expression | str) -> Expression:
    return Joined((RoleBegin(role), *parts_of(as_expression(content)), RoleEnd(role)))


def _check_name(name: Any) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"the name of a variable is {name!r}; give non-empty text, or None for no variable")


def _constrained(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) is not None for name in _CONSTRAINTS)
