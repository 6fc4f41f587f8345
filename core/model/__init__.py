"""Loading of a model: its description, weights and lane, and the kernels it needs.

load.py has the order. A model is loaded once a process; the cost is reading its weights, a forward of the original and
the compilation of kernels that no cache has. Before the load, description.py and source.py answer from the
configuration and tokenizer alone. known_models.py keeps on disk the results of a load, for later processes.
"""
