"""Typical answers to the closed schemas, with the least share of their tokens that must be forced."""

from __future__ import annotations

import json
from typing import Any

ADDRESS = {"street": "12 Navy Yard Rd", "city": "Arlington", "zip": "22202"}
ANSWERS: dict[str, list[Any]] = {
    "flat": [
        {"name": "Ada Lovelace", "age": 36, "email": "ada@engine.org", "active": True, "score": 98.5, "role": "admin"},
        {"name": "Søren K.", "age": 42, "email": "sk@example.dk", "active": False, "score": -3.25, "role": "guest"},
        {"name": 'O\'Neil "Ted" Smith', "age": 7, "email": "t@x.io", "active": True, "score": 0, "role": "user"},
    ],
    "nested": [
        {
            "order_id": "A-10293",
            "customer": {"first_name": "Grace", "last_name": "Hopper", "address": ADDRESS},
            "items": [
                {"sku": "SKU-1", "quantity": 2, "unit_price": 19.99},
                {"sku": "SKU-99", "quantity": 1, "unit_price": 5},
            ],
            "tags": ["gift", "express"],
        },
        {
            "order_id": "B-1",
            "customer": {"first_name": "Li", "last_name": "Wei", "address": {**ADDRESS, "city": "上海"}},
            "items": [],
            "tags": [],
        },
    ],
    "employee": [
        {
            "employee_id": 1042,
            "first_name": "Maria",
            "last_name": "Gonzalez",
            "preferred_name": None,
            "work_email": "maria.gonzalez@example.com",
            "phone_number": "+1 555 0100",
            "department": "engineering",
            "job_title": "Site Reliability Engineer",
            "seniority_level": "senior",
            "manager_id": 17,
            "start_date": "2019-04-15",
            "is_remote": True,
            "office_location": "Lisbon, Portugal",
            "annual_salary": 91250.5,
            "currency_code": "EUR",
            "skills": ["kubernetes", "python", "incident response"],
            "languages_spoken": ["Portuguese", "English"],
            "performance_rating": 4,
            "vacation_days_remaining": 11,
            "emergency_contact": {"contact_name": "Jose", "relationship": "brother", "contact_phone": "+351 555"},
        }
    ],
}
FORCED_PERCENT = {"flat": 25, "nested": 34, "employee": 39}  # at least


def compact(value: Any) -> bytes:
    """JSON without spaces, UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
