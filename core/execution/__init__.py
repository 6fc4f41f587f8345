"""One forward pass of a step: a ragged batch over paged KV, a CUDA graph, or one sequence at a time.

Every step of a local model runs here once. The host launches the kernels of each layer, which a CUDA graph replaces by
one launch; the serial lane calls transformers once per sequence and token, for models without paged kernels.
"""
