"""Schemas whose parts must differ although their own text does not say so."""

from __future__ import annotations

import pytest

from tests.grammars import admits


@pytest.mark.parametrize(
    "uri",
    [
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2020-12/meta/validation",
        "http://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft-04/schema#",
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_schema_of_schemas_lets_no_name_be_required_twice(uri: str, inside: bool) -> None:
    schema = {"$ref": uri}
    if inside:
        schema = {"type": "array", "items": schema}

    def taken(value: dict[str, list[str]]) -> bool:
        return admits(schema, [value] if inside else value)

    assert taken({"required": ["a", "b"]}) and taken({"type": ["integer", "string"]})
    assert not taken({"required": ["a", "a"]}) and not taken({"type": ["integer", "string", "integer"]})
