"""The order of a signature's input fields by how often their values change between calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import dspy
from graftlm.core.errors import ConfigError


class FieldOrder:
    """Input fields with few different values first, so that prompts share more; learned from example inputs.

    rates  by field: different values per example. A field that no example has keeps its place behind those it has.
    """

    def __init__(self, examples: Iterable[Mapping[str, Any] | dspy.Example]) -> None:
        items: list[Mapping[str, Any]] = []
        for one in examples:
            item = one if isinstance(one, Mapping) else getattr(one, "toDict", dict)()
            if not item:
                raise ConfigError(f"order_fields_by has {one!r}; give dspy.Example or dict with the values of fields")
            items.append(item)
        if len(items) < 2:
            raise ConfigError(
                f"order_fields_by has {len(items)} examples; give at least two (dspy.Example or dict), "
                "from which it learns how often each field changes"
            )
        values: dict[str, list[str]] = {}
        for item in items:
            for name, value in item.items():
                values.setdefault(name, []).append(repr(value))
        self.rates = {name: len(set(seen)) / len(seen) for name, seen in values.items()}
        self._ordered: WeakKeyDictionary[Any, tuple[str, Any]] = WeakKeyDictionary()

    def __call__(self, signature: type[dspy.Signature]) -> type[dspy.Signature]:
        """Return the signature with its input fields in order; the signature itself if they are."""
        known = self._ordered.get(signature)
        if known is not None and known[0] == signature.instructions:
            return known[1]  # type: ignore[no-any-return]
        names = list(signature.input_fields)
        order = sorted(names, key=lambda name: self.rates.get(name, 1.0))
        ordered = signature
        if order != names:
            inputs, outputs = signature.input_fields, signature.output_fields
            fields = {name: (inputs[name].annotation, inputs[name]) for name in order}
            fields |= {name: (field.annotation, field) for name, field in outputs.items()}
            ordered = dspy.Signature(fields, signature.instructions)
        self._ordered[signature] = signature.instructions, ordered
        return ordered

    def __getstate__(self) -> dict[str, Any]:
        """Return the rates; ordered signatures are built again."""
        return {"rates": self.rates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rates = state["rates"]
        self._ordered = WeakKeyDictionary()
