"""Where references lead inside one document."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.schema.reading.references import References
from graftlm.core.grammar.spec import JsonSchema

DOCUMENT: dict[str, Any] = {
    "$id": "https://example.org/root.json",
    "$defs": {
        "a/b~c": {"type": "integer"},
        "inner": {"$id": "inner.json", "$defs": {"x": {"type": "null"}}, "$anchor": "here"},
        "urn": {"$id": "urn:x:y", "$defs": {"z": {"type": "string"}}},
    },
    "anyOf": [{"type": "boolean"}],
    "properties": {"$id": {"type": "string"}},
    "const": {"$id": "ignored.json"},
}


@pytest.mark.parametrize(
    ("reference", "pointer", "target"),
    [
        ("#", "", ""),
        ("#/$defs/a~1b~0c", "", "/$defs/a~1b~0c"),
        ("#/%24defs/a~1b~0c", "/anyOf/0", "/$defs/a~1b~0c"),
        ("#/anyOf/0", "", "/anyOf/0"),
        ("inner.json", "", "/$defs/inner"),
        ("https://example.org/inner.json#/$defs/x", "", "/$defs/inner/$defs/x"),
        ("#/$defs/x", "/$defs/inner", "/$defs/inner/$defs/x"),
        ("inner.json#here", "", "/$defs/inner"),
        ("root.json", "/$defs/inner", ""),
        ("#/$defs/z", "/$defs/urn", "/$defs/urn/$defs/z"),
    ],
)
def test_a_reference_leads_to_a_pointer(reference: str, pointer: str, target: str) -> None:
    assert References(DOCUMENT).target(reference, f"{pointer}/$ref") == target


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("other.json", "leads out of this document"),
        ("#nowhere", r"names no \$anchor"),
        ("#/anyOf/3", "there is no '3'"),
        ("#/$defs/iner", "did you mean 'inner'"),
        ("ignored.json", "leads out of this document"),
        ("anyOf/0", r"documents=.*; did you mean '#/anyOf/0'\?"),
        ("inner", r"documents=.*; did you mean '#/\$defs/inner'\?"),
        ("#anyOf/0", r"names no \$anchor of this document; did you mean '#/anyOf/0'\?"),
        ("#inner", r"names no \$anchor of this document; did you mean '#/\$defs/inner'\?"),
    ],
)
def test_a_reference_that_leads_nowhere_says_so_and_where_it_stands(reference: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        References(DOCUMENT).target(reference, "/properties/$id/$ref")
    assert caught.value.pointer == "/properties/$id/$ref"


def test_the_schema_at_a_pointer() -> None:
    assert References(DOCUMENT).schema("/$defs/a~1b~0c") == {"type": "integer"}


def test_the_schema_of_schemas_is_at_hand() -> None:
    uri = "http://json-schema.org/draft-07/schema"
    references = References({"type": "object"})
    target = references.target(f"{uri}#/definitions/simpleTypes", "/properties/p/$ref")
    assert "integer" in references.schema(target)["enum"] and references.draft(target) == 7
    with pytest.raises(GrammarError, match="leads out of this document"):
        references.target("http://json-schema.org/draft-99/schema#", "/properties/p/$ref")


def test_each_schema_of_schemas_is_that_of_the_registry() -> None:
    references = References({"type": "object"})
    for uri in REGISTRY:
        assert references.schema(references.target(uri, "/$ref")) == REGISTRY.contents(uri)


@pytest.mark.parametrize("name", ["$id", "$anchor", "$dynamicAnchor"])
def test_names_below_the_root_are_found_with_the_text_at_hand(name: str) -> None:
    schema = {"$id": "https://x.org/root", "$defs": {"a": {name: "b", "type": "null"}}}
    reference = "b" if name == "$id" else "#b"
    text = json.dumps(schema, separators=(",", ":"))
    assert References(schema, None, text).target(reference, "/properties/p/$ref") == "/$defs/a"


@pytest.mark.parametrize("name", ["$id", "$anchor", "$dynamicAnchor"])
def test_names_below_the_root_of_a_document_are_found_with_the_texts_at_hand(name: str) -> None:
    plain = {"$id": "https://x.org/plain", "$defs": {"id": {"type": "null"}}}
    other = {"$id": "https://x.org/other", "$defs": {"a": {name: "b", "type": "null"}}}
    documents = {document["$id"]: document for document in (plain, other)}
    spec = JsonSchema({}, documents)
    references = References(spec.schema, spec.documents, spec.text, spec.documents_text)
    reference = "https://x.org/b" if name == "$id" else "https://x.org/other#b"
    assert references.target(reference, "/$ref") == "https://x.org/other#/$defs/a"
    assert references.target("https://x.org/plain#/$defs/id", "/$ref") == "https://x.org/plain#/$defs/id"


def test_a_document_may_have_a_name_that_begins_with_a_slash() -> None:
    references = References({"$id": "/orders"}, {"/order": {"$defs": {"id": {"type": "integer"}}}})
    target = references.target("/order#/$defs/id", "/items/$ref")
    assert references.schema(target) == {"type": "integer"}  # was looked for in the schema itself
