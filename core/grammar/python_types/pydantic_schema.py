"""JSON schemas of Python types: pydantic reads every string that they admit. Pydantic's own schemas admit more."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ByteSize, EncodedBytes, EncodedStr, SecretBytes, SecretStr, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from graftlm.core.grammar.python_types import constraints, containers, moments, networks, numbers, texts
from graftlm.core.grammar.python_types.refusals import refused
from graftlm.core.grammar.schema.algebra.formats import FORMATS

_Cached = tuple[dict[str, Any], bool, datetime | None]
_classes: WeakKeyDictionary[type[BaseModel], _Cached] = WeakKeyDictionary()


def class_schema(kind: type[BaseModel]) -> tuple[dict[str, Any], bool]:
    """Return the schema of a class, and True if pydantic's own admits more; cached, except for moments by the clock."""
    hour = datetime.now().replace(minute=0, second=0, microsecond=0)
    if kind not in _classes or _classes[kind][2] not in (None, hour):
        closed = schema_of(kind)
        by_clock = "'now_op'" in repr(kind.__pydantic_core_schema__)
        _classes[kind] = closed, closed != kind.model_json_schema(), hour if by_clock else None
    return _classes[kind][:2]


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a pydantic class, a TypeAdapter or any type that pydantic knows.

    A constraint that no JSON schema can hold is the keyword `x-unsupported`, with the reason, at its place.

    Raises: PydanticUserError where pydantic has no JSON schema for it.
    """
    if isinstance(kind, type) and hasattr(kind, "model_json_schema"):  # not Annotated, which passes on attributes
        described: dict[str, Any] = kind.model_json_schema(schema_generator=OutputSchema)
        return described
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    return adapter.json_schema(schema_generator=OutputSchema)


def _is_subclass_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    return refused({}, "no JSON value is read as a class; use a Literal of names")


_DESCRIBED: Final = {
    "str": texts.str_schema,
    "bytes": texts.bytes_schema,
    "url": texts.url_schema,
    "multi-host-url": texts.multi_host_url_schema,
    "int": numbers.int_schema,
    "float": numbers.float_schema,
    "decimal": numbers.decimal_schema,
    "fraction": numbers.fraction_schema,
    "complex": numbers.complex_schema,
    "date": moments.date_schema,
    "datetime": moments.datetime_schema,
    "time": moments.time_schema,
    "timedelta": moments.timedelta_schema,
    "literal": containers.literal_schema,
    "enum": containers.enum_schema,
    "set": containers.set_schema,
    "frozenset": containers.set_schema,
    "tuple": containers.tuple_schema,
    "dict": containers.dict_schema,
    "frozendict": containers.dict_schema,
    "ordered-dict": containers.dict_schema,
    "counter": containers.dict_schema,
    "tagged-union": containers.tagged_union_schema,
    "is-subclass": _is_subclass_schema,
}
"""The types that pydantic's own schema is too wide for. Other types keep it."""


class OutputSchema(GenerateJsonSchema):
    """pydantic's own schemas, narrowed to the texts that pydantic reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.core_definitions: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def build_schema_type_to_method(self) -> dict[Any, Any]:
        own = {name: partial(method, self) for name, method in _DESCRIBED.items()}
        return {**super().build_schema_type_to_method(), **own}

    def below(self, schema: Any) -> Any:
        """Return the schema of a type below its validators and defaults."""
        return constraints.base(schema, self.core_definitions)

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        kind = schema["type"]
        if kind == "chain":
            return self._chain(schema)
        if kind.startswith("function-"):
            if given := constraints.constraints_of(schema):
                return self._constrained(schema, given)
            owner = constraints.owner_of(schema)
            if isinstance(owner, (EncodedBytes, EncodedStr)):
                return texts.encoded_schema(self, owner, schema)
            if owner is ByteSize:
                return numbers.byte_size_schema(self, schema)
        described = super().generate_inner(schema)
        if kind.startswith("function-") and (reason := constraints.refusal(schema)):
            described = refused(described, reason)
        if kind.endswith("-field") and (reason := self._field_refusal(schema)):
            described = refused(described, reason)
        if kind == "lax-or-strict" and constraints.secret_of(schema) is SecretStr:
            described = {**described, **texts.configured_lengths(self._config, described)}
        name = described.get("format", "")
        reads_any = kind == "str"  # a string with the format of pydantic's type
        if name not in networks.PATTERNS or "pattern" in described or reads_any:
            return described
        others = {key: value for key, value in described.items() if key != "format" or name not in FORMATS}
        return {**others, "pattern": f"^({networks.PATTERNS[name]})$"}

    def _constrained(self, schema: Any, given: dict[str, Any]) -> JsonSchemaValue:
        """Return the schema of a type whose constraints pydantic applies behind a validator."""
        inner = schema["schema"]
        notes = schema.get("metadata", {}).get("pydantic_js_updates", {})
        notes = {name: value for name, value in notes.items() if name not in constraints.JS_KEYS}
        pushed = constraints.constrained(inner, given, self.core_definitions)
        if pushed is not None:
            return {**self.generate_inner(pushed), **notes}
        described = self.generate_inner(inner)
        secret = constraints.secret_of(inner)
        if secret is SecretStr and (lengths := constraints.lengths(given)):
            return {**described, **lengths, **notes}
        if secret is SecretBytes and constraints.lengths(given):
            return {**described, **texts.bytes_schema(self, core_schema.bytes_schema(**given)), **notes}
        names = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return {**refused(described, f"{names} cannot be kept for this type; constrain a simpler type"), **notes}

    def _chain(self, schema: Any) -> JsonSchemaValue:
        """Return the schema of a value that pydantic validates in several steps, as all of them together."""
        first, reasons = schema["steps"][0], []
        for given, kind in constraints.steps_of(schema):
            if kind == "any" or (not given and kind == self.below(first)["type"]) or kind.startswith("function-"):
                continue
            pushed = constraints.constrained(first, given, self.core_definitions) if given else None
            if pushed is None:
                names = ", ".join(f"{name}={value!r}" for name, value in given.items()) or f"a second type, {kind}"
                reasons.append(f"{names} cannot be kept behind the first step of a chain; constrain a simpler type")
            else:
                first = pushed
        described = self.generate_inner(first)
        return refused(described, reasons[0]) if reasons else described

    def _field_refusal(self, field: Any) -> str | None:
        return None if self._reads_names() else containers.field_refusal(field)

    def _reads_names(self) -> bool:
        """Return True if fields may be given by their names beside, or instead of, their aliases."""
        config: Any = self._config
        return bool(config.validate_by_name or config.populate_by_name or not config.validate_by_alias)

    def _get_alias_name(self, field: Any, name: str) -> str:
        alias = field.get("validation_alias")
        if isinstance(alias, list) and len(alias) == 1 and isinstance(alias[0], str) and not self._reads_names():
            return str(alias[0])
        return super()._get_alias_name(field, name)

    def field_is_present(self, field: Any) -> bool:
        return super().field_is_present(field) and field.get("init") is not False

    def definitions_schema(self, schema: core_schema.DefinitionsSchema) -> JsonSchemaValue:
        self.core_definitions.update((found["ref"], found) for found in map(dict, schema["definitions"]))
        return super().definitions_schema(schema)

    def kw_arguments_schema(self, arguments: Any, var_kwargs_schema: Any) -> JsonSchemaValue:
        described = super().kw_arguments_schema(arguments, var_kwargs_schema)
        if var_kwargs_schema is None or var_kwargs_schema["type"] != "typed-dict":
            return described
        return refused(described, "keyword arguments of a TypedDict cannot be kept; name them as parameters")
