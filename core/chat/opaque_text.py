"""Opaque texts: a chat template is run with contents that it may write, strip and ask whether they are empty.

A template is a program and may look into what it writes around. Whether it does is found by running it: `OpaqueText`
stands for a content and raises `Looked` at any other operation. Filters, tests and calls that would read its
characters without asking it raise as well, and so do templates whose syntax would lose track of it.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

MARK = "\ue000"
_END = '"\\<aA \ue001'
"""Ends a mark; what escapes, quotes, trims or changes case would change it."""

_STRIPS = ("strip", "lstrip", "rstrip")
_PLAIN_TESTS = frozenset(
    ("string", "defined", "undefined", "none", "mapping", "boolean", "true", "false", "number", "integer", "float")
)
"""Tests that ask for a type alone."""
_PLAIN_FILTERS = frozenset(("string", "default", "d"))
_OF_MESSAGES = frozenset(
    ("length", "count", "list", "first", "last", "select", "reject", "selectattr", "rejectattr", "map", "reverse")
)
"""Filters of lists that leave their items to other filters and tests."""


class Looked(BaseException):
    """The template looked into a content. No Exception, so that no template's environment catches it."""


class Place(NamedTuple):
    """A content's place in a text: the number of its message, and the methods by which it is stripped."""

    message: int
    strips: tuple[str, ...] = ()

    def of(self, contents: list[str]) -> str:
        text = contents[self.message]
        for strip in self.strips:
            text = getattr(text, strip)()
        return text

    @property
    def mark(self) -> str:
        return f"{MARK}{self.message} {' '.join(self.strips)}{_END}"


class Run:
    """What is found out by one run of a template.

    contents    of its messages
    emptiness   what it asked of contents: whether they are empty
    dates       what it asked of the clock, by format
    """

    def __init__(self, contents: list[str]) -> None:
        self.contents = contents
        self.emptiness: dict[Place, bool] = {}
        self.dates: dict[str, str] = {}
        self.texts: dict[str, OpaqueText] = {}  # by mark
        self.places: dict[str, Place] = {}
        for message in range(len(contents)):
            self.text(Place(message))

    def text(self, place: Place) -> OpaqueText:
        if place.mark not in self.texts:
            self.places[place.mark] = place
            self.texts[place.mark] = opaque = OpaqueText(place.mark)
            opaque._run, opaque._place = self, place
        return self.texts[place.mark]

    def traced(self, text: Any) -> Any:
        """A text that a macro wrote, opaque if it holds a content."""
        if type(text) is not str or MARK not in text:
            return text
        return self.texts.get(text) or MixedText(text)

    def date(self, pattern: str) -> str:
        self.dates[pattern] = now = datetime.now().strftime(pattern)
        return now


def _looked(*_: Any, **__: Any) -> Any:
    raise Looked


_KEPT = ("__new__", "__init__", "__class__", "__doc__", "__getattribute__", "__setattr__", "__init_subclass__")


class MixedText(str):
    """A text that holds contents and others. It can be written and lengthened."""

    for _name in dir(str):
        if _name not in _KEPT:
            locals()[_name] = _looked
    __bool__ = __iter__ = __len__ = __contains__ = __format__ = __repr__ = _looked
    __hash__: Any = _looked

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> MixedText:
        return MixedText(_raw(self, other)) if isinstance(other, str) else _looked()

    def __radd__(self, other: Any) -> MixedText:
        return MixedText(_raw(other, self)) if isinstance(other, str) else _looked()


def _raw(*texts: str) -> str:
    return "".join(texts)


class OpaqueText(MixedText):
    """Stands for a content. It can be written, lengthened, stripped, and asked whether it is empty."""

    _run: Run
    _place: Place

    def __bool__(self) -> bool:
        found = self._run.emptiness[self._place] = bool(self._place.of(self._run.contents))
        return found

    def _stripped(self, how: str, characters: Any) -> OpaqueText:
        if characters is not None:
            raise Looked
        return self._run.text(Place(self._place.message, (*self._place.strips, how)))

    def strip(self, characters: Any = None) -> OpaqueText:
        return self._stripped("strip", characters)

    def lstrip(self, characters: Any = None) -> OpaqueText:
        return self._stripped("lstrip", characters)

    def rstrip(self, characters: Any = None) -> OpaqueText:
        return self._stripped("rstrip", characters)


class OpaqueTemplate:
    """A chat template in an environment where what it does to contents is noticed.

    compiled  the template as transformers compiled it;  source  what of
    """

    def __init__(self, compiled: Any, source: str) -> None:
        self._lock = threading.Lock()
        self._environment = _watched(compiled.environment)
        self._template = self._environment.from_string(source) if _keeps_track(compiled, source) else None

    def write(self, run: Run, variables: dict[str, Any]) -> str:
        """The text that the template writes, with a mark for each of the contents of `run` among the variables.

        Raises: Looked if it looks into a content, or may have, and whatever the template raises.
        """
        if self._template is None:
            raise Looked
        with self._lock:
            self._environment.run = run
            return str(self._template.render(**variables))


def _watched(original: Any) -> Any:
    """The environment of a template, which notices what is done to the contents of its `run`."""
    from jinja2.runtime import Macro
    from jinja2.utils import LRUCache

    class Watched(type(original)):  # type: ignore[misc]
        run: Run

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            own = isinstance(getattr(function, "__self__", None), MixedText)
            passes_on = isinstance(function, Macro) or function is self.globals.get("namespace")
            if not (own or passes_on) and any(_holds(value) for value in (*args, *kwargs.values())):
                raise Looked
            return self.run.traced(super().call(context, function, *args, **kwargs))

        def getitem(self, owner: Any, key: Any) -> Any:
            return _looked() if isinstance(key, MixedText) else super().getitem(owner, key)

    watched = copy.copy(original)
    watched.__class__ = Watched
    watched.cache = LRUCache(4)
    watched.globals = {**original.globals, "strftime_now": lambda pattern: watched.run.date(pattern), "lipsum": _looked}
    watched.filters = {name: _filter(name, function) for name, function in original.filters.items()}
    watched.tests = {name: _test(name, function) for name, function in original.tests.items()}
    return watched


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if name == "random":
            raise Looked
        if name == "trim":
            opaque = [value for value in given if isinstance(value, str)]
            if isinstance(opaque[0], MixedText) and len(opaque) == 1:
                return opaque[0].strip()
        if name in _OF_MESSAGES:
            looks = any(isinstance(value, MixedText) for value in given)
        else:
            looks = name not in _PLAIN_FILTERS and any(_holds(value) for value in given)
        return _looked() if looks else function(*args, **kwargs)

    return watched


def _test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if name not in _PLAIN_TESTS and any(_holds(value) for value in (*args, *kwargs.values())):
            raise Looked
        return function(*args, **kwargs)

    return watched


def _holds(value: Any) -> bool:
    """Whether a content may be in a value; what yields its items later is not looked through."""
    if isinstance(value, MixedText | Iterator):
        return True
    if isinstance(value, dict):
        return any(_holds(one) for pair in value.items() for one in pair)
    return isinstance(value, list | tuple | set) and any(_holds(one) for one in value)


def _keeps_track(compiled: Any, source: str) -> bool:
    """Whether the template has no syntax that copies or reads a content where `OpaqueText` is not asked."""
    from jinja2 import nodes

    tree = compiled.environment.parse(source)
    blocks = (nodes.AssignBlock, nodes.CallBlock, nodes.FilterBlock, nodes.Include, nodes.Import, nodes.FromImport)
    if any(True for _ in tree.find_all((*blocks, nodes.Extends))):
        return False
    written = {id(node) for output in tree.find_all(nodes.Output) for node in output.nodes}
    if any(id(node) not in written for node in tree.find_all(nodes.Concat)):
        return False
    for node in tree.find_all(nodes.Compare):
        for operand in node.ops:
            listed = isinstance(operand.expr, nodes.List | nodes.Tuple)
            if operand.op in ("in", "notin") and not (listed or isinstance(node.expr, nodes.Const)):
                return False
    return True
