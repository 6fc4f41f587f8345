"""Whether a schema has parts that must differ, as its text tells before it is read."""

from __future__ import annotations

import re

from graftlm.core.grammar.schema.member_names import may_count_names
from graftlm.core.grammar.spec import JsonSchema

_STANDARD = re.compile(r'"(?:\$ref|\$dynamicRef|\$id|id)":"https?://json-schema\.org/')
"""A schema that refers to a metaschema, which has `uniqueItems`; the metaschema is no part of its text."""

_METASCHEMAS = "://json-schema.org/"


def has_distinct_parts(spec: JsonSchema) -> bool:
    """Whether items, or names of members, may have to differ."""
    text = spec.text + spec.documents_text
    return '"uniqueItems":true' in text or _refers_to_standard(spec, text) or may_count_names(spec)


def _refers_to_standard(spec: JsonSchema, text: str) -> bool:
    """Whether anything but the root's `$schema` names a metaschema so; the search of the pattern takes longer."""
    draft = spec.schema.get("$schema") if isinstance(spec.schema, dict) else None
    num_own = isinstance(draft, str) and draft.count(_METASCHEMAS)
    return text.count(_METASCHEMAS) > num_own and _STANDARD.search(text) is not None
