"""API speculative execution: one call fetches tokens beyond a stop, which answer later texts and gens of a program.

Runs once for each gen of a program with `num_api_spec_tokens`. It saves the calls whose values the surplus contains;
its price is the surplus tokens that nothing uses, which the ledger counts.
"""
