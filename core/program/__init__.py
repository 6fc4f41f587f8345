"""The language: programs of `gen`, `select`, `fork` and `join`, and the thread that interprets them.

Each expression that a program appends is executed once, on one thread for all programs of the process. A model call
holds no thread; calls that are due together become one submission. `select` runs one request per choice that adds
tokens to the trie of choices.
"""
