"""Continuous batching: which sequences run in a step, and how their requests start and end."""
