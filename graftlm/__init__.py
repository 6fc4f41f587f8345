"""GraftLM."""
