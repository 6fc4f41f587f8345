"""Typical schemas and patterns, for the cases of this folder and for the tests."""

from __future__ import annotations

from typing import Any

from graftlm import Choices, JsonSchema, Regex
from graftlm.core.grammar.spec import Spec

Schema = dict[str, Any]


def record(**properties: Any) -> Schema:
    """Build the schema of a closed object with all properties required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def of(kind: str, **rest: Any) -> Schema:
    return {"type": kind, **rest}


def listed(items: Schema, **rest: Any) -> Schema:
    return {"type": "array", "items": items, **rest}


TEXT, WHOLE, REAL, FLAG = of("string"), of("integer"), of("number"), of("boolean")
ADDRESS = record(street=TEXT, city=TEXT, zip=TEXT)

FLAT = record(name=TEXT, age=WHOLE, email=TEXT, active=FLAG, score=REAL, role={"enum": ["admin", "user", "guest"]})
NESTED = record(
    order_id=TEXT,
    customer=record(first_name=TEXT, last_name=TEXT, address=ADDRESS),
    items=listed(record(sku=TEXT, quantity=WHOLE, unit_price=REAL)),
    tags=listed(TEXT),
)
EMPLOYEE = record(
    employee_id=WHOLE,
    first_name=TEXT,
    last_name=TEXT,
    preferred_name={"anyOf": [TEXT, of("null")]},
    work_email=TEXT,
    phone_number={"anyOf": [TEXT, of("null")]},
    department={"enum": ["engineering", "sales", "marketing", "finance", "operations"]},
    job_title=TEXT,
    seniority_level={"enum": ["junior", "mid", "senior", "staff", "principal"]},
    manager_id={"anyOf": [WHOLE, of("null")]},
    start_date=of("string", pattern="^(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$"),
    is_remote=FLAG,
    office_location=TEXT,
    annual_salary=REAL,
    currency_code={"enum": ["USD", "EUR", "GBP", "JPY"]},
    skills=listed(TEXT),
    languages_spoken=listed(TEXT),
    performance_rating=WHOLE,
    vacation_days_remaining=WHOLE,
    emergency_contact=record(contact_name=TEXT, relationship=TEXT, contact_phone=TEXT),
)

CLOSED: dict[str, Schema] = {
    "flat": FLAT,
    "nested": NESTED,
    "employee": EMPLOYEE,
    "optional": {"type": "object", "properties": {"a": WHOLE, "b": TEXT, "c": FLAG}},
    "some required": {"type": "object", "properties": {"a": WHOLE, "b": TEXT, "c": FLAG}, "required": ["c"]},
    "map of numbers": {"type": "object", "additionalProperties": REAL},
    "map beside fields": {"type": "object", "properties": {"id": WHOLE}, "additionalProperties": TEXT},
    "map of few": {"type": "object", "additionalProperties": FLAG, "maxProperties": 3, "minProperties": 1},
    "names by pattern": {"type": "object", "patternProperties": {"^x-[a-z]+$": TEXT}, "additionalProperties": False},
    "names restricted": {"type": "object", "propertyNames": {"maxLength": 4}, "additionalProperties": WHOLE},
    "percent": of("integer", minimum=0, maximum=100),
    "below zero": of("number", exclusiveMaximum=0, minimum=-273.15),
    "probability": of("number", minimum=0, exclusiveMaximum=1),
    "even": of("integer", multipleOf=2, minimum=10),
    "cents": of("number", multipleOf=0.01, minimum=0, maximum=1000),
    "short text": of("string", maxLength=12),
    "long text": of("string", minLength=3, maxLength=400),
    "code": of("string", pattern="^[A-Z]{3}-[0-9]{4}$"),
    "word of length": of("string", pattern="^[a-z]+$", minLength=2, maxLength=8),
    "contains digit": of("string", pattern="[0-9]", maxLength=20),
    "date": of("string", format="date"),
    "date-time": of("string", format="date-time"),
    "time": of("string", format="time"),
    "uuid": of("string", format="uuid"),
    "email": of("string", format="email"),
    "ipv4": of("string", format="ipv4"),
    "ipv6": of("string", format="ipv6"),
    "uri": of("string", format="uri"),
    "hostname": of("string", format="hostname"),
    "duration": of("string", format="duration"),
    "pair": {"type": "array", "prefixItems": [WHOLE, TEXT], "items": False, "minItems": 2},
    "tuple and rest": {"type": "array", "prefixItems": [TEXT], "items": WHOLE, "maxItems": 4},
    "matrix": listed(listed(REAL, minItems=2, maxItems=2), minItems=1, maxItems=3),
    "odd names": record(**{'a"b': WHOLE, "c\\d": FLAG, "é\n": of("null"), "": TEXT}),
    "constants": {"enum": ['a"b', "c\\d", "é", "\n", 1, 2.5, None, True, {"k": [1, "x"]}, []]},
    "tagged union": {
        "oneOf": [
            record(kind={"const": "circle"}, radius=REAL),
            record(kind={"const": "square"}, side=of("number", minimum=0)),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"id": WHOLE}, "required": ["id"]},
            {"type": "object", "properties": {"name": of("string", maxLength=5)}, "required": ["name"]},
        ]
    },
    "shared definition": {
        "$defs": {"point": record(x=REAL, y=REAL)},
        **record(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "needs another": {
        "type": "object",
        "properties": {"card": WHOLE, "address": TEXT},
        "dependentRequired": {"card": ["address"]},
    },
    "nullable": {"type": ["string", "null"], "maxLength": 6},
}

CONTEXT_FREE: dict[str, Schema] = {
    "any object": {"type": "object"},
    "free field": record(id=WHOLE, payload={}),
    "linked list": {
        "$defs": {"node": record(value=WHOLE, next={"anyOf": [{"$ref": "#/$defs/node"}, of("null")]})},
        "$ref": "#/$defs/node",
    },
    "tree": {
        "$defs": {"tree": record(name=of("string", maxLength=8), children=listed({"$ref": "#/$defs/tree"}))},
        "$ref": "#/$defs/tree",
    },
    "expression": {
        "$defs": {
            "value": {"anyOf": [REAL, record(op={"enum": ["+", "*"]}, args=listed({"$ref": "#/$defs/value"}))]},
        },
        "$ref": "#/$defs/value",
    },
}

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
PATTERNS: dict[str, str] = {
    "letters and digits": r"[a-z]{3}-[0-9]{4}",
    "e-mail": r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
    "day": r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "phone": r"\+1 \([0-9]{3}\) [0-9]{3}-[0-9]{4}",
    "octets": rf"(?:{_OCTET}\.){{3}}{_OCTET}",
    "steps": r"(?:Step \d+: [^\n]{1,80}\n){1,5}Answer: -?\d+",
    "any case": r"(?i:yes|no|maybe)[.!?]?",
    "unicode": r"[а-яё]+ [\w']{2,10}",
}
CHOICES = ["northwest", "northeast", "southwest", "southeast", "unknown"]


def everything() -> dict[str, Spec]:
    """Return all constraints by name."""
    return {
        **{name: JsonSchema(schema) for name, schema in (CLOSED | CONTEXT_FREE).items()},
        **{name: Regex(pattern) for name, pattern in PATTERNS.items()},
        "choices": Choices(CHOICES),
    }
