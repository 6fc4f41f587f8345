"""Triton kernels compiled ahead of their first launch, in parallel, in separate processes.

A start of a model on a GPU launches a few dozen kernels, which compile here once a machine; later starts find them in
Triton's cache. The cost is a dry run of one layer of each kind, and a compile server that takes seconds to start.
"""
