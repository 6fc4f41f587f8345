"""Read the keywords of a schema into shapes, with references resolved and unsupported keywords reported.

Every JSON schema passes here once, before its cache entry exists. `unevaluated.py` serves 3 public schemas in 100,
`contents.py` 43, the other files nearly all. The cost grows with the number of subschemas, each read once.
"""
