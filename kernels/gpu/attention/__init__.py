"""Attention on GPUs over the KV store: decode, extend, shared prefixes and prefill, and the buffers of a step.

Each layer of a paged step on a GPU launches one or two of these kernels. A shared prefix is read once for its rows,
any other K and V once for each row. FlashInfer's kernels run only where an option names them.
"""
