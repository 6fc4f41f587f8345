"""Codes that stand in place of a token where none could be drawn."""

NOT_FINITE = -1
"""A logit is NaN, or the largest is infinite."""

NOTHING_ALLOWED = -2
"""All logits are -inf."""
