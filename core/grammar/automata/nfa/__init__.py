"""Nondeterministic byte automata: built from nodes, kept for bodies that many grammars share."""
