"""Continuous batching: the sequences of each step, and how their requests start, retry and end.

Every step is planned here once, on the engine's thread; the cost grows with the running sequences. Admission visits
waiting requests only when a sequence ends or KV becomes free.
"""
