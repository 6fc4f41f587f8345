"""Where `$ref` leads: JSON pointers, `$id`, anchors and dynamic anchors in one schema and the documents beside it.

A target is a JSON pointer into the schema, "" for its root, or `URI#pointer` into another document.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from graftlm.core.errors import GrammarError

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLES = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_HOLDING = frozenset((*MAPS, *LISTS, *SINGLES))


class References:
    """Resolves the references of a schema and of the `documents` that may be referred to, each under its URI.

    A schema without `$id` has the base URI "". Nothing is fetched: a reference to anything else is an error.
    """

    def __init__(
        self,
        schema: Any,
        documents: Mapping[str, Any] | None = None,
        text: str | None = None,
        documents_text: str | None = None,
    ) -> None:
        """The texts of `schema` and of `documents`, as JSON without blanks, show where none inside has a name."""
        others = (documents or {}).values()
        in_documents = documents_text is None or _names_inside(documents_text, *others)
        self._documents = {urldefrag(uri)[0]: document for uri, document in (documents or {}).items()} | {"": schema}
        self._resources: dict[str, str] = {}  # URI without fragment -> target
        self._anchors: dict[str, str] = {}  # URI with fragment -> target
        self._dynamic: dict[str, str] = {}  # the same of dynamic anchors; `$recursiveAnchor` has an empty name
        self._bases: dict[str, str] = {}  # target of a resource -> its URI
        self._drafts: dict[str, int | None] = {}  # the same -> its draft
        self._targets: dict[tuple[str, str], str] = {}  # what base URIs and references led to
        self._values: dict[str, Any] = {}  # the schemas at targets that were asked for
        self._next: dict[str, set[str]] = {}  # the resources that a resource leads to
        for uri, document in list(self._documents.items()):
            named = text is None or _names_inside(text, schema) if document is schema else in_documents
            self._enter(uri, document, below=named)

    def _enter(self, uri: str, document: Any, *, below: bool = True) -> None:
        key = f".{uri}" if uri.startswith("/") else uri  # a target that begins with "/" is a pointer into the schema
        self._documents[key] = document
        target = f"{key}#" if uri else ""
        self._resources[uri], self._bases[target], self._drafts[target] = target, uri, None
        self._walk(document, target, uri, None, below=below)

    def target(self, reference: str, place: str) -> str:
        """What `reference`, the value of the keyword at `place`, leads to."""
        key = (self._bases[self._resource(place)], reference)
        found = self._targets.get(key)
        if found is None:
            found = self._targets[key] = self._target(reference, place)
        return found

    def _target(self, reference: str, place: str) -> str:
        uri, fragment = self._absolute(reference, place)
        if uri not in self._resources and (found := _metaschema(uri)) is not None:
            self._enter(uri, found)
        resource = self._resources.get(uri)
        if resource is None:
            raise GrammarError(
                f"{place}: {reference!r} leads out of this document, and nothing is fetched; copy the definition into "
                f"$defs, or pass the other schema as documents={{{uri!r}: ...}}{self._meant(reference)}",
                pointer=place,
            )
        if not fragment:
            return resource
        if fragment.startswith("/"):
            self.schema(resource + fragment, reference, place)
            return resource + fragment
        anchor = self._anchors.get(f"{uri}#{fragment}")
        if anchor is None:
            hint = self._meant(fragment) or "; give the schema that is meant an $anchor, or name it by '#/$defs/...'"
            raise GrammarError(f"{place}: {reference!r} names no $anchor of this document{hint}", pointer=place)
        return anchor

    def _meant(self, reference: str) -> str:
        """A hint where `reference` is a pointer into the schema but for how it begins."""
        pointer = "/" + reference.lstrip("#/")
        for known in (pointer, f"/$defs{pointer}", f"/definitions{pointer}"):
            try:
                self.schema(known)
            except GrammarError:
                continue
            return f"; did you mean '#{known}'?"
        return ""

    def dynamic_target(self, reference: str, place: str) -> str | None:
        """The same for `$dynamicRef` and `$recursiveRef`; None where the way that led to `place` decides."""
        target = self.target(reference, place)
        uri, fragment = self._absolute(reference, place)
        if f"{uri}#{fragment}" not in self._dynamic:
            return target
        # the outermost resource with this anchor counts, and the outermost of all is always the schema's root
        outermost = self._dynamic.get(f"{self._bases['']}#{fragment}")
        if outermost is not None:
            return outermost
        rivals = {found for name, found in self._dynamic.items() if name.partition("#")[2] == fragment}
        return target if rivals == {target} else self._outermost(fragment, self._resource(place))

    def _outermost(self, fragment: str, resource: str) -> str | None:
        """The dynamic anchor that every way from the root to `resource` meets first; None where ways differ."""
        before = self._reached("", fragment)
        first = {found for found in before if self._anchored(found, fragment) is not None}
        ways = {found: self._reached(found) for found in first}
        possible = [found for found in first if resource in ways[found]]
        if len(possible) != 1 or (resource in before and resource not in first):
            return None
        if not fragment and any(self._anchored(found, fragment) is None for found in ways[possible[0]]):
            return None  # a resource without `$recursiveAnchor` ends the search for the outermost one
        return self._anchored(possible[0], fragment)

    def _anchored(self, resource: str, fragment: str) -> str | None:
        return self._dynamic.get(f"{self._bases[resource]}#{fragment}")

    def _reached(self, resource: str, fragment: str | None = None) -> set[str]:
        """The resources that `resource` leads to, itself among them; not beyond those with the dynamic anchor."""
        found, work = {resource}, [resource]
        while work:
            at = work.pop()
            if fragment is None or self._anchored(at, fragment) is None:
                new = self._leads_to(at) - found
                found |= new
                work += new
        return found

    def _leads_to(self, resource: str) -> set[str]:
        """The resources that lie directly in `resource`, or that something in it may refer to."""
        if resource not in self._next:
            found: set[str] = set()
            work = [(self.schema(resource), resource, "")]  # what lies under which keyword, "" for a schema
            while work:
                value, target, keyword = work.pop()
                inner: list[tuple[Any, str, str]] = []
                if isinstance(value, dict):
                    inner = [
                        (item, f"{target}/{escape(name)}", "" if keyword else name) for name, item in value.items()
                    ]
                    found |= self._referred(value, target) if not keyword else set()
                elif isinstance(value, list):
                    inner = [(item, f"{target}/{i}", "") for i, item in enumerate(value)]
                for item, place, name in inner:
                    if place not in self._bases:
                        work.append((item, place, name if name in MAPS else ""))
                    elif keyword not in ("$defs", "definitions"):  # which nothing enters but by reference
                        found.add(place)
            self._next[resource] = found
        return self._next[resource]

    def _referred(self, schema: dict[str, Any], target: str) -> set[str]:
        found: set[str] = set()
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            reference, place = schema.get(keyword), f"{target}/{keyword}"
            if not isinstance(reference, str):
                continue
            with suppress(GrammarError):  # that is an error where the schema is read
                found.add(self._resource(self.target(reference, place)))
                if keyword != "$ref":
                    fragment = self._absolute(reference, place)[1]
                    found |= {resource for resource in self._bases if self._anchored(resource, fragment) is not None}
        return found

    def schema(self, target: str, reference: str = "", place: str = "") -> Any:
        """The value at `target`, which `reference` at `place` names.

        Raises GrammarError that names the nearest definition when there is none.
        """
        if target in self._values:  # of a reference that was met
            return self._values[target]
        uri, pointer = ("", target) if target[:1] in ("", "/") else target.split("#", 1)
        value = self._documents[uri]
        for part in _parts(pointer):
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
        self._values[target] = value
        return value

    def draft(self, target: str) -> int | None:
        """The draft that the schema at `target` is written in (4, 6, 7, 2019, 2020), where `$schema` says so."""
        return self._drafts[self._resource(target)]

    def _absolute(self, reference: str, place: str) -> tuple[str, str]:
        base = self._bases[self._resource(place)]
        if _PLAIN_FRAGMENT.fullmatch(reference):
            return base, reference[1:]
        # urljoin knows nothing of fragments after schemes such as urn:
        uri, fragment = urldefrag(base + reference if reference[:1] == "#" else urljoin(base, reference))
        return uri, unquote(fragment)

    def _resource(self, target: str) -> str:
        """The resource that `target` lies in: the nearest schema around it with a URI of its own."""
        if len(self._bases) == 1:
            return ""
        while target not in self._bases:
            target = target.rpartition("/")[0]
        return target

    def _walk(self, schema: Any, target: str, base: str, draft: int | None, *, below: bool = True) -> None:
        if not isinstance(schema, dict):
            return
        if target in self._drafts or not schema.keys().isdisjoint(_NAMING):
            draft = draft_of(schema["$schema"]) if isinstance(schema.get("$schema"), str) else draft
            if target in self._drafts:
                self._drafts[target] = draft
            if not ("$ref" in schema and ref_stands_alone(draft)):
                base = self._name(schema, target, base, draft)
        for pointer, item in subschemas(schema) if below else ():
            self._walk(item, target + pointer, base, draft)

    def _name(self, schema: dict[str, Any], target: str, base: str, draft: int | None) -> str:
        """Note the names that `schema` gives itself; return its base URI."""
        name = schema.get("id" if draft == 4 else "$id")
        if isinstance(name, str):
            uri, fragment = urldefrag(urljoin(base, name))
            if fragment:
                self._anchors[f"{uri}#{fragment}"] = target  # up to draft 7, `$id` names anchors as well
            if name[:1] != "#":
                base = uri
                self._resources[uri], self._bases[target], self._drafts[target] = target, uri, draft
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors[f"{base}#{schema[keyword]}"] = target
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._dynamic[f"{base}#{schema['$dynamicAnchor']}"] = target
        if schema.get("$recursiveAnchor") is True:
            self._dynamic[f"{base}#"] = target
        return base


def _metaschema(uri: str) -> Any:
    """The schema of schemas at `uri`, where jsonschema is installed, which has them all; else None."""
    if "://json-schema.org/" not in uri or importlib.util.find_spec("jsonschema_specifications") is None:
        return None
    found = _metaschemas().get(uri)
    if found is not None:
        return found
    registry: Any = importlib.import_module("jsonschema_specifications").REGISTRY
    return registry.contents(uri) if uri in registry else None


@lru_cache(maxsize=1)
def _metaschemas() -> dict[str, Any]:
    """Those that lie in files of their own, by their URIs: reading them takes a twentieth of importing the registry."""
    spec = importlib.util.find_spec("jsonschema_specifications")
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [path for folder in folders or () for path in Path(folder, "schemas").rglob("*") if path.is_file()]
    found: dict[str, Any] = {}
    for path in paths:
        with suppress(OSError, ValueError):
            schema = json.loads(path.read_text(encoding="utf-8"))
            name = (schema.get("$id") or schema.get("id")) if isinstance(schema, dict) else None
            if isinstance(name, str):
                found[urldefrag(name)[0]] = schema
    return found


def _names_inside(text: str, *schemas: Any) -> bool:
    """Whether anything inside `schemas`, whose text it is, may be named, or written in another draft."""
    whole = [schema for schema in schemas if isinstance(schema, dict)]
    names = _NAMES if 'nchor":' in text else _NAMES[:3]
    own = sum([isinstance(schema.get(name), str) for schema in whole for name in names])
    if sum([text.count(f'"{name}":"') for name in names]) > own:
        return True
    own_recursive = sum([schema.get("$recursiveAnchor") is True for schema in whole])
    return names is _NAMES and text.count('"$recursiveAnchor":true') > own_recursive


_PLAIN_FRAGMENT = re.compile(r"#[\w/.-]*")
_NAMES = ("$id", "id", "$schema", "$anchor", "$dynamicAnchor")  # anchors last
_NAMING = frozenset((*_NAMES, "$recursiveAnchor"))


def draft_of(uri: str) -> int | None:
    """The draft that a metaschema's URI names; None for others."""
    found = re.search(r"json-schema\.org/(?:draft-0([4567])|draft/(2019|2020))", uri)
    return int(found[1] or found[2]) if found else None


def ref_stands_alone(draft: int | None) -> bool:
    """Up to draft 7 the keywords beside `$ref` say nothing."""
    return draft is not None and draft <= 7


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside `schema`, each with the pointer that leads to it."""
    if schema.keys().isdisjoint(_HOLDING):  # most have none
        return
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
    if "~" not in name and "/" not in name:
        return name
    return name.replace("~", "~0").replace("/", "~1")


def _parts(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
