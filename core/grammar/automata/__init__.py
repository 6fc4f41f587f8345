"""Regular languages over bytes: from AST nodes to a compressed DFA with counters, and pushdown automata of calls.

Of 100 public schemas 93 build an NFA here; 18 end as a DFA and 75 as a pushdown automaton. A regex ends as a DFA. The
compiled loops of this folder are most of the time of a large schema, once: results are cached by schema.
"""
