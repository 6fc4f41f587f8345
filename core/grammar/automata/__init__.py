"""Regular languages over bytes: from AST nodes to a compressed DFA with counters."""
