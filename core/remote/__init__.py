"""A model behind an OpenAI-compatible API: its options, the engine and the endpoint, which sends every request.

Each request or `gen` of a program is one call, or none if speculation answers it. Measured at a server that answers at
once: a call takes 0.05 ms longer than the 1.1 ms of the bare SDK (docs/remote.md, case `overhead`).
"""
