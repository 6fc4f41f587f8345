"""Quantised checkpoints: which formats can be read, checked before any weight is.

Runs once a load; the cost is reading the headers of the weight files.
"""
