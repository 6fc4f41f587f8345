"""Where `$ref` leads: JSON pointers, `$id` and `$anchor` inside one schema document."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from graftlm.core.errors import GrammarError

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLES = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)


class References:
    """Resolves the references of one document to JSON pointers into it.

    A document without `$id` has the base URI "". Nothing is fetched: a reference that leaves the document is an error.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._resources: dict[str, str] = {"": ""}  # URI without fragment -> pointer
        self._anchors: dict[str, str] = {}  # URI with fragment -> pointer
        self._bases: dict[str, str] = {}  # pointer of a resource -> its URI
        self._walk(document, "", "")

    def target(self, reference: str, pointer: str) -> str:
        """The pointer that `reference`, found in the schema at `pointer`, leads to."""
        base, place = self._base(pointer), f"{pointer}/$ref"
        # urljoin knows nothing of fragments after schemes such as urn:
        uri, fragment = urldefrag(base + reference if reference[:1] == "#" else urljoin(base, reference))
        fragment = unquote(fragment)
        resource = self._resources.get(uri)
        if resource is None:
            raise GrammarError(
                f"{place}: {reference!r} leads out of this document, and nothing is fetched; "
                "copy the definition into $defs and refer to it there",
                pointer=place,
            )
        if not fragment:
            return resource
        if fragment.startswith("/"):
            found = resource + fragment
            self.schema(found, reference, place)
            return found
        anchor = self._anchors.get(f"{uri}#{fragment}")
        if anchor is None:
            raise GrammarError(f"{place}: {reference!r} names no $anchor of this document", pointer=place)
        return anchor

    def schema(self, target: str, reference: str = "", place: str = "") -> Any:
        """The value at pointer `target`, which `reference` at `place` names.

        Raises GrammarError that names the nearest definition when there is none.
        """
        value = self._document
        for part in _parts(target):
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                keys = list(value) if isinstance(value, dict) else []
                near = difflib.get_close_matches(part, keys, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise GrammarError(
                    f"{place}: {reference or target!r} leads nowhere: there is no {part!r}{hint}", pointer=place
                )
        return value

    def _base(self, pointer: str) -> str:
        while pointer not in self._bases and pointer:
            pointer = pointer.rpartition("/")[0]
        return self._bases.get(pointer, "")

    def _walk(self, schema: Any, pointer: str, base: str) -> None:
        if not isinstance(schema, dict):
            return
        name = schema.get("$id")
        if isinstance(name, str):
            uri, fragment = urldefrag(urljoin(base, name))
            if fragment:
                self._anchors[f"{uri}#{fragment}"] = pointer  # draft 7 names anchors by `$id`
            if name[:1] != "#":
                base = uri
                self._resources[uri] = pointer
                self._bases[pointer] = uri
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors[f"{base}#{schema[keyword]}"] = pointer
        for below, item in subschemas(schema):
            self._walk(item, pointer + below, base)


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside `schema`, each with the pointer that leads to it."""
    for keyword in MAPS:
        inner = schema.get(keyword)
        if isinstance(inner, dict):
            for name, item in inner.items():
                yield f"/{keyword}/{escape(name)}", item
    for keyword in LISTS:
        inner = schema.get(keyword)
        if isinstance(inner, list):
            for i, item in enumerate(inner):
                yield f"/{keyword}/{i}", item
    for keyword in SINGLES:
        if isinstance(schema.get(keyword), (dict, bool)):
            yield f"/{keyword}", schema[keyword]


def escape(name: str) -> str:
    """A name as one part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _parts(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
