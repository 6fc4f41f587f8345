"""NFAs: the builder from nodes, the edges as arrays, and their compiled loops.

Every automaton is built from an NFA, one per regular language or pushdown automaton. A cache of rule bodies gained
nothing: 566 MaskBench schemas took 4.9 s of CPU time without it and 5.2 s with it.
"""
