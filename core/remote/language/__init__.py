"""Programs at an endpoint: branches, turns, values, constraints and scored choices.

Runs once for each value of a program. Constraints are compiled once and checked on every answer; a value without the
required form costs further requests, at most `max_attempts`.
"""
