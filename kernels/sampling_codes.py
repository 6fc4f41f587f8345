"""Codes in place of a token where none could be sampled."""

NOT_FINITE = -1
"""Code of a row with a NaN logit, or an infinite maximum."""

NOTHING_ALLOWED = -2
"""Code of a row whose logits are all -inf."""
