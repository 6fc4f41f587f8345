"""Attention on CPUs over the KV store: the backend, the metadata of a step, and the compiled decode and prefill paths.

Every layer of a step on a CPU runs here, or in the compiled decoder layers (decoder/) with the loops of this folder. A
step's metadata is computed once for all layers with one window.
"""
