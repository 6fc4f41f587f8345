"""Between callers and the engine: one thread owns it, and results pass to futures, streams and event loops.

Each request passes here twice, on submission and at its end, and a streamed one once per chunk. Requests may wait for
others that arrive with them: at most 10 ms of an event loop's turn, and 50 ms for callers that return together
(docs/engineering.md lists the waits).
"""
