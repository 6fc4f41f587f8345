"""All attributes of the micro-world, by kind."""

from __future__ import annotations

from bench.sprout.attribute import Attribute, Kind
from bench.sprout.people import PEOPLE
from bench.sprout.places import COMPANIES, PLACES

ATTRIBUTES: tuple[Attribute, ...] = (*PEOPLE, *PLACES, *COMPANIES)
BY_KIND: dict[Kind, tuple[Attribute, ...]] = {"person": PEOPLE, "place": PLACES, "company": COMPANIES}
