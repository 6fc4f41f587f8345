"""The process of one engine in a comparison: its rounds, and their counts, calls and errors.

Counting costs microseconds a call. Token ids and phases are noted in one further round, which is part of no ratio.
"""
