"""Collections of schemas: files that refer to each other are judged together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.grammar.collections import Neighbours, groups

BASE = "https://example.org/schemas/"


def written(folder: Path, **schemas: Any) -> Path:
    for name, schema in schemas.items():
        (folder / f"{name}.json").write_text(json.dumps({"$id": f"{BASE}{name}.json"} | schema))
    return folder


def test_a_schema_is_given_what_it_refers_to_directly_and_through_others(tmp_path: Path) -> None:
    folder = written(
        tmp_path,
        order={"properties": {"item": {"$ref": "item.json#/definitions/item"}}},
        item={"definitions": {"item": {"$ref": "price.json"}}},
        price={"type": "number"},
        other={"type": "null"},
    )
    schemas = {name: schema for name, schema, _ in groups(folder)}
    assert list(Neighbours(folder).documents(schemas["order.json"])) == [f"{BASE}item.json", f"{BASE}price.json"]


def test_a_reference_out_of_the_folder_stays_one(tmp_path: Path) -> None:
    folder = written(tmp_path, alone={"$ref": "https://elsewhere.example/x.json"})
    (schema,) = (schema for _, schema, _ in groups(folder))
    assert Neighbours(folder).documents(schema) == {}


def test_a_schema_that_refers_to_itself_by_its_uri_is_not_given_twice(tmp_path: Path) -> None:
    folder = written(tmp_path, tree={"items": {"$ref": "#"}, "contains": {"$ref": "leaf.json"}}, leaf={"type": "null"})
    schemas = {name: schema for name, schema, _ in groups(folder)}
    assert list(Neighbours(folder).documents(schemas["tree.json"])) == [f"{BASE}leaf.json"]


def test_a_schema_without_a_uri_finds_its_neighbours_by_their_file_names(tmp_path: Path) -> None:
    (tmp_path / "new.json").write_text('{"$ref": "old.json#/definitions/x"}')
    (tmp_path / "old.json").write_text('{"definitions": {"x": {"type": "null"}}}')
    schemas = {name: schema for name, schema, _ in groups(tmp_path)}
    assert Neighbours(tmp_path).documents(schemas["new.json"]) == {"old.json": schemas["old.json"]}
