"""Token masks: which tokens may follow at a place of an automaton, as bits, and the tokens that must follow.

masks.py fills the mask of a place, mask_rows.py caches it and workers.py computes rows ahead in threads. trie.py is the
vocabulary's trie, trie_walk.py and stack_walk.py traverse it along an automaton. slices.py and self_loops.py spare most
of that inside a repeated class of characters, where a trie traversal of 128k tokens takes a millisecond. Every
constrained decode row needs one mask a step: 3 us for a cached one.
"""
