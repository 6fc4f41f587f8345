"""Walks of the trie along an automaton: which tokens it can read from one place."""
