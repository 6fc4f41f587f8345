"""Whether a schema has parts that must differ, as its text tells before it is read."""

from __future__ import annotations

import re

from graftlm.core.grammar.schema.member_names import may_count_names
from graftlm.core.grammar.spec import JsonSchema

_STANDARD = re.compile(r'"(?:\$ref|\$dynamicRef|\$id|id)":"https?://json-schema\.org/')
"""A schema that refers to a metaschema, which has `uniqueItems`; the metaschema is no part of its text."""


def has_distinct_parts(spec: JsonSchema) -> bool:
    """Whether items, or names of members, may have to differ."""
    text = spec.text + spec.documents_text
    return '"uniqueItems":true' in text or _STANDARD.search(text) is not None or may_count_names(spec)
