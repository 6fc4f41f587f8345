"""Objects of which `minProperties` counts names that they do not list: these have to differ, and may run out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra
from graftlm.core.grammar.schema.algebra.shapes import (
    NOTHING,
    Literals,
    Object,
    Shape,
    Text,
    both,
    negation,
    union,
)
from graftlm.core.grammar.schema.distinct.item_language import ItemLanguage
from graftlm.core.grammar.spec import JsonSchema


def counts_names(shape: Object) -> bool:
    """Whether more members are asked for than names it lists and one other: others might be the same one twice."""
    if shape.min_properties < 2:
        return False
    has_others = shape.additional != NOTHING or bool(shape.patterns)
    return shape.min_properties > len(shape.listed) + has_others


def may_count_names(spec: JsonSchema) -> bool:
    """Whether `spec` may have such an object, as its text tells before it is read."""
    text = spec.text + spec.documents_text
    asks_for_some = '"minProperties":' in text and _SEVERAL.search(text)  # a pattern is found later than a word
    if not asks_for_some and not ('"not":' in text and '"maxProperties":' in text):
        return False
    return _counts_names([spec.schema, *spec.documents.values()])


_SEVERAL = re.compile(r'"minProperties":(?![01][,}])')


def _counts_names(schema: Any) -> bool:
    level = [schema]
    while level:  # as wide as it is: most of a schema, and of those that it refers to, asks for no members
        inner: list[Any] = []
        for part in level:
            if type(part) is not dict:
                inner += part
                continue
            if "minProperties" in part and _asks_for_more(part) or "not" in part and _has_most(part["not"]):
                return True
            inner += part.values()
        level = [part for part in inner if type(part) is dict or type(part) is list]
    return False


def _asks_for_more(part: dict[str, Any]) -> bool:
    """Whether an object of a schema asks for more members than it lists and one other."""
    least, declared, required = (part.get(word) for word in ("minProperties", "properties", "required"))
    if not isinstance(least, int | float) or least <= 1:
        return False
    listed = {*(declared if isinstance(declared, dict) else ()), *(required if isinstance(required, list) else ())}
    has_others = part.get("additionalProperties") is not False or "patternProperties" in part
    return least > len(listed) + has_others


def _has_most(part: Any) -> bool:
    """Whether `maxProperties`, or a reference, stands anywhere in it: under `not` that asks for more members."""
    if isinstance(part, list):
        return any(map(_has_most, part))
    return isinstance(part, dict) and ("maxProperties" in part or "$ref" in part or any(map(_has_most, part.values())))


def too_few_names(algebra: ShapeAlgebra, parts: Sequence[Shape]) -> bool:
    """Whether objects that have all of these shapes must have more members than there are names for them."""
    objects = [part for part in parts if isinstance(part, Object)]
    if len(objects) < 2 or not any(map(counts_names, objects)):
        return False
    language = name_language(algebra, objects)
    return language is not None and language.num_texts < max(part.min_properties for part in objects)


def name_language(algebra: ShapeAlgebra, objects: Sequence[Object], without: Iterable[str] = ()) -> ItemLanguage | None:
    """The names, with quotation marks, that members of what is all of `objects` may have; None if there is no end.

    without  names that are left out
    """
    names = both(*map(_names, objects))
    left_out = _literals(without)
    if left_out.texts:
        names = both(names, negation(left_out))
    try:
        nodes = [
            ast.alternation(*map(ast.literal, piece.texts))
            if isinstance(piece, Literals)
            else text_language.quoted(piece)
            for piece in algebra.pieces(names, "string")
            if isinstance(piece, (Literals, Text)) and piece != Text()
        ]
        if len(nodes) < len(algebra.pieces(names, "string")):
            return None
    except GrammarError:
        return None
    return ItemLanguage.of(ast.alternation(*nodes), True)


def num_other_names(algebra: ShapeAlgebra, shape: Object, listed: Iterable[str]) -> float:
    """How many names members of `shape` may have but for `listed`."""
    language = name_language(algebra, (shape,), listed)
    return math.inf if language is None else language.num_texts


def _literals(names: Iterable[str]) -> Literals:
    return Literals(tuple(json.dumps(name, ensure_ascii=False) for name in sorted(names)))


def _names(shape: Object) -> Shape:
    listed = _literals(shape.listed)
    others: list[Shape] = [Text(patterns=(pattern,)) for pattern, value in shape.patterns if value != NOTHING]
    if shape.additional != NOTHING:
        others = [Text()]
    names = union(*([listed] if listed.texts else []), *others)
    return names if shape.names is None else both(names, shape.names)
