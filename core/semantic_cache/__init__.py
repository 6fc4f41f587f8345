"""Answers by meaning: a cache in front of the model for prompts that say nearly the same as an earlier one.

Opt-in (`Runtime(semantic_cache=...)`): a runtime without it pays one comparison with None for each submission. With it,
each greedy request costs one embedding and a product with the embeddings of the entries whose context is equal.
"""
