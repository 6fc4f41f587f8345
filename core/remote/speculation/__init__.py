"""API speculative execution."""
