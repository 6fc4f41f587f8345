"""Tokenisation and detokenisation."""
