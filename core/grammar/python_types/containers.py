"""Objects and arrays: the names of a dict's members, items of sets, tagged unions and the aliases of fields."""

from __future__ import annotations

import json
from decimal import Decimal
from enum import Enum
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import SchemaValidator, core_schema, to_jsonable_python

from graftlm.core.grammar.python_types.constraints import reads_own_text
from graftlm.core.grammar.python_types.moments import limits
from graftlm.core.grammar.python_types.range_patterns import integer_pattern, number_pattern
from graftlm.core.grammar.python_types.refusals import UNSUPPORTED, refused

_UNHASHABLE: Final = frozenset(
    {"list", "dict", "set", "deque", "typed-dict", "ordered-dict", "counter", "generator", "is-instance"}
)
_DISTINCT: Final = frozenset({"int", "bool", "date", "float", "decimal", "none", "str", "literal", "enum"})
"""Types of which different JSON values are different Python values."""
_NAMELESS: Final = "no name of a member in JSON is read as such a key; use str, int or a list of pairs"
_SCALARS: Final = {"type": ["null", "boolean", "number", "string"]}


def dict_schema(generator: Any, schema: Any) -> JsonSchemaValue:
    described = GenerateJsonSchema.dict_schema(generator, schema)
    if "keys_schema" not in schema or schema["keys_schema"]["type"] == "any":
        return described
    for patterned in described.pop("patternProperties", {}).values():
        described["additionalProperties"] = patterned
    described.setdefault("additionalProperties", True)
    described.pop("propertyNames", None)
    names = _names(generator, schema["keys_schema"])
    if names is None:
        return refused(described, _NAMELESS)
    if UNSUPPORTED in names:
        return refused(described, names[UNSUPPORTED])
    return {**described, "propertyNames": names} if names else described


def _names(generator: Any, keys: Any) -> JsonSchemaValue | None:
    """Return the schema of the names that are read as keys, {} for any name, None if no name is."""
    schema = generator.below(keys)
    kind = schema["type"]
    if reads_own_text(keys):
        return _strings(generator, generator.generate_inner(keys))
    if kind in ("literal", "enum"):
        return _finite_names(generator, schema)
    if kind == "bool":
        return {"pattern": "^(true|false)$"}
    if kind == "any":
        return {}
    if kind == "int":
        low, high = limits(schema, 1)
        return _numeric_names(schema, integer_pattern(low, high))
    if kind in ("float", "decimal"):
        return _number_names(schema)
    if kind == "fraction":
        bounded = any(schema.get(name) is not None for name in ("gt", "ge", "lt", "le", "multiple_of"))
        named = {"pattern": "^-?(0|[1-9][0-9]{0,15})(/[1-9][0-9]{0,15})?$"}
        return refused(named, "bounds of fractions in names cannot be kept; use int or str") if bounded else named
    if kind == "union":
        choices = [choice[0] if isinstance(choice, tuple) else choice for choice in schema["choices"]]
        found = [names for choice in choices if (names := _names(generator, choice)) is not None]
        if not found or {} in found:
            return {} if found else None
        marks = [names for names in found if UNSUPPORTED in names]
        return marks[0] if marks else found[0] if len(found) == 1 else {"anyOf": found}
    if kind in ("json", "none", "tuple", "list", "set", "frozenset", "dict", "model", "dataclass", "named-tuple"):
        return None
    return _strings(generator, generator.generate_inner(keys))


def _strings(generator: Any, described: JsonSchemaValue) -> JsonSchemaValue | None:
    """Return the strings that `described` admits as names, None if it admits none."""
    described = generator.resolve_ref_schema(described)
    for word in ("anyOf", "oneOf"):
        found = [names for item in described.get(word, ()) if (names := _strings(generator, item)) is not None]
        if "type" not in described and found:
            return found[0] if len(found) == 1 else {word: found}
    if described.get("type") != "string":
        return {} if not described else None
    return {name: value for name, value in described.items() if name not in ("type", "title", "description", "default")}


def _numeric_names(schema: Any, pattern: str) -> JsonSchemaValue:
    named = {"pattern": f"^({pattern})$"}
    if schema.get("multiple_of") is None:
        return named
    return refused(named, f"names that are multiples of {schema['multiple_of']} cannot be kept; use a Literal or int")


def _number_names(schema: Any) -> JsonSchemaValue:
    bounds = {
        name: Decimal(str(schema[name]))
        for name in ("gt", "ge", "lt", "le")
        if schema.get(name) is not None and abs(schema[name]) < 10**16
    }
    low, high = limits(bounds, 0)
    above = "gt" in bounds and bounds["gt"] == low
    below = "lt" in bounds and bounds["lt"] == high
    named = _numeric_names(schema, number_pattern(low, high, above=above, below=below))
    if schema.get("max_digits") is not None or schema.get("decimal_places") is not None:
        return refused(named, "digits of numbers in names cannot be kept; use int or str")
    return named


def _finite_names(generator: Any, schema: Any) -> JsonSchemaValue | None:
    """Return the names that are read as one of the members of a Literal or an Enum."""
    members = schema["expected"] if schema["type"] == "literal" else schema["members"]
    values = [member.value if isinstance(member, Enum) else member for member in members]
    spelled = {"true" if value is True else "false" if value is False else str(value) for value in values}
    spelled |= {value for value in map(to_jsonable_python, values) if isinstance(value, str)}
    reader = _reader(generator, core_schema.dict_schema(keys_schema=_alone(schema)))
    kept = [name for name in sorted(spelled) if _reads(reader, {name: None})]
    return {"enum": kept} if kept else None


def literal_schema(generator: Any, schema: Any) -> JsonSchemaValue:
    return _readable(generator, schema, GenerateJsonSchema.literal_schema(generator, schema))


def enum_schema(generator: Any, schema: Any) -> JsonSchemaValue:
    return _readable(generator, schema, GenerateJsonSchema.enum_schema(generator, schema))


def _readable(generator: Any, schema: Any, described: JsonSchemaValue) -> JsonSchemaValue:
    """Return `described` with the values alone that pydantic reads from JSON as one of the members."""
    values = described["enum"] if "enum" in described else [described["const"]]
    reader = _reader(generator, _alone(schema))
    kept = [value for value in values if _reads(reader, value)]
    if len(kept) == len(values):
        return described
    if not kept:
        return refused(described, f"no JSON value is read as one of {values}; use strings or numbers as values")
    return {**described, "enum": kept}


def _alone(schema: Any) -> Any:
    return {name: value for name, value in schema.items() if name not in ("ref", "serialization", "metadata")}


def _reader(generator: Any, schema: Any) -> SchemaValidator:
    return SchemaValidator(schema, core_schema.CoreConfig(strict=bool(generator._config.strict)))


def _reads(reader: SchemaValidator, value: Any) -> bool:
    try:
        reader.validate_json(json.dumps(value))
    except (ValueError, TypeError):
        return False
    return True


def set_schema(generator: Any, schema: Any) -> JsonSchemaValue:
    described = GenerateJsonSchema._common_set_schema(generator, schema)
    items = schema.get("items_schema", {"type": "any"})
    if not _hashable(generator, items):
        return refused(described, "items of a set must be hashable; use a list, or items of a frozen class")
    if generator.below(items)["type"] == "any":
        described["items"] = _SCALARS
    if (schema.get("min_length") or 0) > 1 and not _distinct(generator, items):
        reason = f"{schema['min_length']} different items cannot be kept: several texts are the same item; use a list"
        return refused(described, reason)
    return described


def _hashable(generator: Any, items: Any, depth: int = 0) -> bool:
    kind, schema = generator.below(items)["type"], generator.below(items)
    if kind in ("model", "dataclass"):
        return schema["cls"].__hash__ is not None
    if kind == "union":
        return all(_hashable(generator, item[0] if isinstance(item, tuple) else item) for item in schema["choices"])
    if kind == "tuple" and depth < 8:
        return all(_hashable(generator, item, depth + 1) for item in schema["items_schema"])
    if kind == "named-tuple" and depth < 8:
        return all(_hashable(generator, field["schema"], depth + 1) for field in schema["fields"])
    if kind == "json":
        return "schema" in schema and _hashable(generator, schema["schema"])
    return kind not in _UNHASHABLE


def _distinct(generator: Any, items: Any) -> bool:
    kind, schema = generator.below(items)["type"], generator.below(items)
    config = generator._config
    if kind == "str":
        changes = (config.str_to_lower, config.str_to_upper, config.str_strip_whitespace)
        return not any((*changes, *(schema.get(name) for name in ("strip_whitespace", "to_lower", "to_upper"))))
    return kind in _DISTINCT


def tuple_schema(generator: Any, schema: Any) -> JsonSchemaValue:
    described = GenerateJsonSchema.tuple_schema(generator, schema)
    index = schema.get("variadic_item_index")
    if index is None or index + 1 == len(schema["items_schema"]):
        return described
    return refused(described, "items behind those of any number cannot be kept; put the variadic items last")


def tagged_union_schema(generator: Any, schema: Any) -> JsonSchemaValue:
    """Return the choices with their tag, by which pydantic finds the choice, even where the tag has a default."""
    choices = {tag: choice for tag, choice in schema["choices"].items() if isinstance(tag, (str, int))}
    readable: Any = {**schema, "choices": choices or schema["choices"]}
    described = GenerateJsonSchema.tagged_union_schema(generator, readable)
    discriminator = schema["discriminator"]
    if callable(discriminator):
        name = getattr(discriminator, "__name__", repr(discriminator))
        reason = f"the tag that {name} finds cannot be kept; name a field as discriminator, or leave it out"
        return refused(described, reason)
    if not choices:
        return refused(described, f"no JSON value is one of the tags {list(schema['choices'])}; use strings or numbers")
    name = described.get("discriminator", {}).get("propertyName") or _tag_name(discriminator)
    if name is None:
        return refused(described, f"the tag {discriminator!r} is no member of each choice; give it one alias in all")
    tagged = [{"allOf": [choice, {"required": [name]}]} for choice in described["oneOf"]]
    return {**described, "oneOf": tagged}


def _tag_name(discriminator: Any) -> str | None:
    """Return the name of the member that holds the tag; an alias comes behind the name of the field."""
    if isinstance(discriminator, str):
        return discriminator
    paths = discriminator if isinstance(discriminator[0], list) else [discriminator]
    names = [path[0] for path in paths if len(path) == 1 and isinstance(path[0], str)]
    return names[-1] if names else None


def field_refusal(field: Any) -> str | None:
    """Return the reason why a field cannot be read from one member of its object, else None."""
    alias = field.get("validation_alias")
    if alias is None or isinstance(alias, str):
        return None
    paths = alias if isinstance(alias[0], list) else [alias]
    if any(len(path) == 1 and isinstance(path[0], str) for path in paths):
        return None
    return f"a value at the path {paths[0]} cannot be kept; use an alias of one name, or AliasChoices with one"
